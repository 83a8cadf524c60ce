"""The whole configuration tree. Its defaults are the demo: `arborl train` with no arguments runs `RunConfig()`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.base import Config, spelt_out


class Named(Config):
    """Something chosen by name. A bare string is short for the name."""

    shorthand: ClassVar[str] = "name"

    name: str
    """A short name, or your own as `package.module:attribute`."""


class Part(Named):
    """Something chosen by name, with its own arguments."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that part; checked against its signature."""


class ModelConfig(Named):
    """The policy."""

    name: str = "seedling"
    """`seedling`, `smollm2`, a folder, or a Hugging Face id."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "auto"
    """`auto` takes the GPU where there is one."""


class DataConfig(Config):
    """Where tasks come from. Without a path the environment makes them, from the seed. A bare string is the path."""

    shorthand: ClassVar[str] = "path"

    path: Path | None = None
    """JSON list, JSONL, CSV or Parquet; a row is a task."""
    question: str = "question"
    """Column that holds the problem, as text; a column `messages` in OpenAI's shape is taken before it."""
    evaluation_share: float = Field(0.1, gt=0, lt=1)
    """Share of the rows that is held out, chosen by a hash of the row."""


class EnvConfig(Part):
    """The environment."""

    name: str = "frozen_lake"


class AgentConfig(Part):
    """The agent."""

    name: str = "chat"


class RewardConfig(Part):
    """One reward and its weight."""

    weight: float = 1.0


class EngineConfig(Named):
    """What samples."""

    name: str = "local"
    """`local` (in this process, sharing the learner's weights) or `scripted` (fixed replies)."""
    slots: int = Field(128, ge=1)
    """Sequences whose keys and values `local` keeps; requests beyond them wait their turn."""
    replies: tuple[str, ...] = ()
    """What `scripted` says, at random; without any, the environment's own moves."""


class SamplingConfig(Config):
    """How tokens are drawn in training."""

    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens only; 0 from all. The learner scores under the same distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the fewest tokens that hold this much of the probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens at least this many times as likely as the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion once written, besides the model's own end of turn."""
    max_tokens: int = Field(64, ge=1)
    """Sampled tokens a model call."""
    max_context: int = Field(1024, ge=8)
    """Prompt and completion together; an episode whose next prompt would not fit ends."""


class RolloutConfig(Config):
    """How episodes are played."""

    tasks_per_step: int = Field(16, ge=1)
    group_size: int = Field(8, ge=1)
    """Episodes of one task."""
    concurrency: int = Field(128, ge=1)
    """Episodes in flight."""
    max_turns: int = Field(32, ge=1)
    episode_seconds: float = Field(120.0, gt=0)
    """Deadline of one episode."""
    step_seconds: float = Field(30.0, gt=0)
    """Deadline of one environment step or reward."""


class KLConfig(Config):
    """Penalty for leaving the reference policy (the weights at the start of the run)."""

    coef: float = Field(0.0, ge=0)
    """0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"


class AlgorithmConfig(Config):
    """How reward becomes gradient."""

    shorthand: ClassVar[str] = "name"

    name: Literal["grpo"] = "grpo"
    baseline: Literal["mean", "none"] = "mean"
    """What is taken off an episode's reward: the mean of its group, or nothing."""
    std: Literal["none", "group", "batch"] = "none"
    """What the difference is divided by."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    aggregation: Literal["token", "episode"] = "episode"
    """One vote an episode (its tokens share it), or one vote a token (long episodes then weigh more)."""
    skip_zero_variance: bool = True
    """Leave groups whose episodes all scored alike out of the learner's batch and of the loss's denominator."""
    kl: KLConfig = KLConfig()


class LearnerConfig(Config):
    """How gradients become weights."""

    lr: float | None = Field(None, gt=0)
    """Without one, by the model's size: 6e-4 below 10M parameters (seedling), 1e-5 below 500M, else 1e-6."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which `lr` is reached."""
    decay: Literal["none", "linear"] = "linear"
    """`linear` brings `lr` to nothing at the run's last step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's batch."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps a pass."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tree tokens that go through the model at once; changes memory and speed, never the result."""


class TrainerConfig(Config):
    """The run itself."""

    steps: int = Field(30, ge=1)
    save_every: int = Field(10, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep."""


class EvaluationConfig(Config):
    """Measured before, during and after training, on tasks that are never trained on."""

    tasks: int = Field(200, ge=0)
    """0 turns evaluation off."""
    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates before and after only."""
    temperature: float = Field(1.0, ge=0)
    greedy: bool = True
    """Also report the likeliest token's play."""


class TrackConfig(Config):
    """What is written while training."""

    tensorboard: bool = True
    episodes: bool = True
    """Write every episode to `episodes/`."""
    gifs: int = Field(3, ge=0)
    """Episodes rendered at the end."""


class RunConfig(Config):
    """One run."""

    name: str = "frozen-lake"
    """What the run is called; its folder is named after it."""
    seed: int = Field(0, ge=0)
    """Decides everything random: tasks, sampling, chance in environments. Held-out tasks are the same for all seeds."""
    output_dir: Path | None = None
    """Folder of the run; without it, the next free `runs/<name>-NNN`."""
    deterministic: bool = False
    """Episodes then depend on nothing but the seed: not on concurrency, batch composition or a restart. Slower."""
    threads: int = Field(0, ge=0)
    """CPU threads for the model; 0 leaves torch's choice."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    agent: AgentConfig = AgentConfig()
    tools: tuple[str, ...] = ()
    """Names from the library, or your own as `package.module:attribute`."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="env"),)
    """Each with `name`, `weight` and `args`; their weighted sum is learned from. `env` is the environment's own."""
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    track: TrackConfig = TrackConfig()

    @model_validator(mode="before")
    @classmethod
    def _rows_are_questions(cls, given: Any) -> Any:
        """Rows from a file and no environment named: the environment that asks them."""
        if not isinstance(given, Mapping):
            return given
        data = spelt_out(DataConfig, given.get("data"))
        path = data.get("path") if isinstance(data, Mapping) else getattr(data, "path", None)
        env = spelt_out(EnvConfig, given.get("env", {}))
        if path is None or not isinstance(env, Mapping) or "name" in env:
            return given
        return {**given, "env": {**env, "name": "question"}}

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.algorithm.baseline == "mean" and self.rollout.group_size < 2:
            raise ValueError(
                "rollout.group_size=1 with algorithm.baseline=mean: an episode alone equals its own mean, so every "
                "advantage is 0. Write rollout.group_size=8, or algorithm.baseline=none."
            )
        if self.learner.minibatches > self.rollout.tasks_per_step:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} with rollout.tasks_per_step="
                f"{self.rollout.tasks_per_step}: a minibatch holds whole groups. Write learner.minibatches="
                f"{self.rollout.tasks_per_step} or less."
            )
        if self.sampling.max_tokens >= self.sampling.max_context:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} with sampling.max_context="
                f"{self.sampling.max_context}: no room for a prompt. Write a larger sampling.max_context."
            )
        if self.tools and self.agent.name == "chat":
            raise ValueError("tools are given but agent=chat calls none. Write agent=tool.")
        if self.data.path is None and self.env.name == "question":
            raise ValueError("env=question takes its tasks from a file. Write data.path=FILE.")
        if self.env.name == "question" and [reward.name for reward in self.rewards] == ["env"]:
            raise ValueError(
                "env=question gives no reward of its own. Write rewards=[exact], which compares with the column "
                "`answer`, or your own."
            )
        if self.engine.replies and self.engine.name != "scripted":
            raise ValueError(f"engine.replies are for engine=scripted, not for engine={self.engine.name}.")
        return self
