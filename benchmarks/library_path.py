"""One model two ways: by the lean forward pass, and by the library's own code with our attention, as other families go.

    OMP_NUM_THREADS=1 python benchmarks/library_path.py --json

The embedded model on one CPU thread: sampling of 64 answers of 48 tokens to 8 prompts, all at once and 4 at a time, and
an update over what was sampled. Seconds are of processor time, so that neighbours do not count; the best of
`--repeats` of each, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from unittest.mock import patch

import arborl  # noqa: F401  # before torch, as everyone does who starts a run

# isort: split
import numpy as np
import torch
import transformers

from arborl.algorithms import make_algorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.learner.core.learner import Learner
from arborl.models.fast_forward import has_fast_forward
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, Group, Sampling, Task

PROMPTS, SIBLINGS, PROMPT, ANSWER = 8, 8, 96, 48


def one_way(lean: bool) -> tuple[float, float, float]:
    """Seconds of sampling all at once, of sampling few at a time, and of an update."""
    kinds = (
        patch("arborl.models.fast_forward.FAST_MODEL_CLASSES", ()),
        patch("arborl.engines.local.fused_forward.FAST_MODEL_CLASSES", ()),
    )
    model = load_model(resolve("seedling"), device="cpu")
    if not lean:
        for one in kinds:
            one.start()
    try:
        assert has_fast_forward(model) == lean
        engines = [LocalEngine(model, max_context=256, max_requests=live, kv_tokens=256 * 96) for live in (64, 4)]
        assert all(engine.runner.forward.is_fused == lean for engine in engines)  # type: ignore[attr-defined]
        learner = Learner(model, LearnerConfig(lr=1e-9), Sampling())
        chance = np.random.default_rng(0)
        starts = [tuple(chance.integers(0, 2000, PROMPT).tolist()) for _ in range(PROMPTS)]

        async def ask(engine: LocalEngine, start: tuple[int, ...], seed: int) -> Call:
            return Call(start, await engine.generate(start, Sampling(ANSWER, seed=seed), session=str(seed)), 0)

        async def play(engine: LocalEngine) -> list[Call]:
            return await asyncio.gather(
                *(ask(engine, start, 99 * n + i) for n, start in enumerate(starts) for i in range(SIBLINGS))
            )

        seconds = []
        for engine in engines:
            began = time.process_time()
            calls = asyncio.run(play(engine))
            seconds.append(time.process_time() - began)
        groups = []
        for n in range(PROMPTS):
            task, some = Task(str(n)), calls[n * SIBLINGS : (n + 1) * SIBLINGS]
            made = [Episode(str(i), task, calls=[call], rewards={"r": i % 2.0}) for i, call in enumerate(some)]
            groups.append(Group(task, made))
        algorithm, forest = make_algorithm(AlgorithmConfig(name="grpo")), build_token_trees(groups)
        terms = algorithm.credit(groups, forest.terms)
        learner.update(forest.trees, terms, algorithm)  # ways are checked at the first
        began = time.process_time()
        learner.update(forest.trees, terms, algorithm)
        return seconds[0], seconds[1], time.process_time() - began
    finally:
        if not lean:
            for one in kinds:
                one.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {True: [one_way(True)], False: [one_way(False)]}
    for _ in range(given.repeats - 1):
        for lean in found:
            found[lean].append(one_way(lean))
    told: dict[str, object] = {}
    for i, what in enumerate(("64 live", "4 live", "update")):
        lean, library = (min(run[i] for run in found[way]) for way in (True, False))
        told |= {f"{what}, lean s": round(lean, 3), f"{what}, library s": round(library, 3)}
        told[f"{what}, times as fast"] = round(library / lean, 2)
    told |= {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(told) if given.json else "\n".join(f"{name:<28} {value}" for name, value in told.items()))


if __name__ == "__main__":
    main()
