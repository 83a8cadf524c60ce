"""Tree attention in C: values and gradients of the definition, on any number of threads."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.learner.attention import cpu_kernels
from arborl.learner.attention.cpu_kernels import CpuTreeAttention, attention_library
from arborl.learner.attention.path_selection import ExecutionPath, PathSelector, sample_micro_batch
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.core.packing import MicroBatch, pack
from arborl.models.attention import NO_LIMITS, AttentionLimits
from arborl.rollout.token_trees import build_token_trees, tree_of_sequences

pytestmark = pytest.mark.skipif(attention_library() is None, reason="there is no C compiler")

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
BUSHES = st.lists(st.tuples(*[st.integers(1, most) for most in (90, 9, 40, 99)]), min_size=1, max_size=3)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def forest(*groups: list[list[int]]) -> MicroBatch:
    trees = [tree_of_sequences(sequences)[0] for sequences in groups]
    return pack(trees, list(range(len(trees))), build_token_trees([]).terms)


def bush(stem: int, branches: int, twig: int, seed: int = 0) -> list[list[int]]:
    """Branches that leave a stem, and each other, at places of their own."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 99, stem).tolist()]
    for _ in range(branches):
        parent = rows[rng.integers(len(rows))]
        rows.append(parent[: rng.integers(1, len(parent) + 1)] + rng.integers(0, 99, twig).tolist())
    return rows


def given_to(batch: MicroBatch, heads: int, key_heads: int, size: int, dtype=torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    return [torch.randn(len(batch), h, size, dtype=dtype, requires_grad=True) for h in (heads, key_heads, key_heads)]


def numbers(attend, q, k, v, bounds: AttentionLimits = NO_LIMITS):
    out = attend(0, q, k, v, 0.3, bounds)
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    return out.detach(), *torch.autograd.grad((out * slope).sum(), (q, k, v))


def agree(
    batch: MicroBatch, heads: int, key_heads: int, size: int, bounds: AttentionLimits = NO_LIMITS, seed: int = 0
) -> None:
    """With the dense way in float64, as closely as float32 can."""
    q, k, v = given_to(batch, heads, key_heads, size, seed=seed)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ours, theirs = (
        numbers(CpuTreeAttention(batch, CPU), q, k, v, bounds),
        numbers(DenseAttention(batch, CPU), *exact, bounds),
    )
    for got, expected in zip(ours, theirs, strict=True):
        assert float((got - expected).norm() / expected.norm().clamp(min=1.0)) < 5e-6  # a lone token has no gradient


@settings(max_examples=20, deadline=None)
@given(
    bushes=BUSHES,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (18, 1)]),
    size=st.sampled_from([2, 10, 16, 33, 40]),
    window=st.sampled_from([None, 2, 7, 100]),
    seed=st.integers(0, 99),
)
def test_any_forest_gives_the_numbers_and_gradients_of_the_dense_way(bushes, heads, size, window, seed):
    agree(forest(*(bush(*shape) for shape in bushes)), *heads, size, AttentionLimits(window), seed)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(8, 4, 40), (14, 2, 64), (3, 3, 20)])
def test_large_bushes_agree_too_and_so_do_long_chains_and_single_tokens(heads, key_heads, size, threads):
    agree(forest(bush(200, 6, 41), [[5]], [list(range(600))], bush(7, 30, 3)), heads, key_heads, size)


def test_inputs_need_not_lie_side_by_side():
    batch = forest(bush(50, 4, 21))
    whole = torch.randn(len(batch), 8, 24, requires_grad=True)
    q, k, v = whole[:, :4], whole[:, 4:6], whole[:, 6:].flip(-1)  # a view of heads, and numbers that do not even follow
    other = whole.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    results = []
    for attend, x, (a, b, c) in (
        (CpuTreeAttention(batch, CPU), whole, (q, k, v)),
        (CpuTreeAttention(batch, CPU), other, (other[:, :4], other[:, 4:6], other[:, 6:].flip(-1))),
        (DenseAttention(batch, CPU), whole, (q, k, v)),
    ):
        out = attend(0, a, b, c, 0.3)
        results.append((out.detach(), *torch.autograd.grad(out.transpose(0, 1).square().sum(), x, retain_graph=True)))
    for result in results[:2]:
        for got, expected in zip(result, results[2], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_same_bits_on_any_number_of_threads():
    batch = forest(bush(60, 9, 31), bush(9, 4, 12))
    q, k, v = given_to(batch, 8, 4, 40)
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        found.append(numbers(CpuTreeAttention(batch, CPU), q, k, v))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_scores_beyond_what_an_exponential_can_hold_are_no_trouble():
    batch = forest(bush(300, 2, 40))
    q, k, v = given_to(batch, 2, 1, 16)
    with torch.no_grad():
        q *= 40
    ours, theirs = (numbers(way(batch, CPU), q, k, v) for way in (CpuTreeAttention, DenseAttention))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_what_is_not_a_number_stays_in_its_tree():
    batch = forest(bush(40, 3, 20), bush(40, 3, 20, seed=1))
    q, k, v = (x.detach() for x in given_to(batch, 4, 2, 16))
    v[3] = k[5] = float("nan")
    out = CpuTreeAttention(batch, CPU)(0, q, k, v, 0.3)
    first = batch.lengths[0]
    assert out[6].isnan().all()
    assert out[first:].isfinite().all()


def test_a_forked_process_attends_too():
    batch = forest(bush(60, 5, 20))
    q, k, v = (x.detach() for x in given_to(batch, 4, 4, 16))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        attend = CpuTreeAttention(batch, CPU)
        here = attend(0, q, k, v, 0.3)  # the pool has threads now, which a child does not
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(attend(0, q, k, v, 0.3), here) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


def test_what_it_cannot_do_is_refused():
    batch = forest(bush(5, 1, 3))
    q, k, v = (x.detach() for x in given_to(batch, 2, 1, 4))
    with pytest.raises(ValueError, match="cap"):
        CpuTreeAttention(batch, CPU)(0, q, k, v, 0.3, AttentionLimits(cap=1.0))
    with pytest.raises(ValueError, match="float32"):
        CpuTreeAttention(batch, CPU)(0, q.double(), k.double(), v.double(), 0.3)


def test_without_a_compiler_trees_are_attended_with_torch(monkeypatch, caplog):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    batch = sample_micro_batch(model, chain=False, size=40)
    monkeypatch.setattr(cpu_kernels, "attention_library", lambda: None)
    monkeypatch.setattr(cpu_kernels, "layers_library", lambda: None)
    assert PathSelector()(model, batch) == ExecutionPath("blocks")
    assert PathSelector("kernel")(model, batch) == ExecutionPath(
        "dense"
    )  # requested by name: the warning gives the reason
    assert "no C compiler" in caplog.text


def test_a_window_shorter_than_a_chunk_of_keys_leaves_the_rest_out():
    agree(forest(bush(700, 3, 90)), 4, 2, 16, AttentionLimits(40))
