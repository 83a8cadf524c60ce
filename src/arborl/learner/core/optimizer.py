"""AdamW with learning-rate schedule, gradient clipping, float32 master weights and float16 loss scaling.

A bfloat16 weight has 8 bits of precision: an update below 1/512 of the weight is rounded away, and at common learning
rates most updates are that small. So the optimizer works on float32 copies, the master weights, and after each step
rounds them into the model. Gradients of several micro-batches are summed in the master's precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arborl.config.training_config import LearnerConfig
from arborl.learner.core.offload import OffloadedOptimizerState
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.types import Metrics

LOW_PRECISION = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Each parameter, or its float32 copy if it has lower precision; of a sharded parameter, this rank's shard. A
    low-precision gradient moves to its master as soon as it is computed, so both never exist at once."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], keep_masters: bool, offloaded: OffloadedOptimizerState | None = None
    ):
        self.parameters, self.offloaded = list(parameters), offloaded
        self.masters: list[nn.Parameter] = []
        for parameter in self.parameters:
            here = local_shard(parameter)
            if not (keep_masters and parameter.dtype in LOW_PRECISION):
                self.masters.append(parameter if here is parameter else nn.Parameter(here.detach()))
                continue
            master = nn.Parameter(here.detach().float()) if offloaded is None else offloaded.master_of(here)
            self.masters.append(master)
            parameter.register_post_accumulate_grad_hook(_move_to(master))

    def copy_to_model(self) -> None:
        if copied := self.copied:
            with torch.no_grad():
                torch._foreach_copy_([local_shard(p) for p, _ in copied], [m for _, m in copied])

    def collect(self) -> None:
        """After the last backward pass: take this rank's shard of the gradients of sharded parameters."""
        for parameter, master in self.pairs:
            if isinstance(parameter, DTensor) and master.dtype == parameter.dtype:
                master.grad = None if parameter.grad is None else local_shard(parameter.grad)

    def zero_grad(self) -> None:
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def copies(self) -> list[Tensor]:
        return [self.value(m) for _, m in self.copied]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.parameters, self.masters, strict=True))

    @property
    def copied(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(p, m) for p, m in self.pairs if m.dtype != p.dtype]

    def value(self, master: nn.Parameter) -> Tensor:
        return master.detach() if self.offloaded is None else self.offloaded.value(master)

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Set the copies to what `copies` returned; without any, to the current weights."""
        with torch.no_grad():
            for (_, master), value in zip(self.copied, saved or [local_shard(p) for p, _ in self.copied], strict=True):
                self.value(master).copy_(value)


def step_metrics(norms: dict[str, Tensor], finite: bool) -> Metrics:
    metrics = {"learner/skipped": 0.0} if finite else {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0}
    names = {"policy": "learner/grad_norm", "critic": "learner/critic_grad_norm"}
    return metrics | {names[part]: float(norm) for part, norm in norms.items()}


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _move_to(master: nn.Parameter) -> Any:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = local_shard(parameter.grad).to(master.device), None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    return move


def parameter_groups(
    parts: dict[str, MasterWeights], config: LearnerConfig, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """AdamW's parameter groups: policy and critic with their learning rates, each split into matrices and vectors;
    vectors have no weight decay."""
    groups: list[dict[str, Any]] = []
    for part, rate in zip(parts.values(), rates, strict=True):
        for decays in (True, False):
            chosen = [m for p, m in part.pairs if (p.ndim > 1) == decays]
            decay = config.weight_decay if decays else 0.0
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay, "lr": rate, "base": rate})
    return groups


class Optimizer:
    """AdamW over the policy, and over the critic with its own learning rate; each is clipped by its own norm."""

    def __init__(
        self,
        policy: Iterable[nn.Parameter],
        critic: Iterable[nn.Parameter],
        config: LearnerConfig,
        rates: tuple[float, float],
        shard_group: RankGroup = SINGLE_RANK,
        offload: str = "",
    ):
        self.config, self.shard_group = config, shard_group
        keep_masters, policy, offload = config.master == "float32", list(policy), offload or config.offload
        self.offloaded = OffloadedOptimizerState(policy[0].device, offload == "all") if offload != "none" else None
        self.parts = {
            "policy": MasterWeights(policy, keep_masters, self.offloaded),
            "critic": MasterWeights(critic, keep_masters, self.offloaded),
        }
        groups = parameter_groups(self.parts, config, rates)
        parameters = [p for part in self.parts.values() for p in part.parameters]
        fused = all(p.is_cuda or isinstance(p, DTensor) for p in parameters)
        self.adam = torch.optim.AdamW(groups, betas=config.betas, fused=fused)

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()

    def collect(self) -> None:
        """After the last backward pass: every master gets its gradient."""
        for part in self.parts.values():
            part.collect()

    def present_gradients(self) -> list[Tensor]:
        return [p.grad for part in self.parts.values() for p in part.masters if p.grad is not None]

    def gradients(self) -> list[Tensor]:
        """The gradients of all trained parameters, zeros for those that a batch did not reach."""
        for parameter in (master for part in self.parts.values() for master in part.masters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self.present_gradients()

    def step(self, scale: float, only: str | None = None) -> Metrics:
        """One step with `scale` times the learning rates, skipped if a gradient is not finite; `only` steps one part.
        The reported norms are those before clipping."""
        norms = {name: self._clip(part) for name, part in self.parts.items() if part.masters and only in (None, name)}
        finite = all(bool(torch.isfinite(norm)) for norm in norms.values())
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = group["base"] * scale
            if only is not None:
                for name, part in self.parts.items():
                    if name != only:
                        part.zero_grad()  # AdamW skips parameters without a gradient
            self._step()
        return step_metrics(norms, finite)

    def _clip(self, part: MasterWeights) -> Tensor:
        """Clip the gradients of one part by their global norm over all shards; returns the norm."""
        max_norm = self.config.max_grad_norm
        if not any(isinstance(p, DTensor) for p in part.parameters):
            return torch.nn.utils.clip_grad_norm_(part.masters, max_norm)
        norms: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter, master in part.pairs:
            if master.grad is not None:
                split = isinstance(parameter, DTensor) and any(place.is_shard() for place in parameter.placements)
                norms[split].append(torch.linalg.vector_norm(master.grad, dtype=torch.float32))
        squares = {split: float(torch.stack(some).square().sum()) if some else 0.0 for split, some in norms.items()}
        norm = torch.tensor(squares[False] + self.shard_group.sum(squares[True]), device=part.masters[0].device).sqrt()
        torch.nn.utils.clip_grads_with_norm_(part.masters, max_norm, norm)
        return norm

    def _step(self) -> None:
        if self.offloaded is not None:
            self.offloaded.step(self.adam, [pair for part in self.parts.values() for pair in part.pairs])
            return
        self.adam.step()
        for part in self.parts.values():
            part.copy_to_model()

    def master_weights_of(self, name: str) -> MasterWeights:
        """The master weights that contain a parameter of this name (`Learner.trained_parameters`)."""
        return self.parts["policy" if name.startswith("model.") else "critic"]

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "masters": {name: part.copies() for name, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call after the weights have been loaded. Learning rates, weight decay and betas are those of this
        configuration."""
        self.load_moments(state["adam"]["state"])
        for name, part in self.parts.items():
            part.restore(state["masters"][name])

    def load_moments(self, moments: dict[int, dict[str, Tensor]]) -> None:
        if self.offloaded is not None:
            self.offloaded.restore(self.adam, moments)
        else:
            groups = self.adam.state_dict()["param_groups"]
            self.adam.load_state_dict({"state": moments, "param_groups": groups})


INITIAL_SCALE, MAX_SCALE = 2.0**16, 2.0**24
SHRINK_FACTOR, GROWTH_FACTOR = 4.0, 2.0
GROWTH_INTERVAL = 1000  # passes without overflow after which the scale doubles


class LossScale:
    """The factor of the loss: 1 for every precision but float16, whose smallest positive number is 6e-8, often more
    than a token's share of a gradient. After an overflow the pass is repeated with a smaller factor: no step is
    lost."""

    def __init__(self, dtype: torch.dtype):
        self.needed = dtype == torch.float16
        self.value = self.last_good = INITIAL_SCALE if self.needed else 1.0
        self.good_passes = 0

    def unscale(self, gradients: list[Tensor], ranks: RankGroup = SINGLE_RANK) -> bool:
        """Divide the gradients. Returns False if they overflowed and must be computed again with the reduced factor.
        Gradients that are not finite at factor 1 stay as they are, and the factor is restored."""
        if not self.needed:
            return True
        own_finite = bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all()) if gradients else True
        finite = all(ranks.all_gather(own_finite))
        if not finite and self.value > 1.0:
            self.value, self.good_passes = max(1.0, self.value / SHRINK_FACTOR), 0
            return False
        if not finite:
            self.value = self.last_good
            return True
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)
        self.good_passes += 1
        if self.good_passes >= GROWTH_INTERVAL:
            self.value, self.good_passes = min(MAX_SCALE, self.value * GROWTH_FACTOR), 0
        self.last_good = self.value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = self.last_good = float(state["value"])
        self.good_passes = int(state["good"])


@dataclass(frozen=True, slots=True)
class InitialUpdates:
    """Updates at the start of a run with their own constant learning rate."""

    count: int = 0
    lr: float = 0.0


NO_INITIAL_UPDATES = InitialUpdates()


def warmup_steps(config: LearnerConfig, total: int) -> int:
    return math.ceil(total * config.warmup) if config.warmup < 1 else int(config.warmup)


def lr_factor(config: LearnerConfig, step: int, total: int, floor: float = 0.0) -> float:
    """The factor of the learning rates after `step` of `total` optimizer steps (0: unknown, no decay): transformers'
    `get_scheduler` of the same name; with `floor`, `cosine_with_min_lr`, or `polynomial` of power 1."""
    rising = warmup_steps(config, total)
    if step < rising:
        return step / rising
    if config.decay not in ("linear", "cosine") or not total:
        return 1.0
    done = min(1.0, (step - rising) / max(1, total - rising))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * left
