"""One GRPO step with long episodes: time and memory of rollout, token trees and update, by context length.

    python benchmarks/long_context.py --device cuda --model 0.5b --contexts 8192 32768 131072 --json
    python benchmarks/long_context.py --device cuda --model smollm2 --contexts 2048 8192 --json
    python benchmarks/long_context.py --device cpu --model tiny --contexts 1024 4096 16384 --json

A step has `--episodes` episodes of one task, each a conversation of turns that observe `--observed` tokens and sample
`--sampled` tokens until the context is full; all are in the engine at the same time. Every other episode is rewarded.
Every length has the same episodes and turns of the same size, so a length that is four times longer has four times as
many tokens and turns. `growth` is the exponent of a time or of memory between two lengths: 1 is linear. `attended` is
the number of pairs of a token and an earlier token of its context, the work of attention: nothing should grow faster
than it. The first step of each length is a warm-up; the second is reported
(`--no-warm-up` reports the first, which includes compilation).

Lengths above a trained model's limit are refused; models with random weights get the limit that they need.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import platform
import time
from typing import Any

import arborl  # noqa: F401  # imported before torch, as in a training run

# isort: split
import numpy as np
import torch
import transformers
from benchmark_models import SHAPES, load, weights_kind
from step_work import LEARNING_RATE, peak_gib, synchronize
from texts import Texts, make_texts

from arborl.algorithms import make_algorithm
from arborl.config.load_config import load as load_config
from arborl.config.run_config import AlgorithmConfig
from arborl.engines.local import LocalEngine
from arborl.learner.core.learner import Learner
from arborl.learner.core.memory_plan import plan_memory
from arborl.models.attention import ATTENTION_NAME
from arborl.models.model_loading import tune_cpu
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, Group, Sampling, Task

TIMES = ("rollout_s", "trees_s", "update_s")
MEMORY = ("rollout_gib", "update_gib")


class LongSteps:
    """Engine and learner of one model and one context length, connected as in a training run."""

    def __init__(self, args: argparse.Namespace, context: int):
        model = load(args.model, args.device)
        if args.model in SHAPES:
            model.config.max_position_embeddings = context
        elif context > (limit := model.config.max_position_embeddings):
            raise SystemExit(f"--contexts {context}: {args.model} has positions for {limit} tokens")
        model.set_attn_implementation(ATTENTION_NAME)
        self.model, self.context = model.eval(), context
        self.episodes, self.observed, self.sampled = args.episodes, args.observed, args.sampled
        self.turns = context // (self.observed + self.sampled)
        self.texts: Texts = make_texts(args.model, model.config.vocab_size)
        self.sampling = Sampling(self.sampled)
        self.algorithm = make_algorithm(AlgorithmConfig(name="grpo", std="group"))
        kv_tokens = self.episodes * (context + 64)
        config = load_config(None, [
            f"sampling.max_context={context}", f"sampling.max_tokens={self.sampled}", f"engine.kv_tokens={kv_tokens}",
            f"learner.lr={LEARNING_RATE}", "learner.decay=none",
            f"learner.micro_batch_tokens={args.micro_batch_tokens}",
        ])  # fmt: skip
        self.plan = plan_memory(model, config, self.algorithm.needs)
        self.engine = LocalEngine(model, context, self.episodes, kv_tokens=kv_tokens)
        self.engine.warm_up(self.sampling)
        self.learner = Learner(model, self.plan.settings(config.learner), self.sampling, self.algorithm.needs)

    async def step(self, number: int) -> dict[str, float]:
        """Seconds and peak memory of the parts of one step."""
        self._reset_peak()
        began = time.perf_counter()
        episodes = await asyncio.gather(*(self._episode(number, index) for index in range(self.episodes)))
        synchronize(self.model)
        row = {"rollout_s": time.perf_counter() - began, "rollout_gib": self._reset_peak()}
        for index, episode in enumerate(episodes):
            episode.rewards["odd"] = float(index % 2)
        groups = self.algorithm.keep([Group(episodes[0].task, list(episodes))])
        began = time.perf_counter()
        forest = build_token_trees(groups)
        row["trees_s"] = time.perf_counter() - began
        began = time.perf_counter()
        terms = self.learner.score_terms(forest.trees, forest.terms, self.algorithm.needs)
        metrics = self.learner.update(forest.trees, self.algorithm.credit(groups, terms), self.algorithm)
        await self.engine.load(self.learner.weights(), number + 1)
        synchronize(self.model)
        row |= {"update_s": time.perf_counter() - began, "update_gib": self._reset_peak()}
        return row | {
            "tokens": sum(map(len, forest.trees)),
            "attended": int(sum(tree.depth.sum() for tree in forest.trees)),
            "loss_terms": len(forest.terms),
            "micro_batch_tokens": metrics["learner/micro_batch_tokens"],
            "recompute": self.plan.recompute,
        }

    async def _episode(self, step: int, index: int) -> Episode:
        rng, first = np.random.default_rng([step, index]), np.random.default_rng(step)
        context, calls = tuple(self.texts.prompt(self.observed, first)), []
        for turn in range(self.turns):
            sampling = Sampling(self.sampled, seed=1000 * step + index)
            completion = await self.engine.generate(context, sampling, session=str(index))
            calls.append(Call(context, completion, turn))
            context = (*context, *completion.tokens, *self.texts.observation(self.observed, rng))
        return Episode(str(index), Task("long"), calls=calls)

    def _reset_peak(self) -> float:
        """Peak memory since the last call; on a CPU, of the process since its start."""
        peak = peak_gib(self.model.device.type)
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return peak


def measure(args: argparse.Namespace, context: int) -> dict[str, Any]:
    steps = LongSteps(args, context)
    with asyncio.Runner() as runner:
        first = row = runner.run(steps.step(0))
        if args.warm_up:
            row = runner.run(steps.step(1))
        runner.run(steps.engine.close())
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    first_seconds = sum(first[name] for name in TIMES)
    return {"context": context, "turns": steps.turns, "first_step_s": round(first_seconds, 2)} | rounded


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Exponents of times and memory between two lengths."""
    longer = math.log(after["context"] / before["context"])
    names = [name for name in ("attended", *TIMES, *MEMORY) if before[name] > 0 and after[name] > 0]
    return {name: round(math.log(after[name] / before[name]) / longer, 2) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)} (random weights), smollm2, or a folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], help="context lengths in tokens")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--observed", type=int, default=896, help="tokens that a turn observes")
    parser.add_argument("--sampled", type=int, default=128, help="tokens that a turn samples")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="0: by the memory plan, as in a run")
    parser.add_argument(
        "--warm-up", action=argparse.BooleanOptionalAction, default=True, help="report the second step, not the first"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per length")
    args = parser.parse_args()
    if min(args.contexts) < args.observed + args.sampled:
        parser.error(f"--contexts: a turn has {args.observed + args.sampled} tokens")
    tune_cpu()
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    about = {
        "model": args.model, "weights": weights_kind(args.model), "episodes": args.episodes, "device": device,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    before: dict[str, Any] = {}
    for context in sorted(args.contexts):
        row = measure(args, context)
        row["growth"] = growth(before, row) if before else None
        before = row
        print(json.dumps(row | about) if args.json else row, flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
