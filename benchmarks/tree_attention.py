"""Attention over token trees on a GPU in bfloat16: Arbor's kernels compared with dense masked attention.

    python benchmarks/tree_attention.py
    python benchmarks/tree_attention.py --sweep

Prints one JSON line per head shape and kind of tree: milliseconds of the forward and backward pass of one layer, the
share of token pairs that are attended (`seen`), and the relative difference of the query gradients between the two
(`gap`). With `--sweep`, milliseconds of each kernel with other tile sizes, the fastest first, for the tables of
`learner/tree_plan.py`. Host time (plans, masks) is not included; `plan_ms` is the host time of the kernels' plan.
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

HEAD_SHAPES = [(14, 2, 64), (32, 8, 128)]
"""Query heads, key heads and head size of a 0.5B model and of a 4B or 8B model."""
TILE_CANDIDATES = {
    "forward": [(128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)],
    "to_queries": [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 32, 4, 3)],
    "to_keys": [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 4, 3), (64, 64, 4, 3)],
}


def make_trees(kind: str, tokens: int) -> MicroBatch:
    """Trees with about `tokens` tokens in total: groups of eight completions of a prompt (`groups`), rows without
    common prefixes (`chains`), episodes of four turns whose thinking is removed from later prompts (`turns`), or one
    tree of rows with a system prompt of 128 tokens (`system`)."""
    rng = np.random.default_rng(0)
    random_tokens = lambda count: rng.integers(0, 50_000, max(1, count)).tolist()  # noqa: E731

    def make_rows() -> list[list[int]]:
        if kind == "chains":
            return [random_tokens(tokens // 16)]
        if kind == "system":
            system = random_tokens(128)
            return [system + random_tokens(256) for _ in range(max(1, tokens // 256))]
        prompt = random_tokens(tokens // 8)
        if kind == "groups":
            return [prompt + random_tokens(tokens // 64) for _ in range(8)]
        rows = []
        for _ in range(8):
            context = list(prompt)
            for _ in range(4):
                thinking, answer = random_tokens(tokens // 128), random_tokens(tokens // 512)
                rows.append(context + thinking + answer)
                context += answer + random_tokens(tokens // 256)
        return rows

    trees, left = [], tokens
    while True:
        tree = tree_of_sequences(make_rows())[0]
        if trees and len(tree) > left:
            return pack(trees, list(range(len(trees))), build_token_trees([]).terms)
        trees.append(tree)
        left -= len(tree)


def median_ms(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds after three warm-up runs."""
    results = []
    for repeat in range(repeats + 3):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            milliseconds = began.elapsed_time(ended)
        else:
            start = time.perf_counter()
            work()
            milliseconds = 1000 * (time.perf_counter() - start)
        if repeat > 2:
            results.append(milliseconds)
    return round(statistics.median(results), 4)


def random_inputs(count: int, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as views of one tensor, as in a model, and a gradient of the output."""
    heads, key_heads, size = shape
    torch.manual_seed(0)
    whole = torch.randn(count, heads + 2 * key_heads, size, device=device).to(dtype)
    parts = [x.detach().requires_grad_() for x in whole.split([heads, key_heads, key_heads], dim=1)]
    return [*parts, torch.randn(count, heads, size, device=device).to(dtype)]


def measure(attend: Any, inputs: list[Tensor], device: torch.device, repeats: int) -> tuple[float, float, Tensor]:
    """Milliseconds of forward and backward pass, and the gradient of the queries."""
    q, k, v, grad = inputs
    scale = q.shape[-1] ** -0.5
    with torch.no_grad():
        forward = median_ms(lambda: attend(0, q, k, v, scale), device, repeats)
    out = attend(0, q, k, v, scale)

    def run_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return forward, median_ms(run_backward, device, repeats), run_backward()[0]


def compare(kind: str, shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    batch = make_trees(kind, args.tokens)
    inputs = random_inputs(len(batch), shape, device, dtype)
    position = np.arange(len(batch))
    row: dict[str, Any] = {"kind": kind, "heads": shape, "tokens": len(batch), "trees": len(batch.lengths)}
    row["seen"] = round(float((batch.end - position).sum()) / len(batch) ** 2, 4)
    began = time.perf_counter()
    kernel = TritonTreeAttention(batch, device)
    kernel.prepare([], *shape[1:], dtype)
    row["plan_ms"] = round(1000 * (time.perf_counter() - began), 2)
    implementations = {"kernel": lambda: kernel, "dense": lambda: DenseAttention(batch, device)}
    gradients = {}
    for name in args.ways:
        try:
            forward, backward, dq = measure(implementations[name](), inputs, device, args.repeats)
        except Exception as error:  # a failure must not prevent the other measurements
            row[name] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        gradients[name] = dq.float()
        row[name] = {"forward_ms": forward, "backward_ms": backward}
        flops = 4 * shape[0] * shape[2] * float((batch.end - position).sum())
        row[name]["tflops"] = [round(n * flops / 1e9 / ms, 1) for n, ms in ((1, forward), (2.5, backward))]
    if len(gradients) == 2:
        row["gap"] = float(
            f"{float((gradients['kernel'] - gradients['dense']).norm() / gradients['dense'].norm()):.1e}"
        )
    return row


def sweep(kind: str, shape: tuple[int, int, int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times of each kernel with every candidate tile, while the other kernels keep their tiles."""
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    batch = make_trees(kind, args.tokens)
    inputs = random_inputs(len(batch), shape, device, dtype)
    current_tiles = tiles_for(shape[2], dtype)
    assert current_tiles is not None
    for kernel_name, candidates in TILE_CANDIDATES.items():
        results: dict[str, float | str] = {}
        for numbers in dict.fromkeys([tuple(getattr(current_tiles, kernel_name)), *candidates]):
            tiles: Tiles = current_tiles._replace(**{kernel_name: Tile(*numbers)})
            attend = TritonTreeAttention(batch, device)
            attend.prepare([], *shape[1:], dtype, tiles)
            try:
                forward, backward, _ = measure(attend, inputs, device, args.repeats)
            except Exception as error:  # usually too much shared memory
                results[str(numbers)] = f"{type(error).__name__}: {str(error)[:80]}"
                continue
            results[str(numbers)] = forward if kernel_name == "forward" else backward
        order = sorted(results, key=lambda name: results[name] if isinstance(results[name], float) else float("inf"))
        row: dict[str, Any] = {
            "sweep": kernel_name,
            "kind": kind,
            "heads": shape,
            "now": str(tuple(getattr(current_tiles, kernel_name))),
        }
        yield row | {"ms": {name: results[name] for name in order}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: for tests, with TRITON_INTERPRET=1"
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--kinds", nargs="*", default=["groups", "turns", "chains", "system"])
    parser.add_argument("--ways", nargs="*", default=["kernel", "dense"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    machine_info: dict[str, Any] = {"device": args.device, "torch": torch.__version__}
    if args.device == "cuda":
        machine_info["device"] = torch.cuda.get_device_name()
    for shape in HEAD_SHAPES if args.device == "cuda" else [(2, 1, 16)]:
        for kind in args.kinds:
            for row in sweep(kind, shape, args) if args.sweep else [compare(kind, shape, args)]:
                print(json.dumps(row | machine_info), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
