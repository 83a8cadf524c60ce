"""Models of the benchmarks: trained weights (`smollm2`, `seedling`, a folder), or random weights with the shapes of
known models, which need no download.

`0.5b`, `1.5b`, `7b` have Qwen2.5's shapes, `4b` has Qwen3's, `tiny` is for quick tests of a benchmark. Random weights
get outliers (`add_outliers`), because code that is checked against a reference implementation, or that depends on the
magnitude of activations, takes other execution paths with trained weights than with plain random ones. `weights_kind`
returns the value of `weights` in a result.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.config.run_config import LoraConfig
from arborl.models.lora import add_lora
from arborl.models.model_files import resolve
from arborl.models.model_loading import load_model

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm/bin/python"
"""The interpreter that `make test-vllm` sets up."""
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
"""The first token id that is an attention sink, and the distance between two such ids."""
MASSIVE_VALUES = (1000.0, 500.0, 250.0)
"""Values of sink tokens in as many channels of the residual stream."""
IGNORED_NORM_WEIGHT = 1e-4
"""Weight of the last norm at outlier channels, so that logits do not depend on them."""
FORBIDDEN_BIAS = -1e4
"""Added to the logit of a token that must not be sampled."""


def load(name: str, device: str, dtype: torch.dtype | None = None, outliers: bool = True) -> PreTrainedModel:
    """Load a model without end tokens, with the default attention of transformers.

    Args:
        name: a key of `SHAPES`, or a value of the setting `model.name`.
        device: `cpu` or `cuda`.
        dtype: data type of the weights; by default bfloat16 on a GPU and float32 on a CPU.
        outliers: add outliers to random weights.
    """
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if name in SHAPES:
        return random_model(name, device, dtype, outliers)
    model = load_model(resolve(name), str(dtype).removeprefix("torch."), device)
    model.set_attn_implementation("sdpa")
    remove_end_tokens(model)
    return model


def weights_kind(name: str, outliers: bool = True) -> str:
    """`real`, `random+outliers` or `random`."""
    if name not in SHAPES:
        return "real"
    return "random+outliers" if outliers else "random"


def random_model(name: str, device: str, dtype: torch.dtype | None = None, outliers: bool = True) -> PreTrainedModel:
    """Create a model with random weights on its device, the same at every call and without end tokens."""
    torch.manual_seed(0)
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype or (torch.bfloat16 if device == "cuda" else torch.float32))
    try:
        with torch.device(device):
            is_qwen3 = "head_dim" in SHAPES[name]
            config = (Qwen3Config if is_qwen3 else Qwen2Config)(**SHAPES[name])
            model: PreTrainedModel = (Qwen3ForCausalLM if is_qwen3 else Qwen2ForCausalLM)(config)
    finally:
        torch.set_default_dtype(previous_dtype)
    remove_end_tokens(model)
    if outliers:
        add_outliers(model)
    return model.eval()


@torch.no_grad()
def add_outliers(model: PreTrainedModel, seed: int = 0) -> None:
    """Add the outliers of trained models to random weights: massive activations and attention sinks.

    Every `SINK_EVERY`th token id, from `SINK` on, has the values `MASSIVE_VALUES` in a few channels of the residual
    stream, where other tokens have about 1; after the norm such tokens are almost equal. All tokens share a smaller
    constant in one further channel. After the first eighth of the layers, that constant turns every query, and the
    massive channels turn the keys of sink tokens, to one direction at the slowest rotary frequency, so that most
    attention goes to sink tokens at any distance. As in trained models, values, MLPs and the output head ignore the
    massive channels.

    Args:
        model: a model with Llama's layers and random weights of standard deviation 0.02.
        seed: seed of the choice of channels.
    """
    hidden = model.config.hidden_size
    rng = torch.Generator().manual_seed(seed)
    common_channel, *massive_channels = torch.randperm(hidden, generator=rng)[: 1 + len(MASSIVE_VALUES)].tolist()
    embeddings = model.get_input_embeddings().weight
    embeddings[:, common_channel] = hidden**0.5 / 4
    embeddings[SINK::SINK_EVERY, massive_channels] = torch.tensor(MASSIVE_VALUES).to(embeddings)
    trunk = model.base_model
    trunk.norm.weight[[common_channel, *massive_channels]] = IGNORED_NORM_WEIGHT
    layers = list(trunk.layers)
    for layer in layers[len(layers) // 8 :]:
        attention = layer.self_attn
        slowest_frequency = attention.head_dim // 2 - 1
        for projection, channel, size in (
            (attention.q_proj, common_channel, 1.0),
            (attention.k_proj, massive_channels[0], 0.5),
        ):
            rows = projection.weight.view(-1, attention.head_dim, hidden)
            rows[:, :, channel] = 0.0
            rows[:, slowest_frequency, channel] = size
        for projection in (attention.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[:, massive_channels] = 0.0


def remove_end_tokens(model: PreTrainedModel) -> None:
    """Remove begin and end tokens from the configuration, so that no token ends a reply."""
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = None


def add_random_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """Add adapters with random, nonzero weights to all linear layers."""
    add_lora(model, LoraConfig(rank=rank))
    rng = torch.Generator(model.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01, generator=rng)
    return model


def forbid_tokens(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Prevent sampling of these tokens: a model with random weights would sample control tokens anywhere."""
    head = model.get_output_embeddings()
    biased_head = nn.Linear(head.in_features, head.out_features, device="meta")
    biased_head.weight = head.weight
    biased_head.bias = nn.Parameter(head.weight.new_zeros(head.out_features), requires_grad=False)
    biased_head.bias[list(tokens)] = FORBIDDEN_BIAS
    model.set_output_embeddings(biased_head)


def freeze_garbage_collector() -> None:
    """Exclude the objects of the libraries from garbage collection, as a training run does."""
    gc.collect()
    gc.freeze()
