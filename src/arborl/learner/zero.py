"""DeepSpeed's ZeRO: moments, gradients and weights in parts, one after the other as the stage rises.

DeepSpeed divides summed gradients by the number of ranks, so losses are multiplied by it. Clipping, the check that all
is finite and the schedule stay ours: policy and critic have a norm each.
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
from transformers import PreTrainedModel

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.attention_choice import Ways
from arborl.learner.optimizer import Masters, Optimizer, parameter_groups
from arborl.learner.peers import Peers
from arborl.learner.scorer import Asked, Scorer
from arborl.learner.sharded_files import MOMENTS, State, shape_of
from arborl.learner.strategy import Strategy, refuse
from arborl.models.place import place_of, stays_at
from arborl.types import Metrics

if TYPE_CHECKING:
    from arborl.learner.learner import Learner


class Zero(Strategy):
    """ZeRO of the stage that is asked for."""

    apart = meets = True
    engine: Any

    def check(self, model: PreTrainedModel) -> None:
        """The package must be there, and the weights of a precision that it keeps masters of."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "learner.strategy=deepspeed needs the package deepspeed. Install it: pip install 'arborl[deepspeed]', "
                "or write learner.strategy=fsdp2."
            )
        if model.dtype not in (torch.float32, torch.bfloat16):
            raise refuse("deepspeed", f"{model.dtype} is not known to it here", "model.dtype=bfloat16 or float32")
        if getattr(model, "quantization_method", None) is not None:
            raise refuse("deepspeed", "weights in 4 bits cannot be cut into parts", "learner.strategy=ddp")

    def place(self, scorer: Scorer) -> Asked:
        """Its engine is made with the optimiser; until then nobody asks."""
        place, critic = place_of(scorer.policy), scorer.critic
        for model in [scorer.policy] + ([critic.trunk] if critic is not None and critic.trunk is not None else []):
            Ways.settle(model)
            stays_at(model, place)
        self.scorer = scorer
        return Asked(scorer.policy, lambda *given: self.engine(*given))

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        """And with it DeepSpeed's engine."""
        made = ZeroOptimizer(self.scorer, policy, critic, self.config, rates, self.ranks)
        self.engine = made.engine
        return made

    def backward(self, loss: Tensor, last: bool) -> None:
        """DeepSpeed sums at the last."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def add_up(self, optimizer: Optimizer) -> None:
        """The last backward pass has."""

    def whole(self, parameter: Tensor) -> Tensor:
        """Of a parameter in parts, all."""
        with self.here([parameter]):  # type: ignore[list-item]
            return parameter.detach().clone()

    def gradients(self, learner: Learner) -> Iterator[tuple[str, Tensor]]:
        """As DeepSpeed gives them."""
        from deepspeed.utils import safe_get_full_grad

        for name, parameter, _ in learner.trained():
            found = safe_get_full_grad(parameter)
            yield name, torch.zeros(shape_of(parameter)) if found is None else found

    def state(self, learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Gathered, one parameter after the other; rank 0 keeps it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        count = learner.optimizer.count()  # type: ignore[attr-defined]
        if count:
            learner.optimizer.link()  # type: ignore[attr-defined]
        for name, parameter, _ in learner.trained():
            found = {"value": safe_get_full_fp32_param(parameter), "step": torch.tensor(float(count))}
            for key in MOMENTS[:2]:
                moment = safe_get_full_optimizer_state(parameter, key) if count else torch.zeros(shape_of(parameter))
                found[key] = moment
            if self.ranks.rank == 0:
                shape = shape_of(parameter)
                yield name, {key: value.reshape(shape) if value.ndim else value for key, value in found.items()}

    def blank(self, learner: Learner) -> State:
        """Wholes."""
        return {
            name: {key: torch.zeros(shape_of(p) if key != "step" else ()) for key in ("value", *MOMENTS)}
            for name, p, _ in learner.trained()
        }

    def take(self, learner: Learner, state: State) -> None:
        """Wholes, of which each rank takes its own."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        optimizer: Any = learner.optimizer
        steps = {int(values["step"]) for values in state.values()}
        optimizer.begin(max(steps))
        for name, parameter, _ in learner.trained():
            values = state[name]
            with self.here([parameter]), torch.no_grad():
                parameter.copy_(values["value"].to(parameter))
            if self.config.zero_stage < 3:
                safe_set_full_fp32_param(parameter, values["value"].float())
                for key in MOMENTS[:2]:
                    safe_set_full_optimizer_state(parameter, values[key], key)
            else:  # whose own way to take a part of a whole fails where ranks do not divide it evenly
                safe_set_local_fp32_param(parameter, self._part(parameter, values["value"].float()))
                for key in MOMENTS[:2]:
                    safe_set_local_optimizer_state(parameter, self._part(parameter, values[key]), key)

    def _part(self, parameter: Any, whole: Tensor) -> Tensor:
        """This rank's of a whole in stage 3; the last is filled up with zeros."""
        size = parameter.partition_numel()
        filled = nn.functional.pad(whole.flatten(), (0, size * self.ranks.count - whole.numel()))
        return filled[size * self.ranks.rank :][:size]

    def here(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """All of them; what rank 0 changes is changed everywhere."""
        if not any(hasattr(parameter, "ds_id") for parameter in parameters):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


class ZeroOptimizer(Optimizer):
    """DeepSpeed's engine and the AdamW in it, with the surface of the others."""

    def __init__(
        self,
        scorer: Scorer,
        policy: Iterable[nn.Parameter],
        critic: Iterable[nn.Parameter],
        config: LearnerConfig,
        rates: tuple[float, float],
        ranks: Peers,
    ):
        self.config, self.among, self.away = config, ranks, None
        self.parts = {"policy": Masters(policy, wanted=False), "critic": Masters(critic, wanted=False)}
        groups = parameter_groups(self.parts, config, rates)
        whose = {id(p): name for name, part in self.parts.items() for p in part.all}
        self.part_names = [whose[id(group["params"][0])] for group in groups]
        place = place_of(scorer.policy)
        deepspeed = imported(place.device)
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
            model=scorer, optimizer=torch.optim.AdamW(groups, betas=config.betas, fused=fused), config=settings,
            dist_init_required=False,
        )  # fmt: skip
        if config.zero_stage == 3:  # the head runs as often as the terms need, and ranks must gather it alike: once
            deepspeed.zero.register_external_parameter(scorer, scorer.policy.get_output_embeddings().weight)
        self.zero_optimizer = self.engine.optimizer
        self.adam = self.zero_optimizer.optimizer
        self._set_step(0)
        scorer.train(False)

    def zero(self) -> None:
        """As if no pass had been."""
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
        """They are where DeepSpeed has put them."""

    def found(self) -> list[Tensor]:
        """Of this rank's part."""
        return [gradient for _, gradient in self._mine()]

    def gradients(self) -> list[Tensor]:
        """The same."""
        return self.found()

    def step(self, scale: float, only: str | None = None) -> Metrics:
        """As `Optimizer.step`."""
        norms: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            if part.all:
                mine = [gradient for owner, gradient in self._mine() if owner == name]
                square = sum(float(torch.linalg.vector_norm(one, dtype=torch.float32)) ** 2 for one in mine)
                norms[name] = torch.tensor(self.among.total(square)).sqrt()
                share = min(1.0, self.config.max_grad_norm / (float(norms[name]) + 1e-6))
                for gradient in mine if share < 1.0 else ():
                    gradient.mul_(share)
        finite = all(bool(torch.isfinite(norm)) for norm in norms.values())
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = group["base"] * scale
            self.zero_optimizer.step()
        metrics = {"learner/skipped": 0.0} if finite else {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0}
        metrics["learner/grad_norm"] = float(norms["policy"])
        return metrics | ({"learner/critic_grad_norm": float(norms["critic"])} if "critic" in norms else {})

    def count(self) -> int:
        """Steps that AdamW has taken."""
        return max((int(state["step"]) for state in self.adam.state.values() if "step" in state), default=0)

    def begin(self, steps: int) -> None:
        """Moments of zeros, after so many steps, ready to be filled."""
        inner = self.zero_optimizer  # in stage 3 AdamW is given its parameters only while it steps
        held = [flat for group in self.adam.param_groups for flat in group["params"]]
        for flat in inner.fp32_partitioned_groups_flat if self.config.zero_stage == 3 else held:
            fresh = {key: torch.zeros_like(flat) for key in MOMENTS[:2]}
            self.adam.state[flat] = fresh | {"step": torch.tensor(0.0)} | self.adam.state.get(flat, {})
        self.link()
        self._set_step(steps)

    def link(self) -> None:
        """Below stage 3 DeepSpeed looks for moments once, after the step of the first of its groups, and then knows
        those of no other: it is made to look again, now that all are there."""
        if self.config.zero_stage < 3:
            self.zero_optimizer._hp_optimizer_states_linked = False
            self.zero_optimizer._lazy_init_hp_params_optimizer_state()

    def _set_step(self, steps: int) -> None:
        for state in self.adam.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).fill_(float(steps))

    def _mine(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's part, each with whose it is."""
        inner = self.zero_optimizer
        groups = getattr(inner, "sub_group_to_group_id", None)
        for number, gradients in inner.averaged_gradients.items():
            owner = self.part_names[groups[number] if groups else number]
            yield from ((owner, gradient) for gradient in gradients or ())


def imported(device: torch.device) -> Any:
    """DeepSpeed, told where it is and to say only what is wrong; as if nobody had used it in this process before."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    loud = [logging.getLogger(name) for name in ("DeepSpeed", "deepspeed")]
    for one in loud:
        one.setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import groups

    for one in loud:
        one.setLevel(logging.ERROR)
    if device.type == "cpu":  # its lines through shared memory would be compiled, and who is killed meanwhile locks all
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    comm.cdb = None
    deepspeed.zero.Init.param_id = 0  # ranks compare these numbers, and those of modules
    count = inspect.signature(DeepSpeedZeRoOffload._register_deepspeed_module).parameters["count"].default
    count[0] = 0
    for name, value in vars(groups).items():  # groups of lines that a former learner has closed
        if name.startswith("_") and isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
    return deepspeed
