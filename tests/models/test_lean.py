"""The lean forward pass is the library's, in value and gradient, or it is not used."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arborl.models import fast_forward
from arborl.models.attention import CausalAttention, library_hidden_states

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with biases and scaled positions": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            attention_bias=True,
            mlp_bias=True,
            head_dim=16,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}


def random(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():  # norms and biases too, which start at one and zero
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_the_librarys(kind):
    model = random(kind)
    tokens, positions = torch.randint(0, 60, (20,)), torch.arange(3, 23)
    results = []
    for way in (library_hidden_states, fast_forward.fast_hidden_states):
        model.zero_grad()
        out = way(model, tokens, positions, CausalAttention())
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_rows_that_are_wanted_are_those_of_the_whole_in_value_and_gradient(kind):
    model = random(kind).double()
    tokens, positions, wanted = torch.randint(0, 60, (20,)), torch.arange(3, 23), torch.tensor([0, 4, 5, 13, 19])
    attend, results = CausalAttention(), []
    ways = (
        lambda: fast_forward.fast_hidden_states(model, tokens, positions, attend)[wanted],
        lambda: fast_forward.fast_hidden_states(model, tokens, positions, attend, rows=wanted),
        lambda: fast_forward.fast_hidden_states(model, tokens, positions, attend, fast_forward.run_layers, wanted),
    )
    for way in ways:
        model.zero_grad()
        out = way()
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for whole, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_a_known_kind_is_trusted_after_the_check(kind):
    assert fast_forward.has_fast_forward(random(kind))


def test_a_kind_with_other_norms_keeps_the_librarys_code():
    assert not fast_forward.has_fast_forward(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)).eval())


def test_a_model_that_differs_keeps_the_librarys_code_and_says_so(caplog):
    model = random("llama")
    model.model.layers[1].mlp.forward = lambda x: x  # someone changed the computation
    assert not fast_forward.has_fast_forward(model)
    assert "without short forward pass" in caplog.text
    assert "slower" in caplog.text
