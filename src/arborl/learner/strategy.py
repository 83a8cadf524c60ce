"""How a learner's weights, gradients and optimiser lie in one process or in several. All take the same steps.

single     one process; all of it
ddp        each rank holds all of it, and its own trees; gradients are summed
fsdp2      each rank holds a part of every weight, and its own trees; a layer is gathered while it runs
deepspeed  the same by DeepSpeed's ZeRO, of the stage asked for
tensor     each rank holds some heads and some columns of every layer; all run the same trees
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.optimizer import Optimizer, local
from arborl.learner.peers import ALONE, Peers
from arborl.learner.scorer import Asked, Scorer
from arborl.learner.sharded_files import MOMENTS, State, as_part, ordered, part_of

if TYPE_CHECKING:
    from arborl.learner.learner import Learner


class Strategy:
    """One process that holds everything; what others do otherwise, they say.

    Args:
        config: the learner's.
        ranks: all processes.
    """

    apart = False
    """Whether the learner's weights are not the ones it was given: then an engine's are a copy, brought up to date."""
    meets = False
    """Whether every pass through the model is a meeting of all ranks, so that all must make equally many."""
    spreads = True
    """Whether each rank has trees of its own."""

    def __init__(self, config: LearnerConfig, ranks: Peers = ALONE):
        self.config, self.ranks = config, ranks
        self.peers = ranks if self.spreads else ALONE
        self.meeting = ranks if self.meets else ALONE

    def check(self, model: PreTrainedModel) -> None:
        """ConfigError where it cannot hold such a model."""

    def place(self, scorer: Scorer) -> Asked:
        """Take the model that learns, and its critic; from here on they are asked in this way."""
        return Asked(scorer.policy, scorer)

    def place_frozen(self, model: PreTrainedModel) -> Asked:
        """The same for a model that is only asked."""
        return Asked.plain(model)

    def optimizer(
        self, policy: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], rates: tuple[float, float]
    ) -> Optimizer:
        """What steps these parameters, as they are once placed."""
        return Optimizer(policy, critic, self.config, rates, self.ranks)

    def backward(self, loss: Tensor, last: bool) -> None:
        """The gradient of a micro-batch, added to what there is; `last` of its step."""
        loss.backward()

    def add_up(self, optimizer: Optimizer) -> None:
        """The gradients of all ranks become their sum, where the backward passes have not done it."""
        self.peers.add_up(optimizer.gradients())

    def here(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Inside, this rank's part of them, which may be all, can be read and written."""
        return nullcontext()

    def whole(self, parameter: Tensor) -> Tensor:
        """All of a parameter, or of what has its form; all ranks ask for it together."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def gradients(self, learner: Learner) -> Iterator[tuple[str, Tensor]]:
        """All gradients as they are summed up, one after the other; all ranks ask together."""
        for name, parameter, master in learner.trained():
            gradient = parameter.grad if isinstance(parameter, DTensor) and parameter.grad is not None else master.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            yield name, self.whole(as_part(gradient, parameter))

    def state(self, learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """This rank's part of what learns, in full precision, and of its moments; not copies."""
        for name, parameter, master in learner.trained():
            value, moments = self._numbers(learner, name, master)
            found = {key: as_part(part, parameter) for key, part in ({"value": value} | moments).items()}
            yield name, found | {"step": moments["step"].reshape(())}

    def blank(self, learner: Learner) -> State:
        """Room for what `state` gives."""
        return {
            name: {key: as_part(torch.zeros_like(local(part), device="cpu"), part) for key, part in parts.items()}
            for name, parts in self.state(learner)
        }

    def take(self, learner: Learner, state: State) -> None:
        """Go on from there: parts as `blank` has them, or wholes."""
        optimizer, saved = learner.optimizer, dict[int, dict[str, Tensor]]()
        with torch.no_grad():
            for number, (name, parameter, master) in enumerate(ordered(learner)):
                found = {key: local(part_of(part, parameter)) for key, part in state[name].items()}
                value = found.pop("value")
                optimizer.part_of(name).value(master).copy_(value)
                local(parameter).copy_(value)
                saved[number] = {key: part.clone() for key, part in found.items()}
        optimizer.take(saved)

    def _numbers(self, learner: Learner, name: str, master: nn.Parameter) -> tuple[Tensor, dict[str, Tensor]]:
        optimizer = learner.optimizer
        value, moments = optimizer.part_of(name).value(master), optimizer.adam.state.get(master, {})
        nothing = {key: torch.zeros_like(value) for key in MOMENTS[:2]} | {"step": torch.zeros(())}
        return value.detach(), nothing | {key: moments[key] for key in MOMENTS if key in moments}


class Replicated(Strategy):
    """Every rank holds all of it."""


def refuse(strategy: str, what: str, instead: str) -> ConfigError:
    """That a strategy cannot do something."""
    return ConfigError(f"learner.strategy={strategy}: {what}. Write {instead}.")
