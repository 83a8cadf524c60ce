"""Parameter counts of a model, from its name or its `config.json`, without its weights and without torch.

Counts the parts of a Llama: embedding, attention, gated feed-forward part (perhaps as experts), head. A test compares
the counts with torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.config.run_config import ModelConfig
from arborl.errors import ConfigError, did_you_mean
from arborl.learner.core.memory_forecast import ModelSizes
from arborl.models.model_files import EMBEDDED, is_model_folder, read_model_config, resolve

ITEM_BYTES = {"auto": 2, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LEAN = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with a lean forward pass."""
TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 128}
CONFIG_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size",
)  # fmt: skip
_SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "Qwen2.5-0.5B": (("qwen2", 896, 4864, 24, 14, 2, 151936), TIED),
    "Qwen2.5-1.5B": (("qwen2", 1536, 8960, 28, 12, 2, 151936), TIED),
    "Qwen2.5-3B": (("qwen2", 2048, 11008, 36, 16, 2, 151936), TIED),
    "Qwen2.5-7B": (("qwen2", 3584, 18944, 28, 28, 4, 152064), {}),
    "Qwen2.5-14B": (("qwen2", 5120, 13824, 48, 40, 8, 152064), {}),
    "Qwen2.5-32B": (("qwen2", 5120, 27648, 64, 40, 8, 152064), {}),
    "Qwen2.5-72B": (("qwen2", 8192, 29568, 80, 64, 8, 152064), {}),
    "Qwen3-0.6B": (("qwen3", 1024, 3072, 28, 16, 8, 151936), WIDE | TIED),
    "Qwen3-1.7B": (("qwen3", 2048, 6144, 28, 16, 8, 151936), WIDE | TIED),
    "Qwen3-4B": (("qwen3", 2560, 9728, 36, 32, 8, 151936), WIDE | TIED),
    "Qwen3-8B": (("qwen3", 4096, 12288, 36, 32, 8, 151936), WIDE),
    "Qwen3-14B": (("qwen3", 5120, 17408, 40, 40, 8, 151936), WIDE),
    "Qwen3-32B": (("qwen3", 5120, 25600, 64, 64, 8, 151936), WIDE),
    "Llama-3.2-1B": (("llama", 2048, 8192, 16, 32, 8, 128256), TIED),
    "Llama-3.1-8B": (("llama", 4096, 14336, 32, 32, 8, 128256), {}),
    "Llama-3.1-70B": (("llama", 8192, 28672, 80, 64, 8, 128256), {}),
    "smollm2": (("llama", 576, 1536, 30, 9, 3, 49152), TIED),
}
KNOWN_CONFIGS: dict[str, Mapping[str, Any]] = {
    name: dict(zip(CONFIG_KEYS, values, strict=True)) | more for name, (values, more) in _SHAPES.items()
}
"""Configurations of models that need not be on this machine."""
SHORT_NAMES = {
    "0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "3b": "Qwen2.5-3B", "4b": "Qwen3-4B", "7b": "Qwen2.5-7B",
    "8b": "Qwen3-8B", "14b": "Qwen2.5-14B", "32b": "Qwen2.5-32B", "70b": "Llama-3.1-70B", "72b": "Qwen2.5-72B",
}  # fmt: skip
SUFFIXES = re.compile(r"(-(instruct|base|chat|it|\d{4}))+$", re.IGNORECASE)
"""Suffixes of model names that do not change the shape."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    sizes: ModelSizes
    body: int
    """Parameters of the layers that one token uses; of experts, the active ones."""
    head: int
    """Parameters of the output head."""

    @property
    def kv_token(self) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.sizes.layers * self.sizes.keys * self.sizes.item

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a sampling step reads, without the embedding."""
        return (self.body + self.head) * self.sizes.item


def model_shape(config: ModelConfig) -> ModelShape:
    return shape_from_config(config.name, _find_config(config.name), config)


def _find_config(name: str) -> Mapping[str, Any]:
    """The model's `config.json`, or a known configuration; nothing is downloaded."""
    path = Path(name).expanduser()
    if path.is_dir() and is_model_folder(path):
        return read_model_config(path)
    if name == "seedling":
        return read_model_config(resolve(name))
    plain = SUFFIXES.sub("", name.rpartition("/")[2])
    known = {one.lower(): one for one in KNOWN_CONFIGS}
    key = SHORT_NAMES.get(plain.lower()) or known.get(plain.lower())
    if key is None:
        hint = did_you_mean(plain, [*KNOWN_CONFIGS, *SHORT_NAMES, *EMBEDDED])
        raise ConfigError(
            f"model.name={name}: its shape is unknown, and the planner downloads nothing.{hint} Write a folder with a "
            f"config.json, or one of {', '.join([*SHORT_NAMES, *KNOWN_CONFIGS, 'seedling'])}."
        )
    return KNOWN_CONFIGS[key]


def shape_from_config(name: str, values: Mapping[str, Any], config: ModelConfig) -> ModelShape:
    """Count parameters from the keys of a `config.json`."""
    values = values.get("text_config") or values
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [key for key in required if not isinstance(values.get(key), int)]:
        raise ConfigError(
            f"model.name={name}: its config.json has no {', '.join(missing)}. Write a model of the Llama, Mistral, "
            "Qwen or Gemma family."
        )
    hidden, layers, heads, vocabulary = (values[key] for key in required)
    kind = str(values.get("model_type", "llama"))
    head_dim = values.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (values.get("num_key_value_heads") or heads) * head_dim
    inner = values.get("intermediate_size") or 4 * hidden
    experts = values.get("num_experts") or values.get("num_local_experts") or 1
    active = values.get("num_experts_per_tok") or 1
    expert_inner = (values.get("moe_intermediate_size") or inner) if experts > 1 else inner
    head_norms = kind.startswith(("qwen3", "gemma3"))
    attention = hidden * (2 * queries + 2 * keys)
    small = 2 * hidden + (2 * head_dim if head_norms else 0) + (queries + 2 * keys if kind.startswith("qwen2") else 0)
    small += hidden * experts if experts > 1 else 0
    tied = bool(values.get("tie_word_embeddings", kind.startswith("gemma")))
    embedding = vocabulary * hidden
    base = layers * (attention + small + 3 * experts * hidden * expert_inner) + hidden + embedding * (1 if tied else 2)
    body = layers * (attention + small + 3 * active * hidden * expert_inner)
    rank, item = config.lora.rank, ITEM_BYTES[config.dtype]
    adapters = layers * rank * (4 * hidden + 2 * (queries + keys) + 3 * (hidden + expert_inner) * experts)
    frozen = base * item if config.quantize == "none" else base // 2
    sizes = ModelSizes(
        weights=frozen + 4 * adapters,
        parameters=base + adapters,
        trained=adapters or base,
        coarse=0 if adapters or item >= 4 else base,
        largest=rank * max(queries, expert_inner, hidden) if adapters else max(embedding, hidden * expert_inner),
        item=item,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        inner=active * expert_inner,
        vocabulary=vocabulary,
        head_norms=head_norms,
        rank=rank,
        lean=kind in LEAN,
    )
    return ModelShape(name, sizes, body, embedding)
