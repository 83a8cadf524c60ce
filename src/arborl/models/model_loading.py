"""Loading a model that engine and learner share, and its device and precision of computation."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as verbosity

from arborl.errors import ConfigError
from arborl.models.attention import ATTENTION_NAME
from arborl.models.execution_paths import first_line
from arborl.models.model_files import is_model_folder as is_model_folder
from arborl.models.model_files import read_model_config
from arborl.models.model_files import resolve as resolve

_LOADING = threading.RLock()


class ComputeDevice(NamedTuple):
    """Device and precision of activations. Parameters of a sharded model may stay elsewhere: in host memory and float32
    for matrix products on a GPU in bfloat16."""

    device: torch.device
    dtype: torch.dtype


_compute_devices: WeakKeyDictionary[PreTrainedModel, ComputeDevice] = WeakKeyDictionary()


def compute_device(model: PreTrainedModel) -> ComputeDevice:
    return _compute_devices[model] if model in _compute_devices else ComputeDevice(model.device, model.dtype)


def set_compute_device(model: PreTrainedModel, place: ComputeDevice) -> None:
    """Set where the model computes, if its parameters are stored elsewhere."""
    _compute_devices[model] = place


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        there = "auto or cuda:0" if torch.cuda.is_available() else "auto or cpu"
        raise ConfigError(
            f"model.device={name}: cannot be used here ({reason}). Write model.device={there}."
        ) from error
    return device


def dtype_of(name: str, device: str) -> str:
    """The precision `name`; `auto` is bfloat16 on a GPU that supports it, else float32."""
    if name != "auto":
        return name
    place = device_of(device)
    if place.type != "cuda":
        return "float32"
    with torch.cuda.device(place):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def tune_cpu() -> None:
    """On Arm, use the BLAS for matrix products: oneDNN repacks the weights at every call, which doubles the time of
    small batches (docs/results/engine.md)."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def load_model(folder: Path, dtype: str = "float32", device: str = "auto", headless: bool = False) -> PreTrainedModel:
    """The model in evaluation mode. `headless` allows a missing language-model head."""
    place = device_of(device)
    tune_cpu()
    model = read_weights(folder, headless, dtype=getattr(torch, dtype_of(dtype, device)))
    return model.to(place).eval()


@contextmanager
def weight_loading() -> Iterator[None]:
    """Load weights in one thread at a time, without the library's log lines and progress bars. The library patches its
    classes while it loads and would restore a patched state after two concurrent loads."""
    with _LOADING:
        level = verbosity.get_verbosity()
        verbosity.disable_progress_bar()
        verbosity.set_verbosity_error()
        try:
            yield
        finally:
            verbosity.set_verbosity(level)


def empty_model(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model on the CPU with uninitialised weights, otherwise as made by `load_model`."""
    tune_cpu()
    with weight_loading(), no_init_weights():
        model = kind(config)
        model.tie_weights()
        model.set_attn_implementation(ATTENTION_NAME)
    return model


def read_weights(folder: Path, headless: bool = False, **options: Any) -> PreTrainedModel:
    """The model of a folder. Code that comes with a model is never run. All weights must be present, except those of
    the head if `headless`."""
    config = read_model_config(folder)
    model_type = config.get("model_type")
    if config and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        reason = "it is no causal language model"
        if "auto_map" in config:
            reason = "it needs code that comes with it, which is never run"
        raise ConfigError(
            f"model.name={folder}: transformers {transformers.__version__} has no causal language model of type "
            f"{model_type!r}: {reason}. Choose another model."
        )
    try:
        with weight_loading():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", trust_remote_code=False, ignore_mismatched_sizes=True,
                output_loading_info=True, **options,
            )  # fmt: skip
            model.set_attn_implementation(ATTENTION_NAME)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # broken files raise anything
        raise ConfigError(
            f"model.name={folder}: its weights cannot be read ({first_line(error)}). Download the folder again, or "
            "give another."
        ) from error
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(name if isinstance(name, str) else name[0] for name in info[problem])
        names = [name for name in names if not (headless and name.startswith("lm_head."))]
        if names:
            raise ConfigError(
                f"model.name={folder}: {len(names)} of its weights are {problem.removesuffix('_keys')}, such as "
                f"{names[0]}, and would be random. Give a folder with all weights of the model."
            )
    return model  # type: ignore[no-any-return]
