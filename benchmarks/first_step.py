"""Time from the start of a process to the end of its first update, and the times of later updates.

    python benchmarks/first_step.py --model 0.5b
    python benchmarks/first_step.py --model smollm2
    python benchmarks/first_step.py --model 7b --lora 16 --ways kernel-fused kernel-plain

Each execution path is measured in two processes: one with empty caches of compiled code (`cold`), then one with the
caches that the first left (`warm`). Models have random weights unless `--model` names trained ones, in bfloat16 on a
GPU. The first update has four groups of eight completions of 256 tokens for a prompt of 2,048; the second has the same
sizes, the third is smaller, the fourth has the sizes of the third, so that it should compile nothing. Prints one JSON
line per process. `asked` is the requested execution path, `way` the path that the learner used: a path that fails its
check is replaced by a fallback.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXECUTION_PATHS = {"kernel-fused": ("kernel", True), "kernel-plain": ("kernel", False), "dense-plain": ("dense", False)}
"""Implementation of tree attention, and whether layers are fused, by name of the execution path."""
UPDATE_SIZES = [(4, 2048, 256), (4, 2048, 256), (3, 1500, 200), (3, 1500, 200)]
"""Of each update: number of groups, tokens of a prompt, tokens of each of eight completions."""


def measure_updates(args: argparse.Namespace) -> dict[str, Any]:
    """Run all updates in this process and return their times; `args.began` is the start time of the process."""
    import arborl  # noqa: F401  # imported before torch, as in a training run

    # isort: split
    import numpy as np
    import torch
    from benchmark_models import load, weights_kind
    from learner import Reinforce
    from texts import make_texts

    from arborl.config.run_config import LearnerConfig, LoraConfig
    from arborl.learner.attention import path_selection
    from arborl.learner.core.learner import Learner
    from arborl.models.lora import add_lora
    from arborl.rollout.token_trees import build_token_trees
    from arborl.types import Call, Completion, Episode, FinishReason, Forest, Group, Sampling, Task

    import_seconds = time.time() - args.began
    attention, fused = EXECUTION_PATHS[args.way]
    if not fused:
        path_selection.supports_fused_layers = lambda model: False
    rng = np.random.default_rng(0)

    class CountingReinforce(Reinforce):
        def count(self, terms: Any) -> float:
            return float(len(terms))

    def make_forest(groups: int, prompt: int, answer: int) -> Forest:
        built_groups = []
        for _ in range(groups):
            prompt_tokens = tuple(texts.prompt(prompt, rng))
            answers = [tuple(texts.text(answer, rng)) for _ in range(8)]
            calls = [
                Call(prompt_tokens, Completion(tokens, (-6.0,) * answer, FinishReason.STOP), 0) for tokens in answers
            ]
            built_groups.append(
                Group(Task("t"), [Episode(str(i), Task("t"), calls=[call]) for i, call in enumerate(calls)])
            )
        forest = build_token_trees(built_groups)
        forest.terms.advantage[:] = np.cos(forest.terms.call)
        forest.terms.weight[:] = 1.0 / len(forest.terms)
        return forest

    cuda = args.device == "cuda"
    model = load(args.model, args.device, outliers=args.outliers)
    texts = make_texts(args.model, model.config.vocab_size)
    if args.lora:
        add_lora(model, LoraConfig(rank=args.lora))
    learner = Learner(model, LearnerConfig(attention=attention, master=args.master), Sampling())
    row: dict[str, Any] = {"imported_s": import_seconds, "ready_s": time.time() - args.began}
    seconds = []
    for groups, prompt, answer in UPDATE_SIZES:
        divisor = 1 if cuda else 16
        forest = make_forest(groups, prompt // divisor, answer // divisor)
        if cuda:
            torch.cuda.synchronize()
        start = time.time()
        learner.update(forest.trees, forest.terms, CountingReinforce())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.time() - start)
        row.setdefault("first_done_s", time.time() - args.began)
    row |= {
        "updates_s": seconds,
        "way": str(learner.path_selector(model, learner.micro_batcher.split(forest.trees, forest.terms)[0])),
    }
    row |= {"micro_batch_tokens": learner.micro_batcher.budget, "torch": torch.__version__, "device": args.device}
    row |= {"weights": weights_kind(args.model, args.outliers), "dtype": str(model.dtype).removeprefix("torch.")}
    if cuda:
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "device": torch.cuda.get_device_name()}
    return row


def run_process(way: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start one process; returns its result row, or the reason of its failure."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, __file__, "--way", way, "--model", args.model, "--lora", str(args.lora)]
    command += ["--device", args.device, "--master", args.master, "--began", str(time.time())]
    command += [] if args.outliers else ["--no-outliers"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"timeout after {args.timeout} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no error output"}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    warnings = [line[:200] for line in done.stderr.splitlines() if "not used" in line]
    return row | ({"warned": warnings} if warnings else {})


def round_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [round_floats(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default="0.5b",
        help="smollm2, seedling or a folder (trained weights); 0.5b, 1.5b, 4b, 7b, tiny (random weights)",
    )
    parser.add_argument(
        "--outliers", action=argparse.BooleanOptionalAction, default=True, help="add outliers to random weights"
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--ways", nargs="*", choices=EXECUTION_PATHS, default=["kernel-fused"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--master", choices=["float32", "none"], default="float32", help="master weights; none if memory is short"
    )
    parser.add_argument("--json", action="store_true", help="no effect: the output is always JSON lines")
    parser.add_argument("--timeout", type=int, default=240, help="time limit of a process in seconds")
    parser.add_argument("--way", choices=EXECUTION_PATHS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure_updates(args)))
        return 0
    for way in args.ways:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm"):
                row = {"asked": way, "model": args.model, "lora": args.lora, "start": start}
                row |= {key: round_floats(value) for key, value in run_process(way, Path(cache), args).items()}
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
