"""All ways of attending over trees give the same numbers as the rule itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from arborl.learner import flex_attention, tree_attention
from arborl.learner.executor import TREES_ON_GPU, cheapest
from arborl.learner.flex_attention import SIZE, FlexAttend, block_mask
from arborl.learner.packing import MicroBatch, pack, padded
from arborl.learner.tree_attention import BlockAttend, CausalAttend, DenseAttend
from arborl.models.attention import Bounds
from arborl.rollout.tree import grow, plant
from arborl.types import TokenTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)
CPU = torch.device("cpu")


def batch_of(trees: list[TokenTree]) -> MicroBatch:
    return pack(trees, list(range(len(trees))), plant([]).terms)


BOUNDS = st.builds(Bounds, st.sampled_from([None, 1, 2, 5, 40]), st.sampled_from([None, 0.7]))


def by_the_rule(
    batch: MicroBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bounds: Bounds
) -> torch.Tensor:
    """One query at a time, straight from the definition; a window counts positions along the branch."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = []
    for place in range(len(q)):
        seen = [j for j in range(place + 1) if place < batch.end[j]]
        seen = seen[-bounds.window :] if bounds.window else seen
        score = torch.einsum("hd,khd->hk", q[place], k[seen]) * scale
        weight = torch.softmax(bounds.cap * torch.tanh(score / bounds.cap) if bounds.cap else score, -1)
        rows.append(torch.einsum("hk,khd->hd", weight, v[seen]))
    return torch.stack(rows)


def assert_equal_to_the_rule(batch: MicroBatch, ways: list, seed: int, bounds: Bounds) -> None:
    torch.manual_seed(seed)
    shapes = [(len(batch.tokens), heads, 4) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    results = []
    for way in (lambda *given: by_the_rule(batch, *given[1:]), *ways):
        out = way(0, q, k, v, 0.5, bounds)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=25)
@given(
    forests=st.lists(SEQUENCES, min_size=1, max_size=3),
    block=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 99),
    bounds=BOUNDS,
)
def test_blocks_and_squares_equal_the_rule_in_value_and_gradient(monkeypatch, forests, block, seed, bounds):
    monkeypatch.setattr(tree_attention, "BLOCK", block)
    batch = batch_of([grow(sequences)[0] for sequences in forests])
    assert_equal_to_the_rule(batch, [DenseAttend(batch, CPU), BlockAttend(batch, CPU)], seed, bounds)


@settings(max_examples=15)
@given(chains=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5), bounds=BOUNDS)
def test_chains_of_any_lengths_need_no_mask(chains, bounds):
    batch = batch_of([grow([chain])[0] for chain in chains])
    assert batch.is_chains
    assert_equal_to_the_rule(batch, [CausalAttend(batch, CPU)], 0, bounds)


@settings(max_examples=10)
@given(
    forests=st.lists(SEQUENCES, min_size=1, max_size=3),
    size=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
    bounds=BOUNDS,
)
def test_flex_attention_equals_the_rule_in_value_and_gradient(monkeypatch, flex_on_cpu, forests, size, seed, bounds):
    monkeypatch.setattr(flex_attention, "SIZE", size)
    batch = padded(batch_of([grow(sequences)[0] for sequences in forests]), size)
    attend = FlexAttend(batch, CPU)
    attend.prepare([bounds.window] if bounds.window else [])
    assert_equal_to_the_rule(batch, [attend], seed, bounds)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    branches=st.integers(1, 9),
    longest=st.integers(20, 400),
    window=st.sampled_from([None, 1, 100, 300]),
)
def test_the_table_of_blocks_is_what_asking_about_every_pair_gives(seed, branches, longest, window):
    chance = np.random.default_rng(seed)
    stem = chance.integers(0, 2, longest).tolist()
    rows = [stem[: chance.integers(0, longest)] + chance.integers(2, 9, longest).tolist() for _ in range(branches)]
    batch = padded(batch_of([grow(rows)[0], grow(rows[:1])[0]]), SIZE)
    ours = block_mask(batch.end, CPU, batch.depth if window else None, window or 0)
    theirs = create_block_mask(ours.mask_mod, None, None, len(batch), len(batch), device="cpu")
    if window:  # depths of a block may leave gaps, so some blocks of ours hold nothing; none is missing or taken whole
        assert torch.equal(ours.to_dense().bool() & theirs.to_dense().bool(), theirs.to_dense().bool())
        assert (ours.full_kv_num_blocks <= theirs.full_kv_num_blocks).all()
        return
    for which in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, which), getattr(theirs, which)), which
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for counts, which in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, count in enumerate(getattr(ours, counts)[0, 0].tolist()):
            mine, other = (getattr(mask, which)[0, 0, row, :count] for mask in (ours, theirs))
            assert torch.equal(mine, other)


def test_flex_attention_asks_for_whole_blocks():
    with pytest.raises(ValueError, match="pad"):
        block_mask(np.arange(1, 100), CPU)


@pytest.mark.parametrize(("branches", "expected"), [(1, "causal"), (2, "dense"), (40, "blocks")])
def test_a_chain_needs_no_mask_a_fork_is_attended_densely_and_a_bush_in_blocks(branches, expected):
    chance = np.random.default_rng(0)
    stem = chance.integers(0, 99, 50).tolist()
    twig = 10 if branches == 2 else 60
    tree, _ = grow([stem + chance.integers(0, 99, twig).tolist() for _ in range(branches)])
    assert cheapest(batch_of([tree]), CPU) == (expected,)


def test_a_gpu_attends_a_single_chain_plainly_and_has_two_ways_for_everything_else():
    tree, _ = grow([[1, 2, 3], [1, 2, 4]])
    chain, _ = grow([[1, 2, 3]])
    gpu = torch.device("cuda")
    assert cheapest(batch_of([chain]), gpu) == ("causal",)
    assert cheapest(batch_of([chain, chain]), gpu) == cheapest(batch_of([tree]), gpu) == TREES_ON_GPU
    assert set(TREES_ON_GPU) == {"kernel", "flex"}
