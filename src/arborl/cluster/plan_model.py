"""A model's sizes from its name or its `config.json`, without its weights and without torch.

Counts parameters of the kinds that a Llama is made of: an embedding, layers of attention and a gated feed-forward part,
perhaps several of these as experts, a head. `tests/cluster` counts the same by torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.config.run_config import ModelConfig
from arborl.errors import ConfigError, did_you_mean
from arborl.learner.forecast import Sizes
from arborl.models.find import EMBEDDED, described, holds_model, resolve

ITEM = {"auto": 2, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LEAN = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds whose layers run by our own code."""


def _known(kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any) -> Any:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": vocabulary,
    } | more  # fmt: skip


TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 128}
KNOWN: dict[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _known("qwen2", 896, 4864, 24, 14, 2, 151936, **TIED),
    "Qwen2.5-1.5B": _known("qwen2", 1536, 8960, 28, 12, 2, 151936, **TIED),
    "Qwen2.5-3B": _known("qwen2", 2048, 11008, 36, 16, 2, 151936, **TIED),
    "Qwen2.5-7B": _known("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": _known("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": _known("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "Qwen2.5-72B": _known("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "Qwen3-0.6B": _known("qwen3", 1024, 3072, 28, 16, 8, 151936, **WIDE, **TIED),
    "Qwen3-1.7B": _known("qwen3", 2048, 6144, 28, 16, 8, 151936, **WIDE, **TIED),
    "Qwen3-4B": _known("qwen3", 2560, 9728, 36, 32, 8, 151936, **WIDE, **TIED),
    "Qwen3-8B": _known("qwen3", 4096, 12288, 36, 32, 8, 151936, **WIDE),
    "Qwen3-14B": _known("qwen3", 5120, 17408, 40, 40, 8, 151936, **WIDE),
    "Qwen3-32B": _known("qwen3", 5120, 25600, 64, 64, 8, 151936, **WIDE),
    "Llama-3.2-1B": _known("llama", 2048, 8192, 16, 32, 8, 128256, **TIED),
    "Llama-3.1-8B": _known("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": _known("llama", 8192, 28672, 80, 64, 8, 128256),
    "smollm2": _known("llama", 576, 1536, 30, 9, 3, 49152, **TIED),
}
"""Shapes of models whose files need not be here."""
SHORT = {
    "0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B", "3b": "Qwen2.5-3B", "4b": "Qwen3-4B", "7b": "Qwen2.5-7B",
    "8b": "Qwen3-8B", "14b": "Qwen2.5-14B", "32b": "Qwen2.5-32B", "70b": "Llama-3.1-70B", "72b": "Qwen2.5-72B",
}  # fmt: skip
ENDINGS = re.compile(r"(-(instruct|base|chat|it|\d{4}))+$", re.IGNORECASE)
"""Of names, what does not change a shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the planner sees it."""

    name: str
    sizes: Sizes
    body: int
    """Parameters that a token goes through in the layers; of experts, those it is sent to."""
    head: int
    """Parameters of the product that gives logits."""
    bits: int = 0
    """Of a frozen weight, where it is quantised."""

    @property
    def kv_token(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.sizes.layers * self.sizes.keys * self.sizes.item

    @property
    def read(self) -> int:
        """Bytes of weights that a sampling step reads; an embedding is looked up, not read."""
        return (self.body + self.head) * self.sizes.item


def shape_of(config: ModelConfig) -> Shape:
    """The model of a run, from what its name says."""
    return shaped(config.name, about(config.name), config)


def about(name: str) -> Mapping[str, Any]:
    """A model's `config.json`, or what is known of its shape; nothing is downloaded."""
    path = Path(name).expanduser()
    if path.is_dir() and holds_model(path):
        return described(path)
    if name == "seedling":
        return described(resolve(name))
    plain = ENDINGS.sub("", name.rpartition("/")[2])
    known = {one.lower(): one for one in KNOWN}
    found = SHORT.get(plain.lower()) or known.get(plain.lower())
    if found is None:
        near = did_you_mean(plain, [*KNOWN, *SHORT, *EMBEDDED])
        raise ConfigError(
            f"model.name={name}: its shape is not known, and nothing is downloaded to plan.{near} Write a folder that "
            f"has its config.json, or one of {', '.join([*SHORT, *KNOWN, 'seedling'])}."
        )
    return KNOWN[found]


def shaped(name: str, found: Mapping[str, Any], config: ModelConfig) -> Shape:
    """Count, from the keys of a `config.json`."""
    found = found.get("text_config") or found
    wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [key for key in wanted if not isinstance(found.get(key), int)]:
        raise ConfigError(
            f"model.name={name}: its config.json does not say {', '.join(missing)}, so it cannot be planned with. "
            "Choose a model of the Llama, Mistral, Qwen or Gemma kind."
        )
    hidden, layers, heads, vocabulary = (found[key] for key in wanted)
    kind = str(found.get("model_type", "llama"))
    size = found.get("head_dim") or hidden // heads
    queries, keys = heads * size, (found.get("num_key_value_heads") or heads) * size
    inner = found.get("intermediate_size") or 4 * hidden
    experts = found.get("num_experts") or found.get("num_local_experts") or 1
    active = found.get("num_experts_per_tok") or 1
    wide = (found.get("moe_intermediate_size") or inner) if experts > 1 else inner
    head_norms = kind.startswith(("qwen3", "gemma3"))
    attention = hidden * (2 * queries + 2 * keys)
    small = 2 * hidden + (2 * size if head_norms else 0) + (queries + 2 * keys if kind.startswith("qwen2") else 0)
    small += hidden * experts if experts > 1 else 0
    tied = bool(found.get("tie_word_embeddings", kind.startswith("gemma")))
    embedding = vocabulary * hidden
    own = layers * (attention + small + 3 * experts * hidden * wide) + hidden + embedding * (1 if tied else 2)
    body = layers * (attention + small + 3 * active * hidden * wide)
    rank, item = config.lora.rank, ITEM[config.dtype]
    adapters = layers * rank * (4 * hidden + 2 * (queries + keys) + 3 * (hidden + wide) * experts)
    frozen = own * item if config.quantize == "none" else own // 2
    sizes = Sizes(
        weights=frozen + 4 * adapters,
        parameters=own + adapters,
        trained=adapters or own,
        coarse=0 if adapters or item >= 4 else own,
        largest=rank * max(queries, wide, hidden) if adapters else max(embedding, hidden * wide),
        item=item,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        inner=active * wide,
        vocabulary=vocabulary,
        head_norms=head_norms,
        rank=rank,
        lean=kind in LEAN,
    )
    return Shape(name, sizes, body, embedding, 4 if config.quantize != "none" else 0)
