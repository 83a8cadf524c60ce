"""Model folders: from `seedling`, `smollm2`, a path or a Hugging Face id to a folder, and the checks that need only its
`config.json`. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, did_you_mean

EMBEDDED = ("seedling", "smollm2")
SEEDLING_DIR = Path(__file__).parents[1] / "seedling" / "weights"
"""Weights, tokenizer and chat template of the embedded model."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")  # endings of the architecture names of causal language models
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend, past a length, on the longest sequence of a batch."""


def resolve(name: str, where: str = "model.name") -> Path:
    if name == "seedling":
        return SEEDLING_DIR
    if name == "smollm2":
        from arborl.models.smollm2 import smollm2_folder

        return smollm2_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        if not is_model_folder(path):
            raise ConfigError(
                f"{where}: the folder {str(path)!r} has no config.json; give a folder in Hugging Face form."
            )
        return path
    if not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{where}: no model is called {name!r} and no such folder exists.{did_you_mean(name, EMBEDDED)} "
            "Write seedling, smollm2, a folder, or a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    return _download(name, where)


def _download(name: str, where: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except errors.GatedRepoError as error:
        reason, remedy = "on the Hugging Face hub it is gated", "Request access there and log in, or give a folder."
        cause: Exception = error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        reason, remedy, cause = "the Hugging Face hub has none either", "Check the id, or give a folder.", error
    except Exception as error:
        reason = f"the Hugging Face hub cannot be reached ({type(error).__name__})"
        remedy, cause = "Check the network, or give a folder.", error
    raise ConfigError(
        f"{where}: no model here is called {name!r}, no such folder exists, and {reason}."
        f"{did_you_mean(name, EMBEDDED)} {remedy}"
    ) from cause


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has a model in Hugging Face form, or adapters of one."""
    return any((folder / file).exists() for file in ("config.json", "adapter_config.json"))


def read_model_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: contains a {type(config).__name__}; expected an object.")
    return config


def tokenizer_vocabulary(folder: Path) -> Any:
    """Tokens and ids of `tokenizer.json`, for comparison; None without the file."""
    try:
        state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return state["model"]["vocab"], [(one["id"], one["content"]) for one in state.get("added_tokens", ())]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def check_supported(config: Mapping[str, Any], name: str, max_context: int) -> None:
    """Raise ConfigError for a model that cannot be trained."""
    for architecture in config.get("architectures") or ():
        if not str(architecture).endswith(CAUSAL_SUFFIXES):
            raise ConfigError(
                f"model.name={name}: {architecture} is no causal language model. Choose a model whose architecture "
                "ends in ForCausalLM or LMHeadModel."
            )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "unknown method") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"model.name={name}: its weights are quantised ({method}) and cannot be trained. Choose the original "
            "model; model.quantize=4bit keeps its weights in 4 bits under adapters."
        )
    if unsupported := sorted({*(config.get("layer_types") or ())} - SUPPORTED_LAYERS):
        raise ConfigError(
            f"model.name={name}: it has layers of {unsupported[0]}, which branches of a token tree cannot share. "
            "Choose a model with full or sliding-window attention."
        )
    check_positions(config, name, max_context)


def check_positions(config: Mapping[str, Any], name: str, max_context: int) -> None:
    """Raise ConfigError for a context that is longer than the model's positions."""
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    if longest is not None and max_context > longest:
        raise ConfigError(
            f"sampling.max_context={max_context}: {name} reads {longest} tokens at most. Write "
            f"sampling.max_context={longest} or less."
        )
    for rope in _rope_configs(config):
        kind = rope.get("rope_type") or rope.get("type")
        most = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
        if kind in LENGTH_DEPENDENT_ROPE and most is not None and max_context > most:
            raise ConfigError(
                f"sampling.max_context={max_context}: past {most} tokens the rotary embedding of {name} ({kind}) "
                f"depends on other sequences of the batch. Write sampling.max_context={most} or less."
            )


def _rope_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary settings of all layers, or of each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            yield value
            yield from (part for part in value.values() if isinstance(part, Mapping))
