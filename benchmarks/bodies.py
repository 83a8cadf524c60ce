"""Models for benchmarks: real weights (`smollm2`, `seedling`, a folder), or random weights of well-known shapes, for
which nothing is downloaded.

`0.5b`, `1.5b`, `7b` are Qwen2.5's shapes, `4b` is Qwen3's, `tiny` is for trying a benchmark out. Random weights are
given outliers (`add_outliers`), because code that is checked against a reference, or that depends on the size of
activations, takes other paths on real weights than on plain random ones. `weights_of` is what a result's `weights`
says.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.config.run_config import LoraConfig
from arborl.models.lora import add_lora
from arborl.models.model_files import resolve
from arborl.models.model_loading import load_model

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
SINK, SINK_EVERY = 2, 64
"""The first token that draws attention, and how often there is another."""
MASSIVE = (1000.0, 500.0, 250.0)
"""What those tokens have in as many channels of the residual stream."""
IGNORED = 1e-4
"""The last norm's weight at outlying channels: logits do not depend on them."""
FORBIDDEN = -1e4
"""Added to the logit of a token that is never to be sampled."""


def load(name: str, device: str, dtype: torch.dtype | None = None, outliers: bool = True) -> PreTrainedModel:
    """A model whose replies no token ends, attended as transformers does by default. bfloat16 on a GPU, else float32.

    Args:
        name: a shape of random weights, or what `model.name` may be.
        device: where it is.
        dtype: of its weights.
        outliers: given to random weights.
    """
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if name in SHAPES:
        return random_body(name, device, dtype, outliers)
    model = load_model(resolve(name), str(dtype).removeprefix("torch."), device)
    model.set_attn_implementation("sdpa")
    endless(model)
    return model


def weights_of(name: str, outliers: bool = True) -> str:
    """`real`, `random+outliers` or `random`."""
    if name not in SHAPES:
        return "real"
    return "random+outliers" if outliers else "random"


def random_body(name: str, device: str, dtype: torch.dtype | None = None, outliers: bool = True) -> PreTrainedModel:
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
    if outliers:
        add_outliers(model)
    return model.eval()


@torch.no_grad()
def add_outliers(model: PreTrainedModel, seed: int = 0) -> None:
    """Give random weights the outliers of trained ones: massive activations, and attention sinks.

    Every `SINK_EVERY`th token, `SINK` first, has `MASSIVE` in a few channels of the residual stream, where others have
    about 1: normed, such tokens are almost alike. All tokens share a smaller constant in one further channel. From an
    eighth of the layers on, that constant turns every query, and the massive channels turn the keys of those tokens,
    into one direction, at the slowest rotary frequency: most attention goes to them, from however far. As in trained
    models their values and MLPs ignore the massive channels, and so does the head.

    Args:
        model: Llama's kind of layers, with random weights of standard deviation 0.02.
        seed: of the choice of channels.
    """
    hidden = model.config.hidden_size
    chance = torch.Generator().manual_seed(seed)
    common, *massive = torch.randperm(hidden, generator=chance)[: 1 + len(MASSIVE)].tolist()
    embeddings = model.get_input_embeddings().weight
    embeddings[:, common] = hidden**0.5 / 4
    embeddings[SINK::SINK_EVERY, massive] = torch.tensor(MASSIVE).to(embeddings)
    body = model.base_model
    body.norm.weight[[common, *massive]] = IGNORED
    layers = list(body.layers)
    for layer in layers[len(layers) // 8 :]:
        attention = layer.self_attn
        slowest = attention.head_dim // 2 - 1
        for projection, channel, size in ((attention.q_proj, common, 1.0), (attention.k_proj, massive[0], 0.5)):
            rows = projection.weight.view(-1, attention.head_dim, hidden)
            rows[:, :, channel] = 0.0
            rows[:, slowest, channel] = size
        for projection in (attention.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[:, massive] = 0.0


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
