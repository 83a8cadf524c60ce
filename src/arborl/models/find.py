"""From a name to a model's folder: `seedling`, `smollm2`, a folder, or a Hugging Face id. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, did_you_mean
from arborl.models.seedling import WEIGHTS

EMBEDDED = ("seedling", "smollm2")


def resolve(name: str, where: str = "model.name") -> Path:
    """The folder that holds the model's files; downloads a Hugging Face id where a hub can be reached.

    Args:
        name: of the model.
        where: the key that names it, for messages.
    """
    if name == "seedling":
        return WEIGHTS
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
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"{where}: no model is called {name!r} and no such folder exists.{did_you_mean(name, EMBEDDED)} "
            "Write seedling, smollm2, a folder, or a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except Exception as error:
        raise ConfigError(
            f"{where}: cannot fetch {name!r} from the Hugging Face hub ({type(error).__name__}). Check the id "
            "and the network, or give a folder."
        ) from error


def holds_model(folder: Path) -> bool:
    """Whether a folder is a model in Hugging Face form, or adapters of one."""
    return any((folder / file).exists() for file in ("config.json", "adapter_config.json"))


def described(folder: Path) -> dict[str, Any]:
    """The model's `config.json`; empty where there is none to read (adapters)."""
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def vocabulary(folder: Path) -> Any:
    """Tokens and their ids, as `tokenizer.json` has them, to be compared; None where there is no such file."""
    try:
        about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return about["model"]["vocab"], [(one["id"], one["content"]) for one in about.get("added_tokens", ())]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_supported(about: Mapping[str, Any], name: str, max_context: int) -> None:
    """Refuse what this model cannot do, before its weights are read where possible.

    Args:
        about: its `config.json`.
        name: what the configuration calls it.
        max_context: the longest prompt and completion that will be asked of it.
    """
    window, layers = about.get("sliding_window"), about.get("layer_types")
    if window is not None and about.get("use_sliding_window", True) and (not layers or "sliding_attention" in layers):
        same = ""
        if max_context <= window:
            same = (
                ' Or, as no context here is longer than its window, write "sliding_window": null (and only '
                '"full_attention" in "layer_types") in its config.json: the model is the same.'
            )
        raise ConfigError(
            f"model.name={name}: its attention sees a sliding window of {window} tokens, which is not supported. "
            f"Choose a model that attends to all of its context.{same}"
        )
    longest = about.get("max_position_embeddings")
    if longest is not None and max_context > longest:
        raise ConfigError(
            f"sampling.max_context={max_context}: {name} reads {longest} tokens at most. Write "
            f"sampling.max_context={longest} or less."
        )
