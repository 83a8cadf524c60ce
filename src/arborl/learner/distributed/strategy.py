"""Strategies: how weights, gradients and optimizer state are distributed over ranks. All take the same optimizer steps.

single     one process holds everything
ddp        each rank holds everything and runs its own trees; gradients are summed
fsdp2      each rank holds a shard of every weight and runs its own trees; a layer is gathered while it runs
deepspeed  DeepSpeed's ZeRO, stage 1, 2 or 3
tensor     each rank holds some heads and some columns of every layer; all ranks run the same trees
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.optimizer import Optimizer, local_shard
from arborl.learner.core.tree_forward import PlacedModel, PolicyWithCritic
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup

if TYPE_CHECKING:
    from arborl.learner.core.learner import Learner

MOMENTS = ("exp_avg", "exp_avg_sq", "step")

State = dict[str, dict[str, Tensor]]  # by parameter name: its `value` in float32 and its `MOMENTS`


class Strategy:
    """Every rank holds everything (`single`, `ddp`). Subclasses override what they distribute."""

    shards_weights = False
    """Whether the learner's weights differ from the model it was given: an engine then gets a gathered copy."""
    lockstep = False
    """Whether every forward pass is a collective operation: all ranks must run the same number of micro-batches."""
    splits_batch = True  # whether each rank runs its own trees

    def __init__(self, config: LearnerConfig, ranks: RankGroup = SINGLE_RANK):
        self.config, self.ranks = config, ranks
        self.batch_group = ranks if self.splits_batch else SINGLE_RANK  # the ranks over which sums over terms are taken
        self.lockstep_group = ranks if self.lockstep else SINGLE_RANK

    def check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if this strategy does not support the model."""

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        return PlacedModel(module.policy, module)

    def place_frozen(self, model: PreTrainedModel) -> PlacedModel:
        return PlacedModel.local(model)

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        return Optimizer(policy, critic, self.config, rates, self.ranks)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a micro-batch; `last` marks the last one of an optimizer step."""
        loss.backward()

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Sum gradients over ranks where the backward passes have not."""
        self.batch_group.all_reduce(optimizer.gradients())

    def writable(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside the context, this rank's shard of the parameters can be read and written."""
        return nullcontext()

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """The whole parameter, gathered by all ranks together."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def gradients(self, learner: Learner) -> Iterator[tuple[str, Tensor]]:
        """All summed gradients, gathered by all ranks together."""
        for name, parameter, master in learner.trained_parameters():
            gradient = parameter.grad if isinstance(parameter, DTensor) and parameter.grad is not None else master.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            yield name, self.full_tensor(as_shard(gradient, parameter))

    def state(self, learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """This rank's shard of the trained weights in float32 and of their moments; not copies."""
        optimizer = learner.optimizer
        for name, parameter, master in learner.trained_parameters():
            value = optimizer.master_weights_of(name).value(master).detach()
            moments = {key: torch.zeros_like(value) for key in MOMENTS[:2]} | {"step": torch.zeros(())}
            moments |= {key: one for key, one in optimizer.adam.state.get(master, {}).items() if key in MOMENTS}
            shards = {key: as_shard(part, parameter) for key, part in ({"value": value} | moments).items()}
            yield name, shards | {"step": moments["step"].reshape(())}

    def empty_state(self, learner: Learner) -> State:
        """Zeros in the form of `state`, in host memory."""
        return {
            name: {
                key: as_shard(torch.zeros_like(local_shard(part), device="cpu"), part) for key, part in parts.items()
            }
            for name, parts in self.state(learner)
        }

    def load_state(self, learner: Learner, state: State) -> None:
        """Set weights and moments, from shards in the form of `empty_state` or from whole tensors."""
        optimizer, moments = learner.optimizer, dict[int, dict[str, Tensor]]()
        with torch.no_grad():
            for number, (name, parameter, master) in enumerate(optimizer_order(learner)):
                shards = {key: local_shard(shard_of(part, parameter)) for key, part in state[name].items()}
                value = shards.pop("value")
                optimizer.master_weights_of(name).value(master).copy_(value)
                local_shard(parameter).copy_(value)
                if shards:
                    moments[number] = {key: part.clone() for key, part in shards.items()}
        optimizer.load_moments(moments)


def unsupported(strategy: str, reason: str, instead: str) -> ConfigError:
    return ConfigError(f"learner.strategy={strategy}: {reason}. Write {instead}.")


def optimizer_order(learner: Learner) -> list[tuple[str, Any, Any]]:
    """The trained parameters in AdamW's order: policy before critic, matrices before vectors (no weight decay)."""
    return sorted(
        learner.trained_parameters(), key=lambda one: (one[0].startswith("critic."), len(full_shape(one[1])) <= 1)
    )


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter; DeepSpeed's parameters are empty while they are not gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor) or whole.ndim == 0:
        return whole
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for axis, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(axis, min(start, whole.shape[axis]), size)
    return whole


def as_shard(value: Tensor, parameter: Tensor) -> Tensor:
    """The numbers of this rank's shard as a DTensor with the parameter's placement, on any device."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    return DTensor(value, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)
