"""A learner on disk: the policy as a model anyone can load, and beside it what is needed to go on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.learner.host_copy import Copied, HostCopies
from arborl.learner.optimizer_file import NAME, check_moments, one_line, read_optimizer
from arborl.learner.sharded_files import SHARDS, load_sharded, ordered, shape_of
from arborl.models.lora import adapter_tensors, has_lora, load_adapter, save_adapter
from arborl.models.model_loading import weight_loading

if TYPE_CHECKING:
    from arborl.learner.learner import Learner

Write = Callable[[Path, dict[str, Tensor]], None]
"""Writes a model of these weights into a folder."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A learner at one moment; it can be written while the learner goes on."""

    copied: Copied
    writers: dict[str, Write]
    """Folders of models, by name, and what writes them."""
    visit: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, what was not copied can be read."""

    @classmethod
    def of(cls, learner: Learner, copies: HostCopies) -> Snapshot:
        """Copy what the learner is now."""
        models = {"model": learner.model} | ({"reference": learner.reference} if learner.reference is not None else {})
        with learner.with_reference():
            copied = copies.take(parts_of(learner))
            if learner.guest is not None:  # its weights leave the device again
                copied.wait()
        visit = learner.with_reference if copied.live else nullcontext
        return cls(copied, {name: _writer(model) for name, model in models.items()}, visit)

    @property
    def live(self) -> bool:
        """Whether nothing could be copied: the learner must wait until it is written."""
        return self.copied.live

    def hold(self) -> None:
        """Whatever changes the weights from now on comes after the copying."""
        self.copied.hold()

    def write(self, folder: Path) -> None:
        """All files of it."""
        self.copied.wait()
        with self.visit():
            for name, write in self.writers.items():
                write(folder / name, self.copied.tree[name])
        torch.save(self.copied.tree["state"], folder / NAME)


def parts_of(learner: Learner) -> dict[str, Any]:
    """What a checkpoint holds of a learner: the tensors themselves, not copies."""
    model = learner.model
    found: dict[str, Any] = {"model": adapter_tensors(model) if has_lora(model) else dict(model.state_dict())}
    if learner.reference is not None:
        found["reference"] = dict(learner.reference.state_dict())
    critic = {name: p.detach() for name, p in learner.critic.trained().items()} if learner.critic else {}
    state: dict[str, Any] = {"optimizer": learner.optimizer.state_dict(), "critic": critic, "reference": learner.start}
    state |= {"done": learner.done, "budget": learner.fitting.budget, "loss_scale": learner.loss_scale.state_dict()}
    return found | {"state": state}


def _writer(model: PreTrainedModel) -> Write:
    if has_lora(model):
        return lambda folder, tensors: save_adapter(model, folder, tensors)
    return lambda folder, tensors: model.save_pretrained(folder, state_dict=dict(tensors))


def load(learner: Learner, folder: Path) -> None:
    """Continue exactly where the snapshot was made."""
    if (folder / SHARDS).is_dir():
        load_sharded(learner, folder)
        return
    if has_lora(learner.model):
        load_adapter(learner.model, folder / "model")
    else:
        _read(learner.model, folder / "model")
    if learner.reference is not None:
        with learner.with_reference():
            _read(learner.reference, folder / "reference")
    state = read_optimizer(folder)
    with one_line(folder / NAME):
        _take(learner, state)


def _take(learner: Learner, state: dict[str, Any]) -> None:
    """What `optimizer.pt` holds."""
    check_moments(state["optimizer"]["adam"]["state"], [shape_of(parameter) for _, parameter, _ in ordered(learner)])
    if learner.critic is not None:
        learner.critic.load(state["critic"])
    if learner.start is not None and state.get("reference") is not None:
        own = learner.start
        learner.start = {name: value.to(own[name].device) for name, value in state["reference"].items()}
        if any(value.shape != own[name].shape for name, value in learner.start.items()):
            raise ValueError("the reference is of other shapes")
    learner.optimizer.load_state_dict(state["optimizer"])
    if "loss_scale" in state:
        learner.loss_scale.load_state_dict(state["loss_scale"])
    learner.done, learner.fitting.budget = int(state["done"]), min(learner.fitting.budget, int(state["budget"]))


def _read(model: PreTrainedModel, folder: Path) -> None:
    with weight_loading():
        saved = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    with torch.no_grad():
        for name, own in model.state_dict().items():
            own.copy_(saved[name])
