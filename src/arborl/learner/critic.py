"""The critic: what the state a token was sampled in is worth. A head on the policy's trunk, or a model of its own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.executor import Way, hidden
from arborl.learner.packing import MicroBatch
from arborl.models.heads import ValueHead
from arborl.models.scalar import Origin


def check_critic(config: LearnerConfig, wanted: bool) -> None:
    """ConfigError where the configuration has another mind than the algorithm about a critic."""
    if wanted and config.critic == "none":
        raise ConfigError("learner.critic=none: the advantage takes values. Write learner.critic=shared or separate.")
    if not wanted and (config.critic in ("shared", "separate") or config.critic_from is not None):
        raise ConfigError("learner.critic: the advantage takes no values. Write learner.critic=auto.")


class Critic(nn.Module):
    """Its value at the start is 0 everywhere, unless it begins as a model that says a number itself.

    Args:
        model: the policy.
        separate: copy the policy's weights into a model of its own; else read the policy's hidden states.
        detach: where the trunk is shared, leave it to the policy's gradient alone.
        origin: what a model of its own begins as, instead of the policy.
    """

    def __init__(self, model: PreTrainedModel, separate: bool, detach: bool = False, origin: Origin | None = None):
        super().__init__()
        self.trunk: PreTrainedModel | None = None
        if origin is not None:
            self.trunk, self.head = origin.trunk, ValueHead(origin.trunk, origin.weight, origin.bias)
        else:
            self.trunk = copy.deepcopy(model) if separate else None
            self.head = ValueHead(model)
        self.detach = detach

    def forward(self, hidden_ME: Tensor, batch: MicroBatch, way: Way) -> Tensor:
        """One value a term. `hidden_ME` are the policy's hidden states at the predicting positions."""
        if self.trunk is not None:
            hidden_ME = hidden(self.trunk, batch, way)
        elif self.detach:
            hidden_ME = hidden_ME.detach()
        return self.head(hidden_ME)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are its own and reach its value; they are what a checkpoint holds of it."""
        reached = {id(p) for p in self.head.parameters()}
        if self.trunk is not None:
            reached |= {id(p) for p in self.trunk.base_model.parameters()}
        return {name: p for name, p in self.named_parameters() if p.requires_grad and id(p) in reached}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Take what `trained` gave."""
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(saved[name])
