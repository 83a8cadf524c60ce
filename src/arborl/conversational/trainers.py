"""The same run as an object, for those who like to hold one; and GSPO's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from arborl.conversational.agent import MultiTurnAgent
from arborl.conversational.callbacks import Callback
from arborl.conversational.config import TrainingConfig
from arborl.conversational.environment import Environment
from arborl.conversational.training import changed, train
from arborl.conversational.value import ValueFunction
from arborl.errors import ConfigError


class MultiTurnGRPOTrainer:
    """Holds what a run is made of; `train` runs it.

    Args:
        agent, environment: as of `arborl.train`.
        reward_function: what a conversation is worth.
        config: settings.
        value_function: with one, advantages come from its estimates (GAE) instead of the group's mean.

    Example:
        trainer = MultiTurnGRPOTrainer(agent, environment, reward_function=HelpfulnessReward(), config=TrainingConfig())
        trained = await trainer.train(callbacks=[EarlyStoppingCallback(patience=10)])
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment | Any,
        reward_function: Any = None,
        config: TrainingConfig | None = None,
        value_function: ValueFunction | None = None,
        eval_rewards: Sequence[Any] = (),
    ):
        self.agent, self.environment, self.reward_function = agent, environment, reward_function
        self.config, self.value_function = config or TrainingConfig(), value_function
        self.eval_rewards = eval_rewards

    async def train(self, callbacks: Sequence[Callback] = ()) -> Any:
        """The trained agent."""
        return await train(
            self.agent,
            self.environment,
            self.reward_function,
            config=self.config,
            callbacks=callbacks,
            value_function=self.value_function,
            eval_rewards=self.eval_rewards,
        )


class DistributedTrainer(MultiTurnGRPOTrainer):
    """The same on several GPUs of one machine: a learner of as many ranks (`learner.ranks`).

    Args:
        agent, environment, config: as of `MultiTurnGRPOTrainer`.
        reward_fn: what a conversation is worth.
        num_gpus: how many.
        strategy: `ddp`: a copy of the model on each, gradients added up.

    Raises:
        ConfigError: from `train`, where this machine has fewer GPUs.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment | Any,
        reward_fn: Any = None,
        config: TrainingConfig | None = None,
        num_gpus: int = 1,
        strategy: Literal["ddp"] = "ddp",
    ):
        if strategy != "ddp":
            raise ConfigError(f"DistributedTrainer, strategy={strategy!r}: must be one of ddp.")
        if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
            raise ConfigError(f"DistributedTrainer, num_gpus={num_gpus!r}: must be a whole number >= 1. Write 1.")
        super().__init__(agent, environment, reward_fn, _with_ranks(config or TrainingConfig(), num_gpus, strategy))
        self.num_gpus, self.strategy = num_gpus, strategy

    async def train(self, callbacks: Sequence[Callback] = ()) -> Any:
        """The trained agent."""
        count = gpu_count()
        if self.num_gpus > max(count, 1):
            has = f"{count or 'no'} GPU{'s' * (count > 1)}"
            raise ConfigError(
                f"DistributedTrainer, num_gpus={self.num_gpus}: this machine has {has}. Write num_gpus={max(count, 1)}."
            )
        return await super().train(callbacks)


def gpu_count() -> int:
    """GPUs of this machine that torch can use."""
    import torch

    return torch.cuda.device_count()


def _with_ranks(config: TrainingConfig, count: int, strategy: str) -> TrainingConfig:
    """The configuration of a run whose learner has so many ranks."""
    if count == 1:
        return config
    asked = {"learner.strategy": strategy, "learner.ranks": count}
    for key, value in asked.items():
        if config.overrides.get(key, value) != value:
            raise ConfigError(
                f"DistributedTrainer, num_gpus={count}: overrides has {key}={config.overrides[key]!r}. Leave it out."
            )
    return changed(config, {"overrides": {**config.overrides, **asked}})


class GSPOConfig(TrainingConfig):
    """Settings of GSPO: ratios of whole conversations, held much closer to 1 than those of tokens.

    Example:
        GSPOConfig(num_generations=4, num_outer_iterations=100, use_lora=True, lora_r=16)
    """

    algorithm: str = "gspo"
    num_generations: int = Field(4, ge=1)
    clip_range_left: float | None = Field(3e-4, gt=0, lt=1)
    clip_range_right: float | None = Field(4e-4, gt=0)
    beta: float = Field(0.0, ge=0)
    """What it costs to leave the model that training began with; `kl_penalty` by another name."""
    num_outer_iterations: int = Field(100, ge=1)
    """Updates."""

    def _algorithm(self) -> dict[str, Any]:
        if self.beta and self.kl_penalty:
            raise ConfigError("GSPOConfig: beta and kl_penalty are one setting by two names. Leave one out.")
        return super()._algorithm() | ({"kl": {"coef": self.beta}} if self.beta else {})

    @property
    def steps(self) -> int:
        return self.num_outer_iterations if "num_episodes" not in self.said else super().steps


async def train_with_gspo(
    config: GSPOConfig,
    agent: MultiTurnAgent,
    environment: Environment | Any,
    reward_model: Any = None,
    callbacks: Sequence[Callback] = (),
    eval_rewards: Sequence[Any] = (),
) -> Any:
    """Train with GSPO; `reward_model` is what `train` calls `reward_fn`."""
    if not isinstance(config, GSPOConfig):
        raise ConfigError(f"train_with_gspo, config={config!r}: must be a GSPOConfig. Write GSPOConfig(…).")
    return await train(agent, environment, reward_model, config=config, callbacks=callbacks, eval_rewards=eval_rewards)
