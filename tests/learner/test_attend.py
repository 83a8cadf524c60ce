"""Both ways of attending over trees give the same numbers as the rule itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.learner import attend
from arborl.learner.attend import BlockAttend, DenseAttend, attend_over, block_keys
from arborl.learner.batch import MicroBatch, pack
from arborl.rollout.tree import grow, plant
from arborl.types import TokenTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)


def batch_of(trees: list[TokenTree]) -> MicroBatch:
    return pack(trees, list(range(len(trees))), plant([]).terms)


def by_the_rule(batch: MicroBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query at a time, straight from the definition."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = []
    for place in range(len(q)):
        seen = [j for j in range(place + 1) if place < batch.end[j]]
        weight = torch.softmax(torch.einsum("hd,khd->hk", q[place], k[seen]) * scale, -1)
        rows.append(torch.einsum("hk,khd->hd", weight, v[seen]))
    return torch.stack(rows)


@settings(max_examples=25)
@given(forests=st.lists(SEQUENCES, min_size=1, max_size=3), block=st.sampled_from([1, 3, 8]), seed=st.integers(0, 99))
def test_blocks_and_squares_equal_the_rule_in_value_and_gradient(monkeypatch, forests, block, seed):
    monkeypatch.setattr(attend, "BLOCK", block)
    batch = batch_of([grow(sequences)[0] for sequences in forests])
    torch.manual_seed(seed)
    shapes = [(len(batch.tokens), heads, 4) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    device = torch.device("cpu")
    results = []
    for way in (
        lambda: by_the_rule(batch, q, k, v, 0.5),
        lambda: DenseAttend(batch, device)(0, q, k, v, 0.5),
        lambda: BlockAttend(batch, block_keys(batch.end), device)(0, q, k, v, 0.5),
    ):
        out = way()
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("branches", "expected"), [(1, DenseAttend), (40, BlockAttend)])
def test_a_chain_is_attended_densely_and_a_bush_in_blocks(branches, expected):
    chance = np.random.default_rng(0)
    stem = chance.integers(0, 99, 50).tolist()
    tree, _ = grow([stem + chance.integers(0, 99, 60).tolist() for _ in range(branches)])
    assert type(attend_over(batch_of([tree]), torch.device("cpu"))) is expected
