"""From a folder to a model that engine and learner share."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from arborl.errors import ConfigError
from arborl.models.attention import NAME
from arborl.models.find import holds_model as holds_model
from arborl.models.find import resolve as resolve


def device_of(name: str) -> torch.device:
    """`auto` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.device={name}: cannot be used here ({why}). Write auto, cpu or cuda.") from error
    return device


def tune_cpu() -> None:
    """On Arm, leave matrix products to the BLAS: oneDNN repacks the weights at every call, which doubles the time of
    the small batches that sampling is made of and gains nothing on large ones (docs/results/engine.md)."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def load_model(folder: Path, dtype: str = "float32", device: str = "auto") -> PreTrainedModel:
    """The model, ready for learner and engine; dropout off."""
    place = device_of(device)
    disable_progress_bar()
    tune_cpu()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.set_attn_implementation(NAME)
    return model.to(place).eval()
