"""All ways of attending over trees give the same numbers as the rule itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.learner.attention import tree_attention
from arborl.learner.attention.path_selection import cheapest_attention
from arborl.learner.attention.tree_attention import BlockAttention, DenseAttention, PackedCausalAttention
from arborl.learner.core.packing import MicroBatch, pack
from arborl.models.attention import AttentionLimits
from arborl.rollout.token_trees import build_token_trees, tree_of_sequences
from arborl.types import TokenTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)
CPU = torch.device("cpu")


def batch_of(trees: list[TokenTree]) -> MicroBatch:
    return pack(trees, list(range(len(trees))), build_token_trees([]).terms)


BOUNDS = st.builds(AttentionLimits, st.sampled_from([None, 1, 2, 5, 40]), st.sampled_from([None, 0.7]))


def by_the_rule(
    batch: MicroBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bounds: AttentionLimits
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


def assert_equal_to_the_rule(batch: MicroBatch, ways: list, seed: int, bounds: AttentionLimits) -> None:
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
    batch = batch_of([tree_of_sequences(sequences)[0] for sequences in forests])
    assert_equal_to_the_rule(batch, [DenseAttention(batch, CPU), BlockAttention(batch, CPU)], seed, bounds)


@settings(max_examples=15)
@given(chains=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5), bounds=BOUNDS)
def test_chains_of_any_lengths_need_no_mask(chains, bounds):
    batch = batch_of([tree_of_sequences([chain])[0] for chain in chains])
    assert batch.is_unbranched
    assert_equal_to_the_rule(batch, [PackedCausalAttention(batch, CPU)], 0, bounds)


@pytest.mark.parametrize(("branches", "expected"), [(1, "causal"), (2, "dense"), (40, "blocks")])
def test_a_chain_needs_no_mask_a_fork_is_attended_densely_and_a_bush_in_blocks(branches, expected):
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 99, 50).tolist()
    twig = 10 if branches == 2 else 60
    tree, _ = tree_of_sequences([stem + rng.integers(0, 99, twig).tolist() for _ in range(branches)])
    assert cheapest_attention(batch_of([tree]), CPU) == expected


def test_a_gpu_attends_a_single_chain_plainly_and_everything_else_by_its_kernels():
    tree, _ = tree_of_sequences([[1, 2, 3], [1, 2, 4]])
    chain, _ = tree_of_sequences([[1, 2, 3]])
    gpu = torch.device("cuda")
    assert cheapest_attention(batch_of([chain]), gpu) == "causal"
    assert cheapest_attention(batch_of([chain, chain]), gpu) == cheapest_attention(batch_of([tree]), gpu) == "kernel"
