"""From a name to a model's folder: `seedling`, `smollm2`, a folder, or a Hugging Face id. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, did_you_mean
from arborl.models.seedling import WEIGHTS

EMBEDDED = ("seedling", "smollm2")


def resolve(name: str) -> Path:
    """The folder that holds the model's files; downloads a Hugging Face id where a hub can be reached."""
    if name == "seedling":
        return WEIGHTS
    if name == "smollm2":
        from arborl.models.smollm2 import folder

        return folder()
    path = Path(name).expanduser()
    if path.is_dir():
        if not holds_model(path):
            raise ConfigError(
                f"model.name: the folder {str(path)!r} has no config.json; give a folder in Hugging Face form."
            )
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"model.name: no model is called {name!r} and no such folder exists.{did_you_mean(name, EMBEDDED)} "
            "Write seedling, smollm2, a folder, or a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except Exception as error:
        raise ConfigError(
            f"model.name: cannot fetch {name!r} from the Hugging Face hub ({type(error).__name__}). Check the id "
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
