"""The sharding strategies of torch, and `make_strategy`.

Fully sharded (`fsdp2`): every rank holds a shard of each weight, its gradient and its moments; a layer is gathered
while it runs. Shards are float32 and are the optimizer's master weights; layers are gathered in the model's precision,
and gradients are summed in float32. With `offload=optimizer` moments are in host memory and are copied for a step in
chunks; with `all` everything is in host memory and is stepped there.

Tensor parallel (`tensor`): every rank holds some heads and some columns of each layer; all ranks run the same trees and
sum twice per layer. Queries, keys, values, gate and up projections are split by columns, the projections after them by
rows. Embeddings, norms and head are whole on each rank: their gradients are equal everywhere and need no sum.
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
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from arborl.config.run import LearnerConfig
from arborl.learner.attention.execution import PathSelector
from arborl.learner.core.forward import PlacedModel, PolicyWithCritic
from arborl.learner.core.optimizer import LOW_PRECISION, Optimizer
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.learner.distributed.strategy import ReplicatedStrategy, Strategy, unsupported
from arborl.learner.distributed.zero import ZeroStrategy
from arborl.models.lean import KINDS
from arborl.models.place import Place, place_of, stays_at


class FullyShardedStrategy(Strategy):
    """torch's `fully_shard`."""

    shards_weights = lockstep = True

    def check(self, model: PreTrainedModel) -> None:
        """The model must have separate layers and weights that are not quantized."""
        if not _layers(model):
            reason = f"{type(model).__name__} has no separate layers"
            raise unsupported("fsdp2", reason, "learner.strategy=ddp")
        if getattr(model, "quantization_method", None) is not None:
            raise unsupported("fsdp2", "4-bit weights cannot be sharded", "learner.strategy=ddp")

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        """Shard the policy and its critic."""
        place = place_of(module.policy)
        critic = module.critic
        models = [module.policy] + ([critic.trunk] if critic is not None and critic.trunk is not None else [])
        for model in models:
            PathSelector.check_all(model)
            stays_at(model, place)
            if self.config.master == "float32":
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter.dtype in LOW_PRECISION:
                        parameter.data = parameter.data.float()
        if critic is not None:  # its head computes in float32
            self._shard(critic.head, place, MixedPrecisionPolicy(), self.config.offload == "all")
        self._shard_all(module, models, place, self.config.offload == "all")
        return PlacedModel(module.policy, module)

    def place_frozen(self, model: PreTrainedModel) -> PlacedModel:
        """Shard a reference model."""
        place, module = place_of(model), PolicyWithCritic(model)
        PathSelector.check_all(model)
        stays_at(model, place)
        self._shard_all(module, [model], place, self.config.offload == "all")
        return PlacedModel(model, module)

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        """With `offload=all` shards are stepped in host memory."""
        offload = "optimizer" if self.config.offload == "optimizer" else "none"
        return Optimizer(policy, critic, self.config, rates, self.ranks, offload)

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Each backward pass has summed them."""

    def _shard_all(self, module: PolicyWithCritic, models: list[PreTrainedModel], place: Place, offload: bool) -> None:
        mixed = MixedPrecisionPolicy()
        if place.dtype in LOW_PRECISION:
            mixed = MixedPrecisionPolicy(param_dtype=place.dtype, reduce_dtype=torch.float32)
        for model in models:
            for layer in _layers(model):
                self._shard(layer, place, mixed, offload)
        self._shard(module, place, mixed, offload)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def _shard(self, module: nn.Module, place: Place, mixed: MixedPrecisionPolicy, offload: bool) -> None:
        """Reshard after each forward pass, also at the root: a pass after a step must see the new weights."""
        mesh = init_device_mesh(place.device.type, (self.ranks.count,))
        host = offload and place.device.type == "cuda"
        policy = CPUOffloadPolicy() if host else OffloadPolicy()
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=mixed, offload_policy=policy)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class TensorParallelStrategy(Strategy):
    """torch's `parallelize_module`."""

    shards_weights = True
    lockstep = True
    splits_batch = False

    def check(self, model: PreTrainedModel) -> None:
        """The layers must be Llama's, and heads and columns divisible by the number of ranks."""
        kind, ranks, config = type(model).__name__, self.ranks.count, model.config
        if kind not in KINDS:
            known = ", ".join(name.removesuffix("ForCausalLM") for name in KINDS)
            raise unsupported("tensor", f"{kind} is not supported, only {known}", "learner.strategy=fsdp2")
        for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (count := getattr(config, what)) % ranks:
                raise unsupported("tensor", f"{what}={count} is not divisible by {ranks} ranks", "fewer learner.ranks")
        if getattr(model, "quantization_method", None) is not None:
            raise unsupported("tensor", "4-bit weights cannot be sharded", "learner.strategy=ddp")

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        """Shard the policy and a separate critic."""
        critic = module.critic
        for model in [module.policy] + ([critic.trunk] if critic is not None and critic.trunk is not None else []):
            self._shard_model(model)
        return PlacedModel(module.policy, module)

    def place_frozen(self, model: PreTrainedModel) -> PlacedModel:
        """Shard a reference model."""
        self._shard_model(model)
        return PlacedModel.local_shard(model)

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Every rank has run every tree."""

    def _shard_model(self, model: PreTrainedModel) -> None:
        place = place_of(model)
        PathSelector.check_all(model)
        stays_at(model, place)
        mesh = init_device_mesh(place.device.type, (self.ranks.count,))
        for layer in model.base_model.layers:
            plan: dict[str, ParallelStyle] = {}
            for name in (*COLUMNS, *ROWS):
                plan |= _plan(name, layer.get_submodule(name), name in COLUMNS)
            parallelize_module(layer, mesh, plan)


def _plan(name: str, module: nn.Module, columns: bool) -> dict[str, ParallelStyle]:
    """How to split a projection; of an adapter, the factor on the split side."""

    def style() -> ParallelStyle:
        return ColwiseParallel() if columns else RowwiseParallel()

    if not hasattr(module, "lora_A"):
        return {name: style()}
    factor = "lora_B" if columns else "lora_A"
    found = {f"{name}.{factor}.{adapter}": style() for adapter in getattr(module, factor)}
    return {f"{name}.base_layer": style(), **found}


def make_strategy(config: LearnerConfig, ranks: RankGroup = SINGLE_RANK) -> Strategy:
    """The strategy that the configuration names."""
    if config.strategy == "single":
        return Strategy(config)
    if config.strategy == "ddp":
        return ReplicatedStrategy(config, ranks)
    if config.strategy == "fsdp2":
        return FullyShardedStrategy(config, ranks)
    if config.strategy == "tensor":
        return TensorParallelStrategy(config, ranks)
    return ZeroStrategy(config, ranks)
