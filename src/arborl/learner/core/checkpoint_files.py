"""Checkpoint files of a learner in one process: the policy as a Hugging Face model, and the training state.

step-000012/model/…         the policy, or its adapter
step-000012/reference/…     the reference model, where there is one
step-000012/optimizer.pt    optimizer, critic, reference adapter, step count, micro-batch size, loss scale
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.errors import ConfigError
from arborl.learner.core.offload import HostCopier, HostCopy
from arborl.learner.distributed.strategy import LearnerState, full_shape, optimizer_order
from arborl.models.load import quiet
from arborl.models.lora import adapter_file, has_lora, load_adapter, save_adapter

OPTIMIZER_FILE = "optimizer.pt"
STATE_KEYS = ("optimizer", "done", "budget")
MAX_ERROR_LENGTH = 200

WriteModel = Callable[[Path, dict[str, Tensor]], None]
"""Writes a model with the given weights into a folder."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a learner at one moment; it is written while the learner continues."""

    copied: HostCopy
    writers: dict[str, WriteModel]
    """By folder name, the functions that write the models."""
    with_reference: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside this context, tensors that were not copied can be read."""

    @classmethod
    def of(cls, learner: LearnerState, copier: HostCopier, offloaded_reference: bool) -> Snapshot:
        """Copy the learner's current state."""
        models = {"model": learner.model} | ({"reference": learner.reference} if learner.reference is not None else {})
        with learner.with_reference():
            copied = copier.copy(checkpoint_tensors(learner))
            if offloaded_reference:  # its weights leave the device at the end of the context
                copied.wait()
        context = learner.with_reference if copied.live else nullcontext
        return cls(copied, {name: _model_writer(model) for name, model in models.items()}, context)

    @property
    def live(self) -> bool:
        """Whether it holds the learner's own tensors: the learner must wait until it is written."""
        return self.copied.live

    def block_stream(self) -> None:
        """Later GPU work waits for the copies."""
        self.copied.block_stream()

    def write(self, folder: Path) -> None:
        """Write all files of the checkpoint."""
        self.copied.wait()
        with self.with_reference():
            for name, write in self.writers.items():
                write(folder / name, self.copied.tree[name])
        torch.save(self.copied.tree["state"], folder / OPTIMIZER_FILE)


def checkpoint_tensors(learner: LearnerState) -> dict[str, Any]:
    """The content of a checkpoint: the learner's own tensors, not copies."""
    model = learner.model
    content: dict[str, Any] = {"model": adapter_file(model) if has_lora(model) else dict(model.state_dict())}
    if learner.reference is not None:
        content["reference"] = dict(learner.reference.state_dict())
    critic = learner.critic.trained_parameters() if learner.critic else {}
    state = {
        "optimizer": learner.optimizer.state_dict(),
        "critic": {name: parameter.detach() for name, parameter in critic.items()},
        "reference": learner.reference_adapter,
    }
    return content | {"state": state | training_state(learner)}


def training_state(learner: LearnerState) -> dict[str, Any]:
    """The state that is not a tensor."""
    budget = learner.micro_batcher.budget
    return {"done": learner.done, "budget": budget, "loss_scale": learner.loss_scale.state_dict()}


def load_training_state(learner: LearnerState, state: dict[str, Any]) -> None:
    """Set what `training_state` returned."""
    if "loss_scale" in state:
        learner.loss_scale.load_state_dict(state["loss_scale"])
    batcher = learner.micro_batcher
    learner.done, batcher.budget = int(state["done"]), min(batcher.budget, int(state["budget"]))


def _model_writer(model: PreTrainedModel) -> WriteModel:
    if has_lora(model):
        return lambda folder, tensors: save_adapter(model, folder, tensors)
    return lambda folder, tensors: model.save_pretrained(folder, state_dict=dict(tensors))


def load_checkpoint(learner: LearnerState, folder: Path) -> None:
    """Load the files that `Snapshot.write` wrote."""
    if has_lora(learner.model):
        load_adapter(learner.model, folder / "model")
    else:
        _load_weights(learner.model, folder / "model")
    if learner.reference is not None:
        with learner.with_reference():
            _load_weights(learner.reference, folder / "reference")
    state = read_optimizer_state(folder)
    with single_line_errors(folder / OPTIMIZER_FILE):
        _load_optimizer_state(learner, state)


def _load_optimizer_state(learner: LearnerState, state: dict[str, Any]) -> None:
    moments = state["optimizer"]["adam"]["state"]
    check_moments(moments, [full_shape(parameter) for _, parameter, _ in optimizer_order(learner)])
    if learner.critic is not None:
        learner.critic.load(state["critic"])
    if learner.reference_adapter is not None and state.get("reference") is not None:
        current = learner.reference_adapter
        loaded = {name: value.to(current[name].device) for name, value in state["reference"].items()}
        learner.reference_adapter = loaded
        if any(value.shape != current[name].shape for name, value in loaded.items()):
            raise ValueError("the reference adapter has other shapes")
    learner.optimizer.load_state_dict(state["optimizer"])
    load_training_state(learner, state)


def _load_weights(model: PreTrainedModel, folder: Path) -> None:
    with quiet():
        saved = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(saved[name])


# ------------------------------------------------------------------------------------------------ optimizer.pt


def read_optimizer_state(folder: Path) -> dict[str, Any]:
    """Read `optimizer.pt`. Only tensors and plain values are read (`weights_only`), and never more bytes than the file
    has."""
    path = folder / OPTIMIZER_FILE
    with single_line_errors(path):
        if not path.is_file():
            raise ConfigError(f"{path}: file not found. A run resumes only from a checkpoint with an optimizer state.")
        _check_uncompressed(path)
        state = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or any(key not in state for key in STATE_KEYS):
            raise ConfigError(f"{path}: not the state of an Arbor learner, which has {', '.join(STATE_KEYS)}.")
        return state


def check_moments(moments: Mapping[int, Mapping[str, Any]], shapes: Sequence[torch.Size]) -> None:
    """Raise ValueError unless every moment has the shape of its parameter; torch notices only at the next step."""
    for number, saved in moments.items():
        for name, value in saved.items():
            shape = shapes[number]
            if name != "step" and shape.numel() and value.shape != shape:
                raise ValueError(f"{name} of parameter {number} is {tuple(value.shape)}, the parameter {tuple(shape)}")


@contextmanager
def single_line_errors(path: Path) -> Iterator[None]:
    """Turn the errors that torch raises for a foreign file into a ConfigError of one line that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        reason = f"{reason[:MAX_ERROR_LENGTH]}…" if len(reason) > MAX_ERROR_LENGTH else reason
        raise ConfigError(
            f"{path}: unreadable, or written for another model ({type(error).__name__}: {reason}). Give the checkpoint "
            "of a run with this model and these learner settings."
        ) from error


def _check_uncompressed(path: Path) -> None:
    """torch.save does not compress; a compressed entry could be far larger than the file (zip bomb)."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as entries:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist()):
                raise ConfigError(f"{path}: has compressed entries, which no learner writes.")
