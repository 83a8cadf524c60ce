"""Checkpoint files of a learner: the policy as a Hugging Face model, and the training state.

One process, or ranks that each hold everything:

    step-000012/model/…         the policy, or its adapter
    step-000012/reference/…     the reference model, where there is one
    step-000012/optimizer.pt    optimizer, critic, reference adapter, step count, micro-batch size, loss scale

Sharded: each rank writes its shards into one folder on a shared disk.

    step-000012/model/…         the whole policy; rank 0 has it for its engine
    step-000012/shards/…        trained weights in float32, moments, critic and reference model, as a distributed
                                checkpoint of torch (`torch.distributed.checkpoint`)
    step-000012/learner.json    step count, micro-batch size, loss scale

Any number of ranks of any strategy can load either.
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
from typing import TYPE_CHECKING, Any

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
from arborl.learner.distributed.strategy import MOMENTS, State, as_shard, full_shape, optimizer_order, shard_of
from arborl.models.lora import adapter_tensor_name, adapter_tensors, has_lora, save_adapter
from arborl.models.model_loading import weight_loading

if TYPE_CHECKING:
    from arborl.learner.core.learner import Learner

log = logging.getLogger(__name__)

OPTIMIZER_FILE, SHARDS, STATE_FILE = "optimizer.pt", "shards", "learner.json"
STATE_KEYS = ("optimizer", "done", "budget")
MAX_ERROR_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a learner at one moment; it is written while the learner continues."""

    copied: HostCopy
    models: dict[str, PreTrainedModel]  # by folder name
    with_reference: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside this context, tensors that were not copied can be read."""

    @classmethod
    def of(cls, learner: Learner, copier: HostCopier, offloaded_reference: bool) -> Snapshot:
        models = {"model": learner.model} | ({"reference": learner.reference} if learner.reference is not None else {})
        with learner.with_reference():
            copied = copier.copy(checkpoint_tensors(learner))
            if offloaded_reference:  # its weights leave the device at the end of the context
                copied.wait()
        return cls(copied, models, learner.with_reference if copied.live else nullcontext)

    @property
    def live(self) -> bool:
        """Whether it holds the learner's own tensors: the learner must wait until it is written."""
        return self.copied.live

    def write(self, folder: Path) -> None:
        self.copied.wait()
        with self.with_reference():
            for name, model in self.models.items():
                write_model(model, folder / name, self.copied.tree[name])
        torch.save(self.copied.tree["state"], folder / OPTIMIZER_FILE)


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds of a policy: its adapter if it has one, else all weights; not copies."""
    return adapter_tensors(model) if has_lora(model) else dict(model.state_dict())


def write_model(model: PreTrainedModel, folder: Path, tensors: dict[str, Tensor]) -> None:
    if has_lora(model):
        save_adapter(model, folder, tensors)
    else:
        model.save_pretrained(folder, state_dict=dict(tensors))


def checkpoint_tensors(learner: Learner) -> dict[str, Any]:
    """The content of a checkpoint of one process; not copies."""
    content: dict[str, Any] = {"model": model_tensors(learner.model)}
    if learner.reference is not None:
        content["reference"] = dict(learner.reference.state_dict())
    critic = learner.critic.trained_parameters() if learner.critic else {}
    state = {
        "optimizer": learner.optimizer.state_dict(),
        "critic": {name: parameter.detach() for name, parameter in critic.items()},
        "reference": learner.reference_adapter,
    }
    return content | {"state": state | training_state(learner)}


def training_state(learner: Learner) -> dict[str, Any]:
    budget = learner.micro_batcher.budget
    return {"done": learner.done, "budget": budget, "loss_scale": learner.loss_scale.state_dict()}


def load_checkpoint(learner: Learner, folder: Path) -> None:
    """Load a checkpoint of any strategy and number of ranks."""
    is_sharded = (folder / SHARDS).is_dir()
    state = _load_shards(learner, folder) if is_sharded else _load_files(learner, folder)
    with single_line_errors(folder / (STATE_FILE if is_sharded else OPTIMIZER_FILE)):
        if "loss_scale" in state:
            learner.loss_scale.load_state_dict(state["loss_scale"])
        batcher = learner.micro_batcher
        learner.done, batcher.budget = int(state["done"]), min(batcher.budget, int(state["budget"]))


def _load_files(learner: Learner, folder: Path) -> dict[str, Any]:
    """Load a checkpoint of one process; returns the content of `optimizer.pt`."""
    weights = read_weights(learner.model, folder / "model")
    with single_line_errors(folder / "model"):
        if has_lora(learner.model):
            trained = [name for name, p in learner.model.named_parameters() if p.requires_grad]
            weights = {name: weights[adapter_tensor_name(name)] for name in trained}
        _set_weights(learner, learner.model, weights)
    if learner.reference is not None:
        with learner.with_reference():
            _set_weights(learner, learner.reference, read_weights(learner.reference, folder / "reference"))
    state = read_optimizer_state(folder)
    with single_line_errors(folder / OPTIMIZER_FILE):
        _load_training_tensors(learner, state, weights)
    return state


def _load_training_tensors(learner: Learner, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
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
        is_copied = values[name].dtype in LOW_PRECISION and masters[part]
        loaded[name] = {"value": next(remaining[part]) if is_copied else values[name]}
    for number, (name, parameter, _) in enumerate(optimizer_order(learner)):
        if learner.strategy.shards_weights:
            loaded[name] |= {key: torch.zeros(full_shape(parameter)) for key in MOMENTS[:2]}
            loaded[name]["step"] = torch.tensor(0.0)
        loaded[name] |= moments.get(number, {})
    learner.strategy.load_state(learner, loaded)


@torch.no_grad()
def _set_weights(learner: Learner, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in weights:
            with learner.strategy.writable([parameter]):
                local_shard(parameter).copy_(shard_of(weights[name], parameter))


def read_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The weights of a saved policy such as `model`, by the names of `model_tensors`."""
    if (folder / "adapter_model.safetensors").exists():
        from safetensors.torch import load_file

        return load_file(folder / "adapter_model.safetensors")
    plain = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    with weight_loading():
        return dict(plain.from_pretrained(folder).state_dict())  # type: ignore[attr-defined]


def read_optimizer_state(folder: Path) -> dict[str, Any]:
    """Read `optimizer.pt`. Only tensors and plain values are read (`weights_only`), and never more bytes than the file
    has: torch.save does not compress, and a compressed entry could be far larger than the file (zip bomb)."""
    path = folder / OPTIMIZER_FILE
    with single_line_errors(path):
        if not path.is_file():
            raise ConfigError(f"{path}: file not found. A run resumes only from a checkpoint with an optimizer state.")
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as entries:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist()):
                    raise ConfigError(f"{path}: has compressed entries, which no learner writes.")
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


class ShardedCheckpointer:
    """Writes one rank's part of a checkpoint, while training continues."""

    def __init__(self, learner: Learner):
        self.learner, ranks = learner, learner.strategy.ranks
        self.rank = ranks.rank
        self.copier: HostCopier | None = None
        self.group: Any = None
        if learner.strategy.shards_weights and ranks.is_distributed:
            self.group = ranks.new_group()
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
        copied = self.copier.copy(model_tensors(model))
        copied.wait()
        return ShardedSnapshot(self, model, copied.tree, copied.live)

    def write(self, folder: Path) -> None:
        """Write the staged shards, together with all other ranks."""
        if self.group is not None and self.rank == 0:
            _default_store().set(f"snapshot/{self.number}", str(folder))
        with without_planner_warnings():
            path = folder / SHARDS
            dcp.save(self.staged, checkpoint_id=path, process_group=self.group, no_dist=self.group is None)

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
    """The same as `Snapshot` for a sharded learner."""

    checkpointer: ShardedCheckpointer
    model: PreTrainedModel
    weights: dict[str, Tensor]
    live: bool

    def write(self, folder: Path) -> None:
        self.checkpointer.write(folder)
        write_model(self.model, folder / "model", self.weights)
        (folder / STATE_FILE).write_text(json.dumps(self.checkpointer.training_state), encoding="utf-8")


def sharded_tensors(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """This rank's shards of the checkpoint; not copies."""
    for name, state in learner.strategy.state(learner):
        yield from ((f"{name}/{key}", value) for key, value in state.items())
    yield from _frozen_tensors(learner).items()


def _frozen_tensors(learner: Learner) -> dict[str, Tensor]:
    reference = dict(learner.reference.named_parameters()) if learner.reference is not None else {}
    tensors = {f"reference.{name}": p.detach() for name, p in reference.items()}
    return tensors | {f"start.{name}": value for name, value in (learner.reference_adapter or {}).items()}


def _load_shards(learner: Learner, folder: Path) -> dict[str, Any]:
    state = learner.strategy.empty_state(learner)
    targets = {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}
    with learner.with_reference(), without_planner_warnings():
        targets |= _frozen_tensors(learner)
        try:
            dcp.load(targets, checkpoint_id=folder / SHARDS, no_dist=not learner.strategy.ranks.is_distributed)
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(f"{folder / SHARDS}: unreadable, or written for another model ({first}).") from error
    learner.strategy.load_state(learner, state)
    found: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    return found


def _host_copy(tensor: Tensor) -> Tensor:
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
