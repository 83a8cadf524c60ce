"""A model with padded heads has the same outputs, also after training."""

from __future__ import annotations

import pytest
import torch

from arborl.engines.remote.padded_heads import PaddedHeads, export_padded, head_size
from arborl.models.attention import CausalAttention, library_hidden_states, logits
from arborl.models.model_files import read_model_config, resolve
from arborl.models.model_loading import load_model


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return load_model(export_padded(resolve("seedling"), tmp_path_factory.mktemp("padded"), 64), device="cpu")


def read(model, ids):
    """Logits of a sequence."""
    return logits(model, library_hidden_states(model, ids, torch.arange(len(ids)), CausalAttention()))


def loss_of(model):
    ids = torch.arange(3, 60)
    return read(model, ids).log_softmax(-1)[:-1].gather(-1, ids[1:, None]).mean()


def test_a_model_with_padded_heads_has_the_same_outputs(seedling, padded):
    model, _ = seedling
    ids = torch.arange(1, 400) % 2000
    assert padded.config.head_dim == 64
    torch.testing.assert_close(read(padded, ids), read(model, ids), atol=2e-4, rtol=1e-4)


def test_training_it_leaves_the_added_weights_at_zero(padded):
    loss_of(padded).backward()
    layer = padded.model.layers[2].self_attn
    heads = PaddedHeads(40, 64)
    added = sorted({*range(64)} - {*heads.index.tolist()})
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        gradient = projection.weight.grad.view(-1, 64, projection.weight.shape[1])
        assert gradient[:, added].abs().max() == 0
        assert gradient[:, heads.index].abs().max() > 0
    assert layer.o_proj.weight.grad.view(160, -1, 64)[..., added].abs().max() == 0
    padded.zero_grad()


def test_adapters_are_padded_like_the_weights_they_correct():
    heads = PaddedHeads(4, 6)
    down, up, out = torch.randn(2, 5), torch.randn(8, 2), torch.randn(2, 8)
    whole = heads.tensor("a.q_proj.weight", up @ down)
    parts = heads.tensor("a.q_proj.lora_B.default.weight", up) @ heads.tensor("a.q_proj.lora_A.default.weight", down)
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(
        heads.tensor("a.o_proj.weight", up @ out), up @ heads.tensor("a.o_proj.lora_A.default.weight", out)
    )


def test_heads_that_hold_more_than_attention_are_refused():
    about = read_model_config(resolve("seedling"))
    assert head_size(about) == 40
    with pytest.raises(ValueError, match="only padded in models like llama"):
        PaddedHeads(40, 64).config({**about, "model_type": "qwen3"})
