"""Truncated sampling, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from arborl.models.sampling import DistributionParams, sampling_logprobs
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
