"""Truncated sampling, against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from arborl.models import sampling
from arborl.models.sampling import DistributionParams, kept_tokens, sampling_logprobs
from arborl.types import Sampling

CPU = torch.device("cpu")


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_top_k_top_p_and_min_p_keep_what_transformers_keeps(seed, temperature, top_k, top_p, min_p):
    torch.manual_seed(seed)
    logits = torch.randn(4, 40, dtype=torch.float64) * 2
    ours = sampling_logprobs(
        logits, DistributionParams.of([Sampling(8, temperature, top_k=top_k, top_p=top_p, min_p=min_p)], CPU)
    )
    theirs = logits / temperature
    if top_k:
        theirs = TopKLogitsWarper(min(top_k, 40))(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    torch.testing.assert_close(ours, torch.log_softmax(theirs, -1))


def kept_by_sorting(logits: np.ndarray, one: Sampling) -> np.ndarray:
    order = np.argsort(-logits, kind="stable")
    k = one.top_k or len(logits)
    weight = np.exp(logits[order] - logits[order[0]])
    weight[k:] = 0.0
    probability = weight / weight.sum()
    before = np.concatenate([[0.0], np.cumsum(probability)[:-1]])
    kept = (np.arange(len(logits)) < k) & ((before < one.top_p) | (one.top_p >= 1))
    kept &= probability >= one.min_p * probability[0]
    kept[0] = True
    return np.isin(np.arange(len(logits)), order[kept])


SETTINGS = st.builds(
    Sampling,
    max_tokens=st.just(8),
    top_k=st.sampled_from([0, 0, 1, 3, 7, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
)


@given(
    seed=st.integers(0, 10_000),
    prefix=st.sampled_from([1, 4, 16, 2048]),
    values=st.sampled_from([3, 10, None]),
    masked=st.booleans(),
    rows_at_once=st.sampled_from([1, 2, 100]),
    settings=st.lists(SETTINGS, min_size=1, max_size=5),
)
def test_kept_tokens_are_those_of_a_stable_sort_whatever_part_is_sorted(
    seed, prefix, values, masked, rows_at_once, settings
):
    rng = np.random.default_rng(seed)
    shape = (len(settings), 40)
    logits = rng.normal(size=shape) * 3 if values is None else rng.integers(0, values, shape).astype(float)  # ties
    if masked:  # as by a schema
        logits[:, 1:][rng.random((len(settings), 39)) < 0.8] = -np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "PREFIX", prefix)
        patch.setattr(sampling, "MAX_LOGITS_AT_ONCE", 40 * rows_at_once)
        found = kept_tokens(torch.from_numpy(logits), DistributionParams.of(settings, CPU)).numpy()
    possible = np.isfinite(logits)  # whether a token of probability 0 is kept makes no difference
    expected = np.stack([kept_by_sorting(row, one) for row, one in zip(logits, settings, strict=True)])
    np.testing.assert_array_equal(found & possible, expected & possible)


def test_a_flat_distribution_is_sorted_completely():
    logits = torch.linspace(0, 0.01, 5000)[None]
    kept = kept_tokens(logits, DistributionParams.of([Sampling(top_p=0.9)], CPU))[0]
    assert 4490 <= int(kept.sum()) <= 4510
    assert bool(kept[-4490:].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limits", [{"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_logits_of_16_bits_keep_what_they_keep_in_32_bits_at_any_temperature(dtype, limits):
    logits = (torch.randn(16, 5000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    params = DistributionParams.of([Sampling(temperature=0.7, **limits)], CPU)
    assert torch.equal(kept_tokens(logits, params), kept_tokens(logits.float(), params))


def test_nan_reaches_the_log_probabilities_of_its_row_only():
    logits = torch.randn(3, 50)
    logits[1, 7] = torch.nan
    params, token = DistributionParams.of([Sampling(top_p=0.9)], CPU), torch.tensor([0, 1, 2])
    scored = sampling_logprobs(logits, params, token_B=token).gather(1, token[:, None])[:, 0]
    assert scored.isnan().tolist() == [False, True, False]


def test_no_rows_have_no_kept_tokens():
    params = DistributionParams.of([Sampling(top_p=0.9)], CPU)
    assert kept_tokens(torch.zeros(0, 50), params).shape == (0, 50)


@pytest.mark.parametrize("offset", [0.0, 3.3, -7.7])
def test_of_equally_likely_tokens_as_many_are_kept_whatever_their_logit(offset):
    params = DistributionParams.of([Sampling(top_p=0.5)], CPU)
    assert kept_tokens(torch.full((1, 8), offset), params)[0].tolist() == [True] * 4 + [False] * 4


def test_rows_may_differ_in_their_settings():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(3, 3)
    samplings = [Sampling(top_k=1), Sampling(top_p=0.6), Sampling()]
    probs = sampling_logprobs(logits, DistributionParams.of(samplings, CPU)).exp()
    torch.testing.assert_close(probs, torch.tensor([[1.0, 0.0, 0.0], [0.625, 0.375, 0.0], [0.5, 0.3, 0.2]]))


def test_a_token_that_was_drawn_is_scored_even_if_it_would_not_be_drawn_now():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).requires_grad_()
    scored = sampling_logprobs(logits, DistributionParams.of([Sampling(top_k=1)], CPU), token_B=torch.tensor([2]))
    assert scored[0, 2].exp().item() == pytest.approx(0.2 / 0.7)
    scored[0, 2].backward()
    assert torch.isfinite(logits.grad).all()
