"""From a name to a model's folder: `seedling`, `smollm2`, a folder, or a Hugging Face id; and what a folder's
`config.json` alone says cannot be done. Needs no torch."""

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
WRITES = ("ForCausalLM", "LMHeadModel")
"""How architectures end that write text from left to right."""
ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layer that a tree and a cache can be made of."""
STRETCHED = ("dynamic", "longrope")
"""Position embeddings that, past a length, depend on the longest sequence that is run."""


def resolve(name: str, where: str = "model.name") -> Path:
    """The folder that holds the model's files; downloads a Hugging Face id where a hub can be reached.

    Args:
        name: of the model.
        where: the key that names it, for messages.
    """
    if name == "seedling":
        return SEEDLING_DIR
    if name == "smollm2":
        from arborl.models.smollm2 import folder

        return folder()
    path = Path(name).expanduser()
    if path.is_dir():
        if not holds_model(path):
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
        why, what = "on the Hugging Face hub it is gated", "Ask for access there and log in, or give a folder."
        cause: Exception = error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        why, what, cause = "the Hugging Face hub knows none either", "Check the id, or give a folder.", error
    except Exception as error:
        why = f"the Hugging Face hub cannot be reached to look for it ({type(error).__name__})"
        what, cause = "Check the network, or give a folder.", error
    raise ConfigError(
        f"{where}: no model here is called {name!r}, no such folder exists, and {why}."
        f"{did_you_mean(name, EMBEDDED)} {what}"
    ) from cause


def holds_model(folder: Path) -> bool:
    """Whether a folder is a model in Hugging Face form, or adapters of one."""
    return any((folder / file).exists() for file in ("config.json", "adapter_config.json"))


def described(folder: Path) -> dict[str, Any]:
    """The model's `config.json`; empty where there is none (adapters)."""
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(about, dict):
        raise ConfigError(f"{file}: holds a {type(about).__name__} where an object is wanted.")
    return about


def vocabulary(folder: Path) -> Any:
    """Tokens and their ids, as `tokenizer.json` has them, to be compared; None where there is no such file."""
    try:
        about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return about["model"]["vocab"], [(one["id"], one["content"]) for one in about.get("added_tokens", ())]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def stored_dtype(about: Mapping[str, Any]) -> str:
    """The precision of a model's files, as its `config.json` has it."""
    return str(about.get("dtype") or about.get("torch_dtype") or "float32")


def check_supported(about: Mapping[str, Any], name: str, max_context: int) -> None:
    """Refuse what this model cannot do, before its weights are read where possible.

    Args:
        about: its `config.json`.
        name: what the configuration calls it.
        max_context: the longest prompt and completion that will be asked of it.
    """
    for kind in about.get("architectures") or ():
        if not str(kind).endswith(WRITES):
            raise ConfigError(
                f"model.name={name}: it is a {kind}, which does not write text from left to right. Choose a model "
                "whose architecture ends in ForCausalLM or LMHeadModel."
            )
    if quantized := about.get("quantization_config"):
        method = quantized.get("quant_method", "how is not said") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"model.name={name}: its weights are quantised ({method}), and such weights cannot be trained. Choose the "
            "model they were made from; model.quantize=4bit keeps its weights in 4 bits under adapters."
        )
    if odd := sorted({*(about.get("layer_types") or ())} - ATTENTION):
        raise ConfigError(
            f"model.name={name}: it has layers of {odd[0]}, which branches of a tree cannot share. Choose a model of "
            "full or sliding-window attention."
        )
    check_positions(about, name, max_context)


def check_positions(about: Mapping[str, Any], name: str, max_context: int) -> None:
    """Refuse contexts that are longer than the model's positions."""
    longest = about.get("max_position_embeddings") or about.get("n_positions")
    if longest is not None and max_context > longest:
        raise ConfigError(
            f"sampling.max_context={max_context}: {name} reads {longest} tokens at most. Write "
            f"sampling.max_context={longest} or less."
        )
    for rope in _ropes(about):
        kind = rope.get("rope_type") or rope.get("type")
        most = rope.get("original_max_position_embeddings") or about.get("original_max_position_embeddings") or longest
        if kind in STRETCHED and most is not None and max_context > most:
            raise ConfigError(
                f"sampling.max_context={max_context}: past {most} tokens the position embedding of {name} ({kind}) "
                f"depends on what else is run beside a sequence. Write sampling.max_context={most} or less."
            )


def _ropes(about: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is said of rotary embeddings, for all layers or for each kind."""
    for key in ("rope_parameters", "rope_scaling"):
        said = about.get(key)
        if isinstance(said, Mapping):
            yield said
            yield from (part for part in said.values() if isinstance(part, Mapping))
