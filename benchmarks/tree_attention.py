"""Attention over trees on a GPU: kernels of our own beside masked squares; bfloat16.

    python benchmarks/tree_attention.py
    python benchmarks/tree_attention.py --sweep

One JSON line for each shape of heads and kind of trees: milliseconds forward and backward of one layer, the share of
all pairs of tokens that are seen, and by how much the gradients of queries differ from those of the latter. With
`--sweep`, milliseconds of each kernel cut in other ways, the best first, for the tables of `learner/tree_plan.py`.
The host's part (plans, masks) is not in these times; `plan_ms` says what ours is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.attention.tree_plan import Tile, Tiles, tiles_for
from arborl.learner.core.packing import MicroBatch, pack
from arborl.rollout.token_trees import build_token_trees, tree_of_sequences

SHAPES = [(14, 2, 64), (32, 8, 128)]
"""Query heads, key heads, head size: of a 0.5B model and of a 4B or 8B one."""
CANDIDATES = {
    "forward": [(128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
    "to_queries": [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 3)],
    "to_keys": [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 4, 3), (64, 64, 4, 3)],
}


def trees_of(kind: str, tokens: int) -> MicroBatch:
    """About so many tokens: groups of eight answers to a prompt, plain rows, or attempts of four turns each whose
    thinking is stripped from what follows."""
    chance = np.random.default_rng(0)
    some = lambda count: chance.integers(0, 50_000, max(1, count)).tolist()  # noqa: E731

    def one() -> list[list[int]]:
        if kind == "chains":
            return [some(tokens // 16)]
        prompt = some(tokens // 8)
        if kind == "groups":
            return [prompt + some(tokens // 64) for _ in range(8)]
        rows = []
        for _ in range(8):
            context = list(prompt)
            for _ in range(4):
                thinking, answer = some(tokens // 128), some(tokens // 512)
                rows.append(context + thinking + answer)
                context += answer + some(tokens // 256)
        return rows

    trees, left = [], tokens
    while True:
        tree = tree_of_sequences(one())[0]
        if trees and len(tree) > left:
            return pack(trees, list(range(len(trees))), build_token_trees([]).terms)
        trees.append(tree)
        left -= len(tree)


def median_ms(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """After three runs that do not count."""
    found = []
    for repeat in range(repeats + 3):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            took = began.elapsed_time(ended)
        else:
            start = time.perf_counter()
            work()
            took = 1000 * (time.perf_counter() - start)
        if repeat > 2:
            found.append(took)
    return round(statistics.median(found), 4)


def heads_of(count: int, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Parts of one tensor, as a model's are; and the gradient of what comes out."""
    heads, key_heads, size = shape
    torch.manual_seed(0)
    whole = torch.randn(count, heads + 2 * key_heads, size, device=device).to(dtype)
    parts = [x.detach().requires_grad_() for x in whole.split([heads, key_heads, key_heads], dim=1)]
    return [*parts, torch.randn(count, heads, size, device=device).to(dtype)]


def measure(attend: Any, given: list[Tensor], device: torch.device, repeats: int) -> tuple[float, float, Tensor]:
    """Milliseconds forward and backward, and the gradient of the queries."""
    q, k, v, grad = given
    scale = q.shape[-1] ** -0.5
    with torch.no_grad():
        forward = median_ms(lambda: attend(0, q, k, v, scale), device, repeats)
    out = attend(0, q, k, v, scale)

    def back() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return forward, median_ms(back, device, repeats), back()[0]


def compare(kind: str, shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    batch = trees_of(kind, args.tokens)
    given = heads_of(len(batch), shape, device, dtype)
    place = np.arange(len(batch))
    row: dict[str, Any] = {"kind": kind, "heads": shape, "tokens": len(batch), "trees": len(batch.lengths)}
    row["seen"] = round(float((batch.end - place).sum()) / len(batch) ** 2, 4)
    began = time.perf_counter()
    kernel = TritonTreeAttention(batch, device)
    kernel.prepare([], shape[2], dtype)
    row["plan_ms"] = round(1000 * (time.perf_counter() - began), 2)
    makers = {"kernel": lambda: kernel, "dense": lambda: DenseAttention(batch, device)}
    gradients = {}
    for name in args.ways:
        try:
            forward, backward, dq = measure(makers[name](), given, device, args.repeats)
        except Exception as error:  # one that breaks must not cost the others their numbers
            row[name] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        gradients[name] = dq.float()
        row[name] = {"forward_ms": forward, "backward_ms": backward}
        flops = 4 * shape[0] * shape[2] * float((batch.end - place).sum())
        row[name]["tflops"] = [round(n * flops / 1e9 / ms, 1) for n, ms in ((1, forward), (2.5, backward))]
    if len(gradients) == 2:
        row["gap"] = float(
            f"{float((gradients['kernel'] - gradients['dense']).norm() / gradients['dense'].norm()):.1e}"
        )
    return row


def sweep(kind: str, shape: tuple[int, int, int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each kernel with every candidate, the others as they are."""
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    batch = trees_of(kind, args.tokens)
    given = heads_of(len(batch), shape, device, dtype)
    now = tiles_for(shape[2], dtype)
    assert now is not None
    for which, candidates in CANDIDATES.items():
        found: dict[str, float | str] = {}
        for numbers in dict.fromkeys([tuple(getattr(now, which)), *candidates]):
            tiles: Tiles = now._replace(**{which: Tile(*numbers)})
            attend = TritonTreeAttention(batch, device)
            attend.prepare([], shape[2], dtype, tiles)
            try:
                forward, backward, _ = measure(attend, given, device, args.repeats)
            except Exception as error:  # too much shared memory, mostly
                found[str(numbers)] = f"{type(error).__name__}: {str(error)[:80]}"
                continue
            found[str(numbers)] = forward if which == "forward" else backward
        order = sorted(found, key=lambda name: found[name] if isinstance(found[name], float) else float("inf"))
        row: dict[str, Any] = {"sweep": which, "kind": kind, "heads": shape, "now": str(tuple(getattr(now, which)))}
        yield row | {"ms": {name: found[name] for name in order}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with TRITON_INTERPRET=1, to try"
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--kinds", nargs="*", default=["groups", "turns", "chains"])
    parser.add_argument("--ways", nargs="*", default=["kernel", "dense"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    about: dict[str, Any] = {"device": args.device, "torch": torch.__version__}
    if args.device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    for shape in SHAPES if args.device == "cuda" else [(2, 1, 16)]:
        for kind in args.kinds:
            for row in sweep(kind, shape, args) if args.sweep else [compare(kind, shape, args)]:
                print(json.dumps(row | about), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
