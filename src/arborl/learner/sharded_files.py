"""A sharded learner on disk: each rank writes the parts that it holds, and any number of ranks, of any strategy, reads.

    step-000012/model/…            the policy, whole, as a model anyone can load; rank 0 has it for its engine
    step-000012/shards/…           what learns in full precision, its moments, critic and reference: torch's distributed
                                   checkpoint, whose tensors have names and know which part of a whole they are
    step-000012/learner.json       the rest

All ranks write into one folder: it must be on a disk that they share.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from arborl.errors import ConfigError
from arborl.learner.host_copy import HostCopies
from arborl.learner.optimizer import COARSE, local
from arborl.learner.optimizer_file import NAME, check_moments, one_line, read_optimizer
from arborl.learner.peers import PATIENT
from arborl.models.lora import adapter_tensor_name, adapter_tensors, has_lora, save_adapter
from arborl.models.model_loading import weight_loading

if TYPE_CHECKING:
    from arborl.learner.learner import Learner

log = logging.getLogger(__name__)

SHARDS = "shards"
REST = "learner.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

State = dict[str, dict[str, Tensor]]
"""By the name of a parameter: its `value` in full precision, and its `MOMENTS`."""


class Shelf:
    """Where a rank puts its part of a checkpoint, and takes it from.

    Args:
        learner: this rank's.
    """

    def __init__(self, learner: Learner):
        self.learner, self.rank = learner, learner.strategy.ranks.rank
        self.copies: HostCopies | None = None
        self.group: Any = None
        if learner.strategy.apart and learner.strategy.ranks.together:
            self.group = learner.strategy.ranks.second_group()  # writing meets while training does
        self.staged: dict[str, Tensor] = {}
        self.number = 0
        self.rest: dict[str, Any] = {}
        self.writing: threading.Thread | None = None

    def stage(self, number: int) -> None:
        """Copy this rank's part, to be written while training goes on; others than rank 0 begin when it says where."""
        self.close()
        self.number, self.rest = number, rest_of(self.learner)
        self.staged = {name: _copied(tensor) for name, tensor in parts_of(self.learner)}
        if self.rank > 0:
            self.writing = threading.Thread(target=self._write_when_told, daemon=True, name="arborl-shards")
            self.writing.start()

    def snapshot(self, model: PreTrainedModel) -> ShardedSnapshot:
        """In rank 0, what has been staged in all of them."""
        self.copies = self.copies or HostCopies(model.device)
        copied = self.copies.take(adapter_tensors(model) if has_lora(model) else dict(model.state_dict()))
        copied.wait()
        return ShardedSnapshot(self, model, copied.tree, copied.live)

    def write(self, folder: Path) -> None:
        """All ranks write, each its part."""
        if self.group is not None and self.rank == 0:
            _store().set(f"snapshot/{self.number}", str(folder))
        place = folder / SHARDS
        with quiet_planner():
            dcp.save(self.staged, checkpoint_id=place, process_group=self.group, no_dist=self.group is None)

    def load(self, folder: Path) -> None:
        """From what any strategy has written."""
        if self.learner.strategy.apart and not (folder / SHARDS).is_dir():
            load_whole(self.learner, folder)
        else:
            self.learner.load(folder)

    def close(self) -> None:
        """Wait until this rank has written."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None

    def _write_when_told(self) -> None:
        store, key = _store().clone(), f"snapshot/{self.number}"
        try:
            store.wait([key], PATIENT)
            self.write(Path(store.get(key).decode()))
        except Exception as error:  # rank 0 has the same, and ends the run for it
            log.warning("a checkpoint's part is not written: %s", error)


@dataclass(frozen=True, slots=True)
class ShardedSnapshot:
    """A sharded learner at one moment; see `files.Snapshot`."""

    shelf: Shelf
    model: PreTrainedModel
    weights: dict[str, Tensor]
    live: bool
    """Whether the policy could not be copied."""

    def hold(self) -> None:
        """Everything has been copied."""

    def write(self, folder: Path) -> None:
        """All files of it."""
        self.shelf.write(folder)
        if has_lora(self.model):
            save_adapter(self.model, folder / "model", self.weights)
        else:
            self.model.save_pretrained(folder / "model", state_dict=dict(self.weights))
        (folder / REST).write_text(json.dumps(self.shelf.rest), encoding="utf-8")


def rest_of(learner: Learner) -> dict[str, Any]:
    """What is not a tensor."""
    return {"done": learner.done, "budget": learner.fitting.budget, "loss_scale": learner.loss_scale.state_dict()}


def parts_of(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of everything that must be kept; not copies."""
    for name, state in learner.strategy.state(learner):
        yield from ((f"{name}/{key}", value) for key, value in state.items())
    if learner.reference is not None:
        yield from ((f"reference.{name}", p.detach()) for name, p in learner.reference.named_parameters())
    if learner.start is not None:
        yield from ((f"start.{name}", value) for name, value in learner.start.items())


def load_sharded(learner: Learner, folder: Path) -> None:
    """From parts, into parts or wholes."""
    state = learner.strategy.blank(learner)
    wanted = {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}
    reference = dict(learner.reference.named_parameters()) if learner.reference is not None else {}
    with learner.with_reference():
        wanted |= {f"reference.{name}": p.detach() for name, p in reference.items()}
        wanted |= {f"start.{name}": value for name, value in (learner.start or {}).items()}
        alone = not learner.strategy.ranks.together
        try:
            with quiet_planner():
                dcp.load(wanted, checkpoint_id=folder / SHARDS, no_dist=alone)
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(f"{folder / SHARDS}: is of another model, or cannot be read ({first}).") from error
    learner.strategy.take(learner, state)
    rest = json.loads((folder / REST).read_text(encoding="utf-8"))
    _take_rest(learner, rest)


def load_whole(learner: Learner, folder: Path) -> None:
    """From the files of a learner in one process, into parts."""
    adapted = has_lora(learner.model)
    saved = _weights(learner.model, folder / "model")
    if adapted:
        learning = [name for name, p in learner.model.named_parameters() if p.requires_grad]
        saved = {name: saved[adapter_tensor_name(name)] for name in learning}
    _fill(learner, learner.model, saved)
    if learner.reference is not None:
        _fill(learner, learner.reference, _weights(learner.reference, folder / "reference"))
    state = read_optimizer(folder)
    with one_line(folder / NAME):
        _take_whole(learner, state, saved)


def _take_whole(learner: Learner, state: dict[str, Any], saved: dict[str, Tensor]) -> None:
    """What `optimizer.pt` holds, beside the weights that were saved with it."""
    check_moments(state["optimizer"]["adam"]["state"], [shape_of(parameter) for _, parameter, _ in ordered(learner)])
    if learner.start is not None and state.get("reference") is not None:
        for name, value in state["reference"].items():
            local(learner.start[name]).copy_(part_of(value, learner.start[name]))
    coarse = {f"critic.{name}": value for name, value in state["critic"].items()}
    coarse |= {f"model.{name}": value for name, value in saved.items()}
    adam, masters = state["optimizer"]["adam"]["state"], state["optimizer"]["masters"]
    left = {part: iter(values) for part, values in masters.items()}
    found: State = {}
    for name, _, _ in learner.trained():
        part = "policy" if name.startswith("model.") else "critic"
        value = coarse[name]
        if value.dtype in COARSE and masters[part]:
            value = next(left[part])
        found[name] = {"value": value}
    for number, (name, parameter, _) in enumerate(ordered(learner)):
        nothing = {key: torch.zeros(shape_of(parameter)) for key in MOMENTS[:2]} | {"step": torch.tensor(0.0)}
        found[name] |= nothing | adam.get(number, {})
    learner.strategy.take(learner, found)
    _take_rest(learner, state)


@torch.no_grad()
def _fill(learner: Learner, model: PreTrainedModel, saved: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in saved:
            with learner.strategy.here([parameter]):
                local(parameter).copy_(part_of(saved[name], parameter))


def ordered(learner: Learner) -> list[tuple[str, Any, Any]]:
    """What learns, in the optimiser's order: the policy before the critic, matrices before what does not decay."""
    return sorted(learner.trained(), key=lambda one: (one[0].startswith("critic."), len(shape_of(one[1])) <= 1))


def shape_of(parameter: Tensor) -> torch.Size:
    """Of all of it; DeepSpeed's are empty while they are not gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Of a whole, the part that a sharded parameter has here; what is such a part already stays as it is."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor) or whole.ndim == 0:
        return whole
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for axis, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(axis, min(start, whole.shape[axis]), size)
    return whole


def _take_rest(learner: Learner, rest: dict[str, Any]) -> None:
    learner.loss_scale.load_state_dict(rest["loss_scale"])
    learner.done, learner.fitting.budget = int(rest["done"]), min(learner.fitting.budget, int(rest["budget"]))


def _weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """A model's files, by the names that it has for them."""
    if (folder / "adapter_model.safetensors").exists():
        from safetensors.torch import load_file

        return load_file(folder / "adapter_model.safetensors")
    plain = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    with weight_loading():
        return dict(plain.from_pretrained(folder).state_dict())  # type: ignore[attr-defined]


def _copied(tensor: Tensor) -> Tensor:
    """In the host's memory, the same part of the same whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return as_part(local(tensor.detach()).to("cpu", copy=True), tensor)


def as_part(value: Tensor, parameter: Tensor) -> Tensor:
    """Numbers that are a sharded parameter's part of some whole of its form, wherever they lie."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    return DTensor(value, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)


@contextmanager
def quiet_planner() -> Iterator[None]:
    """torch warns of what is meant: that one process writes alone, and where."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
