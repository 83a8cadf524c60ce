"""From a folder to a model that engine and learner share."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as verbosity

from arborl.errors import ConfigError
from arborl.models.attention import NAME
from arborl.models.find import described
from arborl.models.find import holds_model as holds_model
from arborl.models.find import resolve as resolve

_READING = threading.RLock()


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


def dtype_of(name: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return name
    place = device_of(device)
    if place.type != "cuda":
        return "float32"
    with torch.cuda.device(place):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def tune_cpu() -> None:
    """On Arm, leave matrix products to the BLAS: oneDNN repacks the weights at every call, which doubles the time of
    the small batches that sampling is made of and gains nothing on large ones (docs/results/engine.md)."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def load_model(folder: Path, dtype: str = "float32", device: str = "auto", headless: bool = False) -> PreTrainedModel:
    """The model, ready for learner and engine; dropout off. `headless`: the layer that says tokens may be missing."""
    place = device_of(device)
    tune_cpu()
    model = read_weights(folder, headless, dtype=getattr(torch, dtype_of(dtype, device)))
    return model.to(place).eval()


@contextmanager
def quiet() -> Iterator[None]:
    """One reader of weights at a time, in whatever threads: while it reads, the library takes functions out of its
    classes and puts them back afterwards, and of two at once the second would put back what the first had put in.

    Its tables about weights and its bars are not shown: what matters in them is an error of ours."""
    with _READING:
        level = verbosity.get_verbosity()
        verbosity.disable_progress_bar()
        verbosity.set_verbosity_error()
        try:
            yield
        finally:
            verbosity.set_verbosity(level)


def bare_model(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model of this kind, made on the CPU as `load_model` makes it; its weights are to be given to it."""
    tune_cpu()
    with quiet(), no_init_weights():
        model = kind(config)
        model.tie_weights()
        model.set_attn_implementation(NAME)
    return model


def read_weights(folder: Path, headless: bool = False, **how: Any) -> PreTrainedModel:
    """From a folder, by the library's own code and none that comes with the model; all weights must be there, but for
    those of the layer that says tokens where a model is wanted `headless`."""
    about = described(folder)
    kind = about.get("model_type")
    if about and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        own = "auto_map" in about
        why = "it needs code that comes with it, which is never run" if own else "it is no causal language model"
        raise ConfigError(
            f"model.name={folder}: transformers {transformers.__version__} has no model of the type {kind!r} that "
            f"writes text: {why}. Choose another model."
        )
    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", trust_remote_code=False, ignore_mismatched_sizes=True,
                output_loading_info=True, **how,
            )  # fmt: skip
            model.set_attn_implementation(NAME)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # files of others break in any way they like
        why = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ConfigError(
            f"model.name={folder}: its weights cannot be read ({type(error).__name__}: {why}). Fetch the folder's "
            "files again, or give another."
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        names = sorted(name if isinstance(name, str) else name[0] for name in found[what])
        names = [name for name in names if not (headless and name.startswith("lm_head."))]
        if names:
            first = names[0]
            raise ConfigError(
                f"model.name={folder}: {len(names)} of its weights are {what.removesuffix('_keys')}, {first} "
                "among them, and would be drawn at random. Give a folder with all weights of the model."
            )
    return model  # type: ignore[no-any-return]
