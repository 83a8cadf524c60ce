"""Gradients become weights: AdamW with a schedule, clipping, and float32 masters of weights kept in fewer bits.

A bfloat16 weight has 8 bits of precision: an update below 1/512 of it is rounded away, and at the learning rates of
this trade most are. So the optimiser works on float32 copies, the masters; after each step the model's own weights are
the masters rounded. Gradients of several micro-batches add up in the masters' precision too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arborl.config.run_config import LearnerConfig
from arborl.learner.offload import Away
from arborl.learner.peers import ALONE, Peers
from arborl.types import Metrics

COARSE = (torch.bfloat16, torch.float16)


class Masters:
    """Each parameter, or its float32 copy where it is kept in fewer bits; of a sharded one, the part that is here.

    A coarse parameter's gradient moves to its master as soon as a backward pass has it, so both never exist at once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], wanted: bool, away: Away | None = None):
        self.own, self.away = list(parameters), away
        self.all: list[nn.Parameter] = []
        for parameter in self.own:
            here = local(parameter)
            if not (wanted and parameter.dtype in COARSE):
                self.all.append(parameter if here is parameter else nn.Parameter(here.detach()))
                continue
            master = (
                away.master_of(nn.Parameter(here, requires_grad=False))
                if away is not None
                else nn.Parameter(here.detach().float())
            )
            self.all.append(master)
            parameter.register_post_accumulate_grad_hook(_move_to(master))

    def publish(self) -> None:
        """The model's weights become the masters', rounded."""
        coarse = [(local(p), m) for p, m in self.copied]
        if coarse:
            with torch.no_grad():
                torch._foreach_copy_([p for p, _ in coarse], [m for _, m in coarse])

    def collect(self) -> None:
        """After the last backward pass: gradients of sharded parameters, the part that is here."""
        for parameter, master in self.pairs:
            if isinstance(parameter, DTensor) and master.dtype == parameter.dtype:
                master.grad = None if parameter.grad is None else local(parameter.grad)

    def zero(self) -> None:
        for parameter in (*self.own, *self.all):
            parameter.grad = None

    def copies(self) -> list[Tensor]:
        """The masters that are copies, in order, for a checkpoint."""
        return [self.value(m) for _, m in self.copied]

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with its master."""
        return list(zip(self.own, self.all, strict=True))

    @property
    def copied(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Those whose master is a copy."""
        return [(p, m) for p, m in self.pairs if m.dtype != p.dtype]

    def value(self, master: nn.Parameter) -> Tensor:
        """A master's numbers, wherever they are kept."""
        return master.detach() if self.away is None else self.away.value(master)

    def restore(self, saved: Sequence[Tensor]) -> None:
        """The copies as `copies` gave them; without any, from the weights as they are now."""
        with torch.no_grad():
            for (_, master), value in zip(self.copied, saved or [local(p) for p, _ in self.copied], strict=True):
                self.value(master).copy_(value)


def local(tensor: Tensor) -> Tensor:
    """Of a sharded tensor the part that is here, in its own memory; another as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _move_to(master: nn.Parameter) -> Any:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = local(parameter.grad).to(master.device), None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    return move


def parameter_groups(
    parts: dict[str, Masters], config: LearnerConfig, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """What AdamW is given: each part at its rate, matrices before what does not decay."""
    groups: list[dict[str, Any]] = []
    for part, rate in zip(parts.values(), rates, strict=True):
        for decays in (True, False):
            chosen = [m for p, m in part.pairs if (p.ndim > 1) == decays]
            decay = config.weight_decay if decays else 0.0
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay, "lr": rate, "base": rate})
    return groups


class Optimizer:
    """AdamW over the policy, and over the critic at its own rate; each is clipped by itself.

    Args:
        among: the processes among which parameters are sharded, where they are.
    """

    def __init__(
        self,
        policy: Iterable[nn.Parameter],
        critic: Iterable[nn.Parameter],
        config: LearnerConfig,
        rates: tuple[float, float],
        among: Peers = ALONE,
        offload: str = "",
    ):
        self.config, self.among = config, among
        wanted, policy, offload = config.master == "float32", list(policy), offload or config.offload
        self.away = Away(policy[0].device, offload == "all") if offload != "none" else None
        self.parts = {"policy": Masters(policy, wanted, self.away), "critic": Masters(critic, wanted, self.away)}
        groups = parameter_groups(self.parts, config, rates)
        own = [p for part in self.parts.values() for p in part.own]
        fused = all(p.is_cuda or isinstance(p, DTensor) for p in own)
        self.adam = torch.optim.AdamW(groups, betas=config.betas, fused=fused)

    def zero(self) -> None:
        for part in self.parts.values():
            part.zero()

    def collect(self) -> None:
        """After the last backward pass: every master has its gradient."""
        for part in self.parts.values():
            part.collect()

    def found(self) -> list[Tensor]:
        """The gradients that there are."""
        return [p.grad for part in self.parts.values() for p in part.all if p.grad is not None]

    def gradients(self) -> list[Tensor]:
        """Of every trained parameter, zeros where a batch did not reach one."""
        found = []
        for part in self.parts.values():
            for parameter in part.all:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def step(self, scale: float, only: str | None = None) -> Metrics:
        """One step at `scale` times the rates, unless a gradient is not finite; `only` steps one part.

        The norms are of the gradients before clipping.
        """
        norms = {name: self._clip(part) for name, part in self.parts.items() if part.all and only in (None, name)}
        finite = all(bool(torch.isfinite(norm)) for norm in norms.values())
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = group["base"] * scale
            if only is not None:
                for name, part in self.parts.items():
                    if name != only:
                        part.zero()  # AdamW passes over what has no gradient
            self._step()
        metrics = {"learner/skipped": 0.0} if finite else {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0}
        if "policy" in norms:
            metrics["learner/grad_norm"] = float(norms["policy"])
        if "critic" in norms:
            metrics["learner/critic_grad_norm"] = float(norms["critic"])
        return metrics

    def _clip(self, part: Masters) -> Tensor:
        """Clip a part's gradients by the norm of all of them, and give that; of those that are sharded, in all
        processes."""
        most = self.config.max_grad_norm
        if not any(isinstance(p, DTensor) for p in part.own):
            return torch.nn.utils.clip_grad_norm_(part.all, most)
        norms: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter, master in part.pairs:
            if master.grad is not None:
                split = isinstance(parameter, DTensor) and any(place.is_shard() for place in parameter.placements)
                norms[split].append(torch.linalg.vector_norm(master.grad, dtype=torch.float32))
        squares = {split: float(torch.stack(some).square().sum()) if some else 0.0 for split, some in norms.items()}
        norm = torch.tensor(squares[False] + self.among.total(squares[True]), device=part.all[0].device).sqrt()
        torch.nn.utils.clip_grads_with_norm_(part.all, most, norm)
        return norm

    def _step(self) -> None:
        if self.away is not None:
            self.away.step(self.adam, [pair for part in self.parts.values() for pair in part.pairs])
            return
        self.adam.step()
        for part in self.parts.values():
            part.publish()

    def part_of(self, name: str) -> Masters:
        """Whose masters a parameter of that name (`Learner.trained`) is among."""
        return self.parts["policy" if name.startswith("model.") else "critic"]

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "masters": {name: part.copies() for name, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights themselves have been loaded. Rates, decay and betas stay those of this configuration."""
        self.take(state["adam"]["state"])
        for name, part in self.parts.items():
            part.restore(state["masters"][name])

    def take(self, moments: dict[int, dict[str, Tensor]]) -> None:
        """AdamW's own numbers, by the place of their parameter among all."""
        if self.away is not None:
            self.away.restore(self.adam, moments)
        else:
            groups = self.adam.state_dict()["param_groups"]
            self.adam.load_state_dict({"state": moments, "param_groups": groups})
