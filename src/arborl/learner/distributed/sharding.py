"""The sharding strategies, and `make_strategy`.

Fully sharded (`fsdp2`): every rank holds a shard of each weight, its gradient and its moments; a layer is gathered
while it runs. Shards are float32 and are the optimizer's master weights; layers are gathered in the model's precision,
and gradients are summed in float32. With `offload=optimizer` moments are in host memory and are copied for a step in
chunks; with `all` everything is in host memory and is stepped there.

Tensor parallel (`tensor`): every rank holds some heads and some columns of each layer; all ranks run the same trees and
sum twice per layer. Queries, keys, values, gate and up projections are split by columns, the projections after them by
rows. Embeddings, norms and head are whole on each rank: their gradients are equal everywhere and need no sum.

DeepSpeed's ZeRO (`deepspeed`): moments (stage 1), gradients (stage 2) and weights (stage 3) are sharded. DeepSpeed
divides summed gradients by the number of ranks, so losses are multiplied by it. Clipping, the check for finite
gradients and the schedule are Arbor's, because policy and critic have separate norms.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.attention.path_selection import PathSelector
from arborl.learner.core.optimizer import LOW_PRECISION, MasterWeights, Optimizer, parameter_groups, step_metrics
from arborl.learner.core.tree_forward import PlacedModel, PolicyWithCritic
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.learner.distributed.strategy import MOMENTS, State, Strategy, full_shape, unsupported
from arborl.models.fast_forward import FAST_MODEL_CLASSES
from arborl.models.model_loading import ComputeDevice, compute_device, set_compute_device
from arborl.types import Metrics

if TYPE_CHECKING:
    from arborl.learner.core.learner import Learner


def _models(module: PolicyWithCritic) -> list[PreTrainedModel]:
    """The policy, and the critic's own model if it has one."""
    trunk = module.critic.trunk if module.critic is not None else None
    return [module.policy] if trunk is None else [module.policy, trunk]


def _prepare(model: PreTrainedModel) -> ComputeDevice:
    """Check execution paths and record the device before the model is sharded."""
    place = compute_device(model)
    PathSelector.check_all(model)
    set_compute_device(model, place)
    return place


def _check_unquantized(model: PreTrainedModel, strategy: str) -> None:
    if getattr(model, "quantization_method", None) is not None:
        raise unsupported(strategy, "4-bit weights cannot be sharded", "learner.strategy=ddp")


class FullyShardedStrategy(Strategy):
    shards_weights = lockstep = True

    def check(self, model: PreTrainedModel) -> None:
        """The model must have separate layers and weights that are not quantized."""
        if not _layers(model):
            reason = f"{type(model).__name__} has no separate layers"
            raise unsupported("fsdp2", reason, "learner.strategy=ddp")
        _check_unquantized(model, "fsdp2")

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        place, critic, models = compute_device(module.policy), module.critic, _models(module)
        for model in models:
            _prepare(model)
            if self.config.master == "float32":
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter.dtype in LOW_PRECISION:
                        parameter.data = parameter.data.float()
        if critic is not None:  # its head computes in float32
            self._shard(critic.head, place, MixedPrecisionPolicy(), self.config.offload == "all")
        self._shard_all(module, models, place, self.config.offload == "all")
        return PlacedModel(module.policy, module)

    def place_frozen(self, model: PreTrainedModel) -> PlacedModel:
        place, module = _prepare(model), PolicyWithCritic(model)
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

    def _shard_all(
        self, module: PolicyWithCritic, models: list[PreTrainedModel], place: ComputeDevice, offload: bool
    ) -> None:
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

    def _shard(self, module: nn.Module, place: ComputeDevice, mixed: MixedPrecisionPolicy, offload: bool) -> None:
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
    shards_weights = True
    lockstep = True
    splits_batch = False

    def check(self, model: PreTrainedModel) -> None:
        """The layers must be Llama's, and heads and columns divisible by the number of ranks."""
        kind, ranks, config = type(model).__name__, self.ranks.count, model.config
        if kind not in FAST_MODEL_CLASSES:
            known = ", ".join(name.removesuffix("ForCausalLM") for name in FAST_MODEL_CLASSES)
            raise unsupported("tensor", f"{kind} is not supported, only {known}", "learner.strategy=fsdp2")
        for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (count := getattr(config, what)) % ranks:
                raise unsupported("tensor", f"{what}={count} is not divisible by {ranks} ranks", "fewer learner.ranks")
        _check_unquantized(model, "tensor")

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        for model in _models(module):
            self._shard_model(model)
        return PlacedModel(module.policy, module)

    def place_frozen(self, model: PreTrainedModel) -> PlacedModel:
        self._shard_model(model)
        return PlacedModel.local(model)

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Every rank has run every tree."""

    def _shard_model(self, model: PreTrainedModel) -> None:
        place = _prepare(model)
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
    adapters = {f"{name}.{factor}.{adapter}": style() for adapter in getattr(module, factor)}
    return {f"{name}.base_layer": style(), **adapters}


def make_strategy(config: LearnerConfig, ranks: RankGroup = SINGLE_RANK) -> Strategy:
    if config.strategy == "single":
        return Strategy(config)
    kinds = {"ddp": Strategy, "fsdp2": FullyShardedStrategy, "tensor": TensorParallelStrategy}
    return kinds.get(config.strategy, ZeroStrategy)(config, ranks)


class ZeroStrategy(Strategy):
    """ZeRO of `learner.strategy` `zero1`, `zero2` and `zero3`."""

    shards_weights = lockstep = True
    engine: Any

    def check(self, model: PreTrainedModel) -> None:
        """The package must be installed, and the weights in float32 or bfloat16."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                f"learner.strategy={self.config.strategy} needs the package deepspeed. Install it: pip install "
                "'arborl[deepspeed]', or write learner.strategy=fsdp2."
            )
        if model.dtype not in (torch.float32, torch.bfloat16):
            raise unsupported(
                self.config.strategy, f"{model.dtype} is not supported", "model.dtype=bfloat16 or float32"
            )
        _check_unquantized(model, self.config.strategy)

    def place(self, module: PolicyWithCritic) -> PlacedModel:
        """DeepSpeed's engine is created with the optimizer."""
        for model in _models(module):
            _prepare(model)
        self.module = module
        return PlacedModel(module.policy, lambda *args: self.engine(*args))

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        made = ZeroOptimizer(self.module, policy, critic, self.config, rates, self.ranks)
        self.engine = made.engine
        return made

    def backward(self, loss: Tensor, last: bool) -> None:
        """DeepSpeed sums over ranks after the last micro-batch."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """The last backward pass has summed them."""

    def full_tensor(self, parameter: Tensor) -> Tensor:
        with self.writable([parameter]):  # type: ignore[list-item]
            return parameter.detach().clone()

    def gradients(self, learner: Learner) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter, _ in learner.trained_parameters():
            full = safe_get_full_grad(parameter)
            yield name, torch.zeros(full_shape(parameter)) if full is None else full

    def state(self, learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Gathered one parameter at a time; rank 0 keeps them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        count = learner.optimizer.count()  # type: ignore[attr-defined]
        if count:
            learner.optimizer.link()  # type: ignore[attr-defined]
        for name, parameter, _ in learner.trained_parameters():
            full = {"value": safe_get_full_fp32_param(parameter), "step": torch.tensor(float(count))}
            for key in MOMENTS[:2]:
                moment = safe_get_full_optimizer_state(parameter, key) if count else torch.zeros(full_shape(parameter))
                full[key] = moment
            if self.ranks.rank == 0:
                shape = full_shape(parameter)
                yield name, {key: value.reshape(shape) if value.ndim else value for key, value in full.items()}

    def empty_state(self, learner: Learner) -> State:
        return {
            name: {key: torch.zeros(full_shape(p) if key != "step" else ()) for key in ("value", *MOMENTS)}
            for name, p, _ in learner.trained_parameters()
        }

    def load_state(self, learner: Learner, state: State) -> None:
        """From whole tensors, of which each rank takes its shard."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        optimizer: Any = learner.optimizer
        steps = {int(values["step"]) for values in state.values()}
        optimizer.begin(max(steps))
        for name, parameter, _ in learner.trained_parameters():
            values = state[name]
            with self.writable([parameter]), torch.no_grad():
                parameter.copy_(values["value"].to(parameter))
            if self.config.zero_stage < 3:
                safe_set_full_fp32_param(parameter, values["value"].float())
                for key in MOMENTS[:2]:
                    safe_set_full_optimizer_state(parameter, values[key], key)
            else:  # DeepSpeed's own slicing of a whole tensor fails if ranks do not divide it evenly
                safe_set_local_fp32_param(parameter, self._part(parameter, values["value"].float()))
                for key in MOMENTS[:2]:
                    safe_set_local_optimizer_state(parameter, self._part(parameter, values[key]), key)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor in stage 3, padded with zeros."""
        size = parameter.partition_numel()
        filled = nn.functional.pad(whole.flatten(), (0, size * self.ranks.count - whole.numel()))
        return filled[size * self.ranks.rank :][:size]

    def writable(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Gathers the parameters; changes on rank 0 are broadcast."""
        if not any(hasattr(parameter, "ds_id") for parameter in parameters):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


class ZeroOptimizer(Optimizer):
    """DeepSpeed's engine and its AdamW, with the interface of `Optimizer`."""

    def __init__(
        self,
        module: PolicyWithCritic,
        policy: Iterable[nn.Parameter],
        critic: Iterable[nn.Parameter],
        config: LearnerConfig,
        rates: tuple[float, float],
        ranks: RankGroup,
    ):
        self.config, self.shard_group, self.offloaded = config, ranks, None
        self.parts = {name: MasterWeights(own, False) for name, own in (("policy", policy), ("critic", critic))}
        groups = parameter_groups(self.parts, config, rates)
        part_of = {id(p): name for name, part in self.parts.items() for p in part.masters}
        self.part_names = [part_of[id(group["params"][0])] for group in groups]
        place = compute_device(module.policy)
        deepspeed = import_deepspeed(place.device)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": place.dtype == torch.bfloat16},
        }
        fused = place.device.type == "cuda"
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.AdamW(groups, betas=config.betas, fused=fused), config=settings,
            dist_init_required=False,
        )  # fmt: skip
        if config.zero_stage == 3:  # the head runs once per chunk of terms; ranks must gather it equally often: once
            deepspeed.zero.register_external_parameter(module, module.policy.get_output_embeddings().weight)
        self.zero_optimizer = self.engine.optimizer
        self.adam = self.zero_optimizer.optimizer
        self._set_step(0)
        module.train(False)

    def zero_grad(self) -> None:
        """Discard all gradients, also those of an interrupted pass."""
        inner = self.zero_optimizer
        inner.zero_grad(set_to_none=True)
        if self.config.zero_stage == 3:
            inner.averaged_gradients = {}
            return
        inner.micro_step_id = -1
        inner._release_preflattened_grad_buffers()
        for held in (inner.averaged_gradients, inner.all_grad_tensors):
            for number in held:
                held[number] = None

    def collect(self) -> None:
        """Gradients stay where DeepSpeed has stored them."""

    def present_gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self._own_gradients()]

    gradients = present_gradients

    def step(self, scale: float, only: str | None = None) -> Metrics:
        norms: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            if part.masters:
                gradients = [gradient for owner, gradient in self._own_gradients() if owner == name]
                square = sum(float(torch.linalg.vector_norm(one, dtype=torch.float32)) ** 2 for one in gradients)
                norms[name] = torch.tensor(self.shard_group.sum(square)).sqrt()
                share = min(1.0, self.config.max_grad_norm / (float(norms[name]) + 1e-6))
                for gradient in gradients if share < 1.0 else ():
                    gradient.mul_(share)
        finite = all(bool(torch.isfinite(norm)) for norm in norms.values())
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = group["base"] * scale
            self.zero_optimizer.step()
        return step_metrics(norms, finite)

    def count(self) -> int:
        return max((int(state["step"]) for state in self.adam.state.values() if "step" in state), default=0)

    def begin(self, steps: int) -> None:
        """Allocate zero moments after this many steps, to be filled."""
        inner = self.zero_optimizer  # in stage 3 AdamW holds its parameters only during a step
        held = [flat for group in self.adam.param_groups for flat in group["params"]]
        for flat in inner.fp32_partitioned_groups_flat if self.config.zero_stage == 3 else held:
            fresh = {key: torch.zeros_like(flat) for key in MOMENTS[:2]}
            self.adam.state[flat] = fresh | {"step": torch.tensor(0.0)} | self.adam.state.get(flat, {})
        self.link()
        self._set_step(steps)

    def link(self) -> None:
        """Below stage 3 DeepSpeed links moments once, after the first group's step, and then lacks those of other
        groups: link them again when all exist."""
        if self.config.zero_stage < 3:
            self.zero_optimizer._hp_optimizer_states_linked = False
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()

    def _set_step(self, steps: int) -> None:
        for state in self.adam.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).fill_(float(steps))

    def _own_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's shard, each with the name of its part."""
        inner = self.zero_optimizer
        groups = getattr(inner, "sub_group_to_group_id", None)
        for number, gradients in inner.averaged_gradients.items():
            owner = self.part_names[groups[number] if groups else number]
            yield from ((owner, gradient) for gradient in gradients or ())


def import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    loggers = [logging.getLogger(name) for name in ("DeepSpeed", "deepspeed")]
    for one in loggers:
        one.setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import groups

    for one in loggers:
        one.setLevel(logging.ERROR)
    if device.type == "cpu":  # do not compile its shared-memory backend: a process killed meanwhile keeps the lock
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    comm.cdb = None
    deepspeed.zero.Init.param_id = 0  # ranks compare these numbers, and those of modules below
    count = inspect.signature(DeepSpeedZeRoOffload._register_deepspeed_module).parameters["count"].default
    count[0] = 0
    for name, value in vars(groups).items():  # process groups that an earlier learner has closed
        if name.startswith("_") and isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
    return deepspeed
