"""Every rank holds a part of each weight, its gradient and its moments; a layer is whole only while it runs.

The parts are float32, the optimiser's masters themselves; layers are gathered and run in the model's own precision,
and gradients are summed in float32. With `offload=optimizer` moments rest in the host's memory and come for a step, a
part at a time; with `all` everything rests there, and is stepped there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from arborl.learner.attention_choice import Ways
from arborl.learner.optimizer import COARSE, Optimizer
from arborl.learner.scorer import Asked, Scorer
from arborl.learner.strategy import Strategy, refuse
from arborl.models.model_loading import ComputeDevice, compute_device, set_compute_device


class FullySharded(Strategy):
    """torch's `fully_shard`."""

    apart = meets = True

    def check(self, model: PreTrainedModel) -> None:
        """It must have layers that can be gathered one by one, and weights that can be cut."""
        if not _layers(model):
            what = f"{type(model).__name__} has no layers that can be told apart"
            raise refuse("fsdp2", what, "learner.strategy=ddp")
        if getattr(model, "quantization_method", None) is not None:
            raise refuse("fsdp2", "weights in 4 bits cannot be cut into parts", "learner.strategy=ddp")

    def place(self, scorer: Scorer) -> Asked:
        """Shard the policy, and the critic with it."""
        place = compute_device(scorer.policy)
        critic = scorer.critic
        models = [scorer.policy] + ([critic.trunk] if critic is not None and critic.trunk is not None else [])
        for model in models:
            Ways.settle(model)
            set_compute_device(model, place)
            if self.config.master == "float32":
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter.dtype in COARSE:
                        parameter.data = parameter.data.float()
        if critic is not None:  # its head computes in float32, whatever the policy does
            self._shard(critic.head, place, MixedPrecisionPolicy(), self.config.offload == "all")
        self._shard_all(scorer, models, place, self.config.offload == "all")
        return Asked(scorer.policy, scorer)

    def place_frozen(self, model: PreTrainedModel) -> Asked:
        """A reference, in parts too."""
        place, scorer = compute_device(model), Scorer(model)
        Ways.settle(model)
        set_compute_device(model, place)
        self._shard_all(scorer, [model], place, self.config.offload == "all")
        return Asked(model, scorer)

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        """Parts that rest in the host's memory are stepped there."""
        offload = "optimizer" if self.config.offload == "optimizer" else "none"
        return Optimizer(policy, critic, self.config, rates, self.ranks, offload)

    def add_up(self, optimizer: Optimizer) -> None:
        """Each backward pass has."""

    def _shard_all(self, scorer: Scorer, models: list[PreTrainedModel], place: ComputeDevice, away: bool) -> None:
        mixed = MixedPrecisionPolicy()
        if place.dtype in COARSE:
            mixed = MixedPrecisionPolicy(param_dtype=place.dtype, reduce_dtype=torch.float32)
        for model in models:
            for layer in _layers(model):
                self._shard(layer, place, mixed, away)
        self._shard(scorer, place, mixed, away)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _shard(self, module: nn.Module, place: ComputeDevice, mixed: MixedPrecisionPolicy, away: bool) -> None:
        """Given back after each pass, at the root too: else what is asked after a step would be of the weights before
        it."""
        mesh = init_device_mesh(place.device.type, (self.ranks.count,))
        host = away and place.device.type == "cuda"
        policy = CPUOffloadPolicy() if host else OffloadPolicy()
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mixed, offload_policy=policy)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
