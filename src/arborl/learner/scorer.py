"""A model and its critic as one module that says what they say about a micro-batch: whoever shards models hooks into
such a module's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.algorithms.token_losses import Said
from arborl.learner.critic import Critic
from arborl.learner.executor import Way
from arborl.learner.packing import MicroBatch
from arborl.learner.score import score
from arborl.types import Sampling


class Scorer(nn.Module):
    """Its call gives tensors alone: hooks look for them there."""

    def __init__(self, policy: PreTrainedModel, critic: Critic | None = None):
        super().__init__()
        self.policy, self.critic = policy, critic
        self.train(policy.training)

    def forward(
        self, batch: MicroBatch, sampling: Sampling, way: Way, value: bool = False, entropy: bool = False
    ) -> tuple[Tensor, ...]:
        """Log-probabilities, entropies and, where so asked, values of the terms."""
        said = score(self.policy, batch, sampling, way, self.critic if value else None, entropy)
        both = (said.logprob_M, said.entropy_M)
        return both if said.value_M is None else (*both, said.value_M)


@dataclass(frozen=True, slots=True)
class Asked:
    """A model that can be asked, however its weights are spread."""

    model: PreTrainedModel
    call: Callable[..., Any]
    """A `Scorer`, or what stands for one."""

    @classmethod
    def plain(cls, model: PreTrainedModel) -> Asked:
        """One that is whole, and here."""
        return cls(model, Scorer(model))

    def __call__(
        self, batch: MicroBatch, sampling: Sampling, way: Way, value: bool = False, entropy: bool = False
    ) -> Said:
        """As `score`."""
        logprob_M, entropy_M, *rest = self.call(batch, sampling, way, value, entropy)
        return Said(logprob_M, entropy_M, rest[0] if rest else None)
