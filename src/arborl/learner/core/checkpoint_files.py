"""Checkpoint files of a learner: the policy as a Hugging Face model, and the training state.

One process, or ranks that each hold everything:

    step-000012/model/…         the policy, or its adapter
    step-000012/reference/…     the reference model, where there is one
    step-000012/optimizer.pt    optimizer, critic, reference adapter, step count, micro-batch size, loss scale

Sharded: each rank writes its shards into one folder on a shared disk; any number of ranks of any strategy can load
them.

    step-000012/model/…         the whole policy; rank 0 has it for its engine
    step-000012/shards/…        trained weights in float32, moments, critic and reference model, as a distributed
                                checkpoint of torch (`torch.distributed.checkpoint`)
    step-000012/learner.json    step count, micro-batch size, loss scale
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arborl.errors import ConfigError
from arborl.learner.core.offload import HostCopier, HostCopy
from arborl.learner.core.optimizer import LOW_PRECISION, local_shard
from arborl.learner.distributed.rank_group import ORDER_TIMEOUT
from arborl.learner.distributed.strategy import (
    MOMENTS,
    LearnerState,
    State,
    as_shard,
    full_shape,
    optimizer_order,
    shard_of,
)
from arborl.models.lora import adapter_tensor_name, adapter_tensors, has_lora, load_adapter, save_adapter
from arborl.models.model_loading import weight_loading

log = logging.getLogger(__name__)

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
    content: dict[str, Any] = {"model": adapter_tensors(model) if has_lora(model) else dict(model.state_dict())}
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
    with weight_loading():
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


# ------------------------------------------------------------------------------------------------ sharded checkpoints


SHARDS = "shards"
STATE_FILE = "learner.json"


class ShardedCheckpointer:
    """Writes and loads one rank's part of a checkpoint.

    Args:
        learner: this rank's learner.
    """

    def __init__(self, learner: LearnerState):
        self.learner, self.rank = learner, learner.strategy.ranks.rank
        self.copier: HostCopier | None = None
        self.group: Any = None
        if learner.strategy.shards_weights and learner.strategy.ranks.is_distributed:
            self.group = learner.strategy.ranks.new_group()  # checkpoints are written while training continues
        self.staged: dict[str, Tensor] = {}
        self.number = 0
        self.training_state: dict[str, Any] = {}
        self.writer: threading.Thread | None = None

    def stage(self, number: int) -> None:
        """Copy this rank's shards. Ranks other than 0 wait in a thread until rank 0 names the folder."""
        self.close()
        self.number, self.training_state = number, training_state(self.learner)
        self.staged = {name: _host_copy(tensor) for name, tensor in sharded_tensors(self.learner)}
        if self.rank > 0:
            self.writer = threading.Thread(target=self._write_in_thread, daemon=True, name="arborl-shards")
            self.writer.start()

    def snapshot(self, model: PreTrainedModel) -> ShardedSnapshot:
        """On rank 0, the snapshot of what all ranks have staged."""
        self.copier = self.copier or HostCopier(model.device)
        copied = self.copier.copy(adapter_tensors(model) if has_lora(model) else dict(model.state_dict()))
        copied.wait()
        return ShardedSnapshot(self, model, copied.tree, copied.live)

    def write(self, folder: Path) -> None:
        """Write the staged shards, together with all other ranks."""
        if self.group is not None and self.rank == 0:
            _default_store().set(f"snapshot/{self.number}", str(folder))
        with without_planner_warnings():
            path = folder / SHARDS
            dcp.save(self.staged, checkpoint_id=path, process_group=self.group, no_dist=self.group is None)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any strategy."""
        if (folder / SHARDS).is_dir():
            load_sharded(self.learner, folder)
        elif self.learner.strategy.shards_weights:
            load_whole(self.learner, folder)
        else:
            load_checkpoint(self.learner, folder)

    def close(self) -> None:
        """Wait until this rank has written its shards."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None

    def _write_in_thread(self) -> None:
        store, key = _default_store().clone(), f"snapshot/{self.number}"
        try:
            store.wait([key], ORDER_TIMEOUT)
            self.write(Path(store.get(key).decode()))
        except Exception as error:  # rank 0 raises the same error and ends the run
            log.warning("this rank's part of a checkpoint is not written: %s", error)


@dataclass(frozen=True, slots=True)
class ShardedSnapshot:
    """The state of a sharded learner at one moment; see `checkpoint_files.Snapshot`."""

    checkpointer: ShardedCheckpointer
    model: PreTrainedModel
    weights: dict[str, Tensor]
    live: bool
    """Whether the policy's weights could not be copied."""

    def write(self, folder: Path) -> None:
        """Write all files of the checkpoint."""
        self.checkpointer.write(folder)
        if has_lora(self.model):
            save_adapter(self.model, folder / "model", self.weights)
        else:
            self.model.save_pretrained(folder / "model", state_dict=dict(self.weights))
        (folder / STATE_FILE).write_text(json.dumps(self.checkpointer.training_state), encoding="utf-8")


def sharded_tensors(learner: LearnerState) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the checkpoint; not copies."""
    for name, state in learner.strategy.state(learner):
        yield from ((f"{name}/{key}", value) for key, value in state.items())
    if learner.reference is not None:
        yield from ((f"reference.{name}", p.detach()) for name, p in learner.reference.named_parameters())
    if learner.reference_adapter is not None:
        yield from ((f"start.{name}", value) for name, value in learner.reference_adapter.items())


def load_sharded(learner: LearnerState, folder: Path) -> None:
    """Load a sharded checkpoint into a learner of any strategy."""
    state = learner.strategy.empty_state(learner)
    targets = {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}
    reference = dict(learner.reference.named_parameters()) if learner.reference is not None else {}
    with learner.with_reference():
        targets |= {f"reference.{name}": p.detach() for name, p in reference.items()}
        targets |= {f"start.{name}": value for name, value in (learner.reference_adapter or {}).items()}
        alone = not learner.strategy.ranks.is_distributed
        try:
            with without_planner_warnings():
                dcp.load(targets, checkpoint_id=folder / SHARDS, no_dist=alone)
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(f"{folder / SHARDS}: unreadable, or written for another model ({first}).") from error
    learner.strategy.load_state(learner, state)
    load_training_state(learner, json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))


def load_whole(learner: LearnerState, folder: Path) -> None:
    """Load the checkpoint of a learner in one process into shards."""
    weights = _read_weights(learner.model, folder / "model")
    if has_lora(learner.model):
        trained = [name for name, p in learner.model.named_parameters() if p.requires_grad]
        weights = {name: weights[adapter_tensor_name(name)] for name in trained}
    _set_weights(learner, learner.model, weights)
    if learner.reference is not None:
        _set_weights(learner, learner.reference, _read_weights(learner.reference, folder / "reference"))
    state = read_optimizer_state(folder)
    with single_line_errors(folder / OPTIMIZER_FILE):
        _load_whole_state(learner, state, weights)


def _load_whole_state(learner: LearnerState, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
    moments, masters = state["optimizer"]["adam"]["state"], state["optimizer"]["masters"]
    check_moments(moments, [full_shape(parameter) for _, parameter, _ in optimizer_order(learner)])
    if learner.reference_adapter is not None and state.get("reference") is not None:
        for name, value in state["reference"].items():
            adapter = learner.reference_adapter[name]
            local_shard(adapter).copy_(shard_of(value, adapter))
    values = {f"critic.{name}": value for name, value in state["critic"].items()}
    values |= {f"model.{name}": value for name, value in weights.items()}
    remaining = {part: iter(copies) for part, copies in masters.items()}
    loaded: State = {}
    for name, _, _ in learner.trained_parameters():
        part = "policy" if name.startswith("model.") else "critic"
        value = values[name]
        if value.dtype in LOW_PRECISION and masters[part]:
            value = next(remaining[part])
        loaded[name] = {"value": value}
    for number, (name, parameter, _) in enumerate(optimizer_order(learner)):
        zeros = {key: torch.zeros(full_shape(parameter)) for key in MOMENTS[:2]} | {"step": torch.tensor(0.0)}
        loaded[name] |= zeros | moments.get(number, {})
    learner.strategy.load_state(learner, loaded)
    load_training_state(learner, state)


@torch.no_grad()
def _set_weights(learner: LearnerState, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in weights:
            with learner.strategy.writable([parameter]):
                local_shard(parameter).copy_(shard_of(weights[name], parameter))


def _read_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The weights in a model's folder, by parameter name."""
    if (folder / "adapter_model.safetensors").exists():
        from safetensors.torch import load_file

        return load_file(folder / "adapter_model.safetensors")
    plain = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    with weight_loading():
        return dict(plain.from_pretrained(folder).state_dict())  # type: ignore[attr-defined]


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory with the same placement."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return as_shard(local_shard(tensor.detach()).to("cpu", copy=True), tensor)


@contextmanager
def without_planner_warnings() -> Iterator[None]:
    """Suppress torch's warnings about a single writing process and its device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
