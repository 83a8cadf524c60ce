"""Random models of well-known shapes, for benchmarks: their speed is that of the real ones, and nothing is downloaded.

`0.5b`, `1.5b`, `7b` are Qwen2.5's, `4b` is Qwen3's, `tiny` is for trying a benchmark out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.config.run import LoraConfig
from arborl.models.lora import add_lora

QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
SHAPES = {
    "0.5b": QWEN2 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "4b": QWEN2 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "7b": QWEN2 | {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "tiny": QWEN2 | {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
FORBIDDEN = -1e4
"""Added to the logit of a token that is never to be sampled."""


def random_body(name: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The same weights at every call, made where they stay; no token ends a reply."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or (torch.bfloat16 if device == "cuda" else torch.float32))
    try:
        with torch.device(device):
            three = "head_dim" in SHAPES[name]
            config = (Qwen3Config if three else Qwen2Config)(**SHAPES[name])
            model: PreTrainedModel = (Qwen3ForCausalLM if three else Qwen2ForCausalLM)(config)
    finally:
        torch.set_default_dtype(before)
    endless(model)
    return model.eval()


def endless(model: PreTrainedModel) -> None:
    """No token ends a reply."""
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = None


def give_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Adapters at all linear layers, that do something."""
    add_lora(model, LoraConfig(rank=rank))
    chance = torch.Generator(model.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01, generator=chance)
    return model


def forbid(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """The model never says these: random weights would end their turn, or begin another's, at any token."""
    head = model.get_output_embeddings()
    silent = nn.Linear(head.in_features, head.out_features, device="meta")
    silent.weight = head.weight
    silent.bias = nn.Parameter(head.weight.new_zeros(head.out_features), requires_grad=False)
    silent.bias[list(tokens)] = FORBIDDEN
    model.set_output_embeddings(silent)


def settle() -> None:
    """As a run does: the libraries' objects are not looked through again and again."""
    gc.collect()
    gc.freeze()
