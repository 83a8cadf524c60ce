"""How long until the first update is done: from the start of a process to the end of its first update, and after.

    python benchmarks/first_step.py --model 0.5b
    python benchmarks/first_step.py --model smollm2
    python benchmarks/first_step.py --model 7b --lora 16 --ways kernel-fused kernel-plain

Each way is a process of its own that begins with empty caches of compiled code, and then another that finds what the
first has left. Models are random unless real ones are named, in bfloat16 on a GPU. An update is four groups of eight
answers of 256 tokens to a prompt of 2,048; the second is as large, the third smaller, the fourth as the third: by then
nothing should be new. One JSON line a process. `way` is what the learner really did: one that failed its comparison is
not the one that was asked for.
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

WAYS = {"kernel-fused": ("kernel", True), "kernel-plain": ("kernel", False), "dense-plain": ("dense", False)}
"""How trees are attended, and whether layers are fused."""
SIZES = [(4, 2048, 256), (4, 2048, 256), (3, 1500, 200), (3, 1500, 200)]
"""Groups, tokens of a prompt, tokens of each of eight answers."""


def work(args: argparse.Namespace) -> dict[str, Any]:
    """What one process does; `args.began` is when it was started."""
    import arborl  # noqa: F401  # before torch, as everyone does who starts a run

    # isort: split
    import numpy as np
    import torch
    from bodies import load, weights_of
    from learner import Likelier
    from texts import texts_of

    from arborl.config.run_config import LearnerConfig, LoraConfig
    from arborl.learner.attention import path_selection
    from arborl.learner.core.learner import Learner
    from arborl.models.lora import add_lora
    from arborl.rollout.token_trees import build_token_trees
    from arborl.types import Call, Completion, Episode, FinishReason, Forest, Group, Sampling, Task

    imported = time.time() - args.began
    attention, fused = WAYS[args.way]
    if not fused:
        path_selection.supports_fused_layers = lambda model: False
    chance = np.random.default_rng(0)

    class Learned(Likelier):
        def count(self, terms: Any) -> float:
            return float(len(terms))

    def forest_of(groups: int, prompt: int, answer: int) -> Forest:
        made = []
        for _ in range(groups):
            opening = tuple(texts.prompt(prompt, chance))
            answers = [tuple(texts.text(answer, chance)) for _ in range(8)]
            calls = [Call(opening, Completion(said, (-6.0,) * answer, FinishReason.STOP), 0) for said in answers]
            made.append(Group(Task("t"), [Episode(str(i), Task("t"), calls=[call]) for i, call in enumerate(calls)]))
        forest = build_token_trees(made)
        forest.terms.advantage[:] = np.cos(forest.terms.call)
        forest.terms.weight[:] = 1.0 / len(forest.terms)
        return forest

    cuda = args.device == "cuda"
    model = load(args.model, args.device, outliers=args.outliers)
    texts = texts_of(args.model, model.config.vocab_size)
    if args.lora:
        add_lora(model, LoraConfig(rank=args.lora))
    learner = Learner(model, LearnerConfig(attention=attention, master=args.master), Sampling())
    row: dict[str, Any] = {"imported_s": imported, "ready_s": time.time() - args.began}
    seconds = []
    for groups, prompt, answer in SIZES:
        share = 1 if cuda else 16
        forest = forest_of(groups, prompt // share, answer // share)
        if cuda:
            torch.cuda.synchronize()
        start = time.time()
        learner.update(forest.trees, forest.terms, Learned())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.time() - start)
        row.setdefault("first_done_s", time.time() - args.began)
    row |= {
        "updates_s": seconds,
        "way": str(learner.path_selector(model, learner.micro_batcher.split(forest.trees, forest.terms)[0])),
    }
    row |= {"micro_batch_tokens": learner.micro_batcher.budget, "torch": torch.__version__, "device": args.device}
    row |= {"weights": weights_of(args.model, args.outliers), "dtype": str(model.dtype).removeprefix("torch.")}
    if cuda:
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "device": torch.cuda.get_device_name()}
    return row


def started(way: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One process; what it said, or how it failed."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, __file__, "--way", way, "--model", args.model, "--lora", str(args.lora)]
    command += ["--device", args.device, "--master", args.master, "--began", str(time.time())]
    command += [] if args.outliers else ["--no-outliers"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {args.timeout} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no word"}
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    warned = [line[:200] for line in done.stderr.splitlines() if "not used" in line]
    return said | ({"warned": warned} if warned else {})


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="0.5b", help="smollm2, seedling or a folder; 0.5b, 1.5b, 4b, 7b, tiny (random)"
    )
    parser.add_argument("--outliers", action=argparse.BooleanOptionalAction, default=True, help="of random weights")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains the whole model")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=["kernel-fused"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--master", choices=["float32", "none"], default="float32", help="none where memory is short")
    parser.add_argument("--json", action="store_true", help="as always: one JSON line a process")
    parser.add_argument("--timeout", type=int, default=240, help="seconds a process may take")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(work(args)))
        return 0
    for way in args.ways:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm"):
                row = {"asked": way, "model": args.model, "lora": args.lora, "start": start}
                row |= {key: rounded(value) for key, value in started(way, Path(cache), args).items()}
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
