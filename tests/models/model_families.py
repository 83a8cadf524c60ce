"""Tiny random models of every family that is supported by name: two layers (or as many kinds of layer as there are)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY, WINDOW = 96, 7
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def made(name: str, **more: object) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
        model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")
        return model(config(**{**SIZES, **more}))

    return make


GPT2 = made("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=128)

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": GPT2,
    "gemma": made("Gemma", head_dim=8),
    "gemma2": made("Gemma2", head_dim=8, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=2.0,
                   final_logit_softcapping=3.0, query_pre_attn_scalar=16),
    "gemma3": made("Gemma3", head_dim=8, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=16),
    "mistral": made("Mistral", sliding_window=WINDOW),
    "phi": made("Phi", partial_rotary_factor=0.5, num_key_value_heads=4),
    "phi3": made("Phi3", sliding_window=WINDOW),
    "olmo": made("Olmo"),
    "olmo2": made("Olmo2"),
    "qwen2 with a window": made("Qwen2", sliding_window=WINDOW, use_sliding_window=True, layer_types=MIXED),
    "qwen3 with a window": made("Qwen3", head_dim=8, sliding_window=WINDOW, use_sliding_window=True, layer_types=MIXED),
    "qwen2-moe": made("Qwen2Moe", shared_expert_intermediate_size=16, **EXPERTS),
    "qwen3-moe": made("Qwen3Moe", head_dim=8, **EXPERTS),
    "mixtral": made("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "gpt-neox": made("GPTNeoX", rotary_pct=0.5),
    "starcoder2": made("Starcoder2", sliding_window=WINDOW),
}  # fmt: skip
LEAN = {"mistral", "qwen2 with a window", "qwen3 with a window"}
"""Those that go the lean way; the others are run by the library's own code."""


@cache
def family(name: str) -> PreTrainedModel:
    """Shared by all tests, which must not change it."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start at one and zero
            parameter.normal_(std=0.2)
    return model


def plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """What transformers says of one sequence, by its own attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(own)
