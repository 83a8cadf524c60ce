"""How values are estimated, for algorithms that have a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from arborl.conversational.agent import AgentConfig
from arborl.conversational.settings import Settings
from arborl.errors import ConfigError
from arborl.models.model_files import read_model_config, resolve


class ValueFunction(Settings):
    """A head on the model that says what a conversation will still be worth, turn by turn, and GAE over it.

    Example:
        ValueFunction(gamma=0.99, gae_lambda=0.95)
    """

    hidden_size: int | None = Field(None, ge=1)
    """Of the model it reads; looked at, where given, to find a mistake before training does."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount, by turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """0 trusts the estimates, 1 the rewards."""
    learning_rate: float | None = Field(None, gt=0)
    """Of the head; without one, ten times the model's."""
    shared: bool = True
    """A head on the model that is trained, or else a model of its own."""

    def compute_advantages(self, rewards: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Advantages and returns of one conversation, turn by turn (Schulman et al. 2016, equation 16).

        Example:
            ValueFunction(gamma=1.0, gae_lambda=1.0).compute_advantages([0, 1], [0.5, 0.5])    # ([0.5, 0.5], [1, 1])
        """
        if len(rewards) != len(values):
            raise ValueError(f"{len(rewards)} rewards and {len(values)} values: give one of each a turn")
        advantages, after, ahead = [0.0] * len(rewards), 0.0, 0.0
        for turn in reversed(range(len(rewards))):
            surprise = rewards[turn] + self.gamma * ahead - values[turn]
            after = surprise + self.gamma * self.gae_lambda * after
            advantages[turn], ahead = after, values[turn]
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def apply(self, settings: dict[str, Any], agent: AgentConfig) -> None:
        """Write it into a run's settings: advantages then come from it."""
        name = "seedling" if agent.use_stub_model else agent.model_name
        about = read_model_config(resolve(name, "AgentConfig, model_name"))
        size = about.get("hidden_size") or about.get("n_embd")
        if self.hidden_size is not None and size is not None and self.hidden_size != size:
            raise ConfigError(
                f"ValueFunction, hidden_size={self.hidden_size}: {name} has {size}. Write hidden_size={size}, or leave "
                "it out."
            )
        algorithm = settings["algorithm"]
        for key in ("gamma", "gae_lambda"):
            if algorithm.get(key, getattr(self, key)) != getattr(self, key):
                raise ConfigError(
                    f"TrainingConfig, {key}={algorithm[key]} and ValueFunction, {key}={getattr(self, key)}: two "
                    "answers to one question. Leave one out."
                )
        algorithm |= {"advantage": "gae", "gamma": self.gamma, "gae_lambda": self.gae_lambda}
        settings["learner"] |= {"critic": "shared" if self.shared else "separate", "critic_lr": self.learning_rate}
