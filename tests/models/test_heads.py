"""The value head and float32 logits."""

from __future__ import annotations

import copy

import pytest
import torch

from arborl.models.attention import logits
from arborl.models.output_heads import ValueHead, float32_head


def test_a_value_head_starts_at_zero_and_is_finer_than_a_coarse_model(tiny_llama):
    coarse = copy.deepcopy(tiny_llama).bfloat16()
    head = ValueHead(coarse)
    out = head(torch.randn(5, 32, dtype=torch.bfloat16))
    assert out.dtype == torch.float32
    assert out.tolist() == [0.0] * 5
    assert ValueHead(tiny_llama).weight.dtype == torch.float64


def test_a_float32_head_multiplies_in_float32_and_keeps_names_and_weights(tiny_llama):
    model = copy.deepcopy(tiny_llama).bfloat16()
    names, hidden = list(model.state_dict()), torch.randn(6, 32, dtype=torch.bfloat16)
    coarse = logits(model, hidden).detach()
    float32_head(model)
    exact = hidden.double() @ model.lm_head.weight.detach().double().T
    assert list(model.state_dict()) == names
    assert float((logits(model, hidden).detach() - exact).abs().max()) < 1e-6
    assert float((coarse - exact).abs().max()) > 1e-4
    logits(model, hidden).sum().backward()
    assert model.lm_head.weight.grad is not None


def test_a_precise_head_stays_as_it_is(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    float32_head(model)
    assert type(model.lm_head) is torch.nn.Linear


def test_a_head_of_another_kind_is_refused(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="Sequential"):
        float32_head(model)
