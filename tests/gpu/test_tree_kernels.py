"""The kernels for trees give what masked squares give, in value and gradient.

The same tests twice: on a GPU, marked so, compiled; and wherever Triton is installed but no GPU is there, interpreted,
on small trees.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from arborl.learner.attention import path_selection, tree_plan
from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.attention.path_selection import DENSE, ExecutionPath, PathSelector, path_error
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.attention.tree_plan import Tile, Tiles
from arborl.learner.core.packing import MicroBatch, pack
from arborl.learner.core.tree_forward import compute_outputs
from arborl.models.attention import NO_LIMITS, AttentionLimits
from arborl.rollout.token_trees import build_token_trees, tree_of_sequences
from arborl.types import Sampling

pytest.importorskip("triton")

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Norm of the difference over the norm."""
SMALL = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))


def bush(seed: int, trees: int, branches: int, stem: int, twig: int) -> MicroBatch:
    """Trees whose branches leave their stem anywhere, of lengths that differ."""
    rng = np.random.default_rng(seed)
    grown = []
    for _ in range(trees):
        trunk = rng.integers(0, 9, stem).tolist()
        rows = [
            trunk[: rng.integers(1, stem + 1)] + rng.integers(9, 99, rng.integers(1, twig + 1)).tolist()
            for _ in range(branches)
        ]
        grown.append(tree_of_sequences([trunk, *rows])[0])
    return pack(grown, list(range(trees)), build_token_trees([]).terms)


def chains(*lengths: int) -> MicroBatch:
    return pack(
        [tree_of_sequences([list(range(n))])[0] for n in lengths],
        list(range(len(lengths))),
        build_token_trees([]).terms,
    )


def heads(batch: MicroBatch, device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, apart: bool):
    """Queries, keys and values; parts of one tensor as a model's are, or each its own with heads before tokens."""
    query_heads, key_heads, size = shape
    rng = torch.Generator().manual_seed(0)
    if apart:
        made = [torch.randn(n, len(batch), size, generator=rng) for n in (query_heads, key_heads, key_heads)]
        return [x.to(device, dtype).transpose(0, 1) for x in made]
    whole = torch.randn(len(batch), query_heads + 2 * key_heads, size, generator=rng).to(device, dtype)
    return whole.split([query_heads, key_heads, key_heads], dim=1)


def numbers(attend, q, k, v, bounds: AttentionLimits, scale: float = 0.3) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(0, q, k, v, scale, bounds)
    slope = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), (q, k, v))]


def check(batch, device, shape, dtype=torch.float32, bounds=NO_LIMITS, tiles=None, apart=False):
    q, k, v = heads(batch, device, shape, dtype, apart)
    attend = TritonTreeAttention(batch, device)
    attend.prepare([bounds.window] if bounds.window else [], *shape[1:], dtype, tiles)
    dense = numbers(DenseAttention(batch, device), *(x.double() for x in (q, k, v)), bounds)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), numbers(attend, q, k, v, bounds), dense, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm()) < CLOSE[dtype] * (float(theirs.norm()) + 1.0), name


@pytest.mark.parametrize(
    "bounds",
    [
        NO_LIMITS,
        AttentionLimits(1),
        AttentionLimits(7),
        AttentionLimits(30),
        AttentionLimits(None, 2.0),
        AttentionLimits(9, 0.7),
    ],
    ids=str,
)
def test_trees_within_windows_and_caps(device, bounds):
    check(bush(0, trees=2, branches=2, stem=33, twig=9), device, (2, 1, 16), bounds=bounds, tiles=SMALL)


@pytest.mark.parametrize("shape", [(4, 2, 8), (2, 2, 20), (3, 1, 40), (1, 1, 96)], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_any_number_of_heads_of_any_size_lying_in_any_order(device, shape, apart):
    check(bush(1, trees=1, branches=2, stem=20, twig=9), device, shape, tiles=SMALL, apart=apart)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (15,), (16,), (17,), (32, 31), (3, 50)], ids=str)
def test_chains_of_any_length(device, lengths):
    check(chains(*lengths), device, (2, 1, 16), tiles=SMALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [NO_LIMITS, AttentionLimits(9, 5.0)], ids=str)
def test_sixteen_bits(device, dtype, bounds):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as if it were integers")
    check(bush(2, trees=1, branches=3, stem=33, twig=9), device, (2, 1, 16), dtype, bounds, SMALL)


@pytest.mark.parametrize(("programs", "slots"), [(1, 16), (10, 16), (10_000, 16), (10_000, 2)])
@pytest.mark.parametrize("shape", [(5, 1, 16), (4, 2, 20)], ids=str)
@pytest.mark.parametrize("bounds", [NO_LIMITS, AttentionLimits(7, 5.0)], ids=str)
def test_it_does_not_matter_among_how_many_programs_the_queries_of_a_key_are_divided(
    device, monkeypatch, programs, slots, shape, bounds
):
    from arborl.learner.attention import tree_kernels

    monkeypatch.setattr(tree_plan, "KEY_PROGRAMS", programs)
    monkeypatch.setitem(tree_kernels.SUMMED, "SLOTS", slots)  # slots that are read at once
    check(bush(3, trees=2, branches=3, stem=20, twig=29), device, shape, bounds=bounds, tiles=SMALL)


def test_scores_so_large_that_their_exponentials_overflow(device):
    batch = bush(0, trees=1, branches=3, stem=20, twig=9)
    q, k, v = heads(batch, device, (2, 1, 16), torch.float32, False)
    attend = TritonTreeAttention(batch, device)
    attend.prepare([], 1, 16, torch.float32, SMALL)
    ours, dense = (numbers(a, q * 100, k, v, NO_LIMITS, 1.0) for a in (attend, DenseAttention(batch, device)))
    for mine, theirs in zip(ours, dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_a_model_is_trained_through_them_as_through_squares(device, tiny_llama, monkeypatch, caplog):
    model = copy.deepcopy(tiny_llama).float().to(device)
    whole = path_selection.sample_micro_batch
    monkeypatch.setattr(path_selection, "sample_micro_batch", lambda model, chain, size: whole(model, chain, 20))
    assert path_error(model, ExecutionPath("kernel")) is None
    batch = whole(model, False, 23)
    assert PathSelector(attention="kernel")(model, batch).attention == "kernel"
    found = []
    for way in (ExecutionPath("kernel"), ExecutionPath("kernel", recompute=True), DENSE):
        logprob = compute_outputs(model, batch, Sampling(), way).logprob_M
        found.append([logprob.detach(), *torch.autograd.grad(logprob.sum(), list(model.parameters()))])
    for ours, again, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again, dense, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ at full size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(14, 2, 64), (32, 8, 128), (4, 2, 40), (8, 8, 80), (16, 4, 96), (4, 1, 256)])
@pytest.mark.parametrize("bounds", [NO_LIMITS, AttentionLimits(300, 20.0)], ids=str)
def test_every_size_that_there_are_tiles_for(dtype, shape, bounds):
    batch = bush(5, trees=2, branches=8, stem=700, twig=200)
    check(batch, torch.device("cuda"), shape, dtype, bounds)


@pytest.mark.gpu
def test_the_same_bits_twice():
    batch, device = bush(6, trees=3, branches=8, stem=900, twig=200), torch.device("cuda")
    q, k, v = heads(batch, device, (14, 2, 64), torch.bfloat16, False)
    attend = TritonTreeAttention(batch, device)
    attend.prepare([], 2, 64, torch.bfloat16)
    first, second = (numbers(attend, q, k, v, NO_LIMITS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_no_size_of_batch_compiles_a_kernel_anew():
    from arborl.learner.attention import tree_kernels

    device = torch.device("cuda")
    kernels = (
        tree_kernels._forward, tree_kernels._backward_queries, tree_kernels._backward_keys, tree_kernels._sum_slots,
    )  # fmt: skip

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for seed, lengths in enumerate([(640,), (1,), (16, 33), (77,), (4096,), (1000, 24)]):
        check(chains(*lengths), device, (14, 2, 64), torch.bfloat16)
        check(bush(seed, 1, 3, 100 + 31 * seed, 20), device, (14, 2, 64), torch.bfloat16)
        counts.append(compiled())
    assert counts[0] == counts[-1]
