"""From a name to a model and its folder: `seedling`, `smollm2`, a folder, or a Hugging Face id."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from arborl.errors import ConfigError, did_you_mean
from arborl.models.attention import NAME
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


def device_of(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device: {name!r} is not a device. Write auto, cpu or cuda.") from error


def tune_cpu() -> None:
    """On Arm, leave matrix products to the BLAS: oneDNN repacks the weights at every call, which doubles the time of
    the small batches that sampling is made of and gains nothing on large ones (docs/results/engine.md)."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def load_model(folder: Path, dtype: str = "float32", device: str = "auto") -> PreTrainedModel:
    """The model, ready for learner and engine; dropout off."""
    disable_progress_bar()
    tune_cpu()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.set_attn_implementation(NAME)
    return model.to(device_of(device)).eval()
