"""The fast forward pass compared with the library's own forward pass and Arbor's attention, on one model.

    OMP_NUM_THREADS=1 python benchmarks/library_path.py --json

Models of families without a fast forward pass use the library's. Measured with the embedded model on one CPU thread:
sampling of 64 completions of 48 tokens for 8 prompts with 64 and with 4 concurrent requests, and one update with the
sampled tokens. Seconds are CPU time, so that other processes do not count. The two execution paths alternate; the best
of `--repeats` is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from unittest.mock import patch

import arborl  # noqa: F401  # imported before torch, as in a training run

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

PROMPTS, GROUP_SIZE, PROMPT, ANSWER = 8, 8, 96, 48


def measure_path(lean: bool) -> tuple[float, float, float]:
    """CPU seconds of sampling with 64 and with 4 concurrent requests, and of an update."""
    patches = (
        patch("arborl.models.fast_forward.FAST_MODEL_CLASSES", ()),
        patch("arborl.engines.local.fused_forward.FAST_MODEL_CLASSES", ()),
    )
    model = load_model(resolve("seedling"), device="cpu")
    if not lean:
        for one in patches:
            one.start()
    try:
        assert has_fast_forward(model) == lean
        engines = [
            LocalEngine(model, max_context=256, max_requests=num_requests, kv_tokens=256 * 96)
            for num_requests in (64, 4)
        ]
        assert all(engine.runner.forward.is_fused == lean for engine in engines)  # type: ignore[attr-defined]
        learner = Learner(model, LearnerConfig(lr=1e-9), Sampling())
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(0, 2000, PROMPT).tolist()) for _ in range(PROMPTS)]

        async def sample_call(engine: LocalEngine, prompt: tuple[int, ...], seed: int) -> Call:
            return Call(prompt, await engine.generate(prompt, Sampling(ANSWER, seed=seed), session=str(seed)), 0)

        async def sample_all(engine: LocalEngine) -> list[Call]:
            return await asyncio.gather(
                *(
                    sample_call(engine, prompt, 99 * n + i)
                    for n, prompt in enumerate(prompts)
                    for i in range(GROUP_SIZE)
                )
            )

        seconds = []
        for engine in engines:
            began = time.process_time()
            calls = asyncio.run(sample_all(engine))
            seconds.append(time.process_time() - began)
        groups = []
        for n in range(PROMPTS):
            task, group_calls = Task(str(n)), calls[n * GROUP_SIZE : (n + 1) * GROUP_SIZE]
            episodes = [
                Episode(str(i), task, calls=[call], rewards={"r": i % 2.0}) for i, call in enumerate(group_calls)
            ]
            groups.append(Group(task, episodes))
        algorithm, forest = make_algorithm(AlgorithmConfig(name="grpo")), build_token_trees(groups)
        terms = algorithm.credit(groups, forest.terms)
        learner.update(forest.trees, terms, algorithm)  # execution paths are checked in the first update
        began = time.process_time()
        learner.update(forest.trees, terms, algorithm)
        return seconds[0], seconds[1], time.process_time() - began
    finally:
        if not lean:
            for one in patches:
                one.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = {True: [measure_path(True)], False: [measure_path(False)]}
    for _ in range(args.repeats - 1):
        for lean in times:
            times[lean].append(measure_path(lean))
    result: dict[str, object] = {}
    for i, label in enumerate(("64 live", "4 live", "update")):
        lean, library = (min(run[i] for run in times[is_fast]) for is_fast in (True, False))
        result |= {f"{label}, lean s": round(lean, 3), f"{label}, library s": round(library, 3)}
        result[f"{label}, times as fast"] = round(library / lean, 2)
    result |= {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result) if args.json else "\n".join(f"{name:<28} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
