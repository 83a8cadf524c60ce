"""Settings of a training run in the words of the field's Python trainers, and the run they stand for.

Every field is a key, or several, of a run's own configuration (`as_settings`); whatever those refuse is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from arborl.config.algorithm_config import BY_LOSS, PRESETS, settings_read
from arborl.conversational.agent import AgentConfig
from arborl.conversational.environment import EVAL_SHARE
from arborl.conversational.settings import Settings
from arborl.errors import ConfigError, did_you_mean

Report = Literal["none", "tensorboard", "wandb", "mlflow"]
ATTENTION = {"eager": "dense", "flex_attention": "kernel"}


class TrainingConfig(Settings):
    """How to train.

    Example:
        TrainingConfig(num_episodes=400, num_generations=8, learning_rate=5e-6, use_lora=True)
    """

    num_episodes: int = Field(1000, ge=1)
    """Scenarios that are played, each by a group of `num_generations`; where there are fewer, they come again."""
    num_epochs: int = Field(1, ge=1)
    """Times that number."""
    algorithm: str = "grpo"
    """`grpo`, `gspo`, `ppo`, `dpo`, `a2c`, `trpo`, `gigpo`, `rloo`, …: any of `algorithm.name`."""

    demonstrations: Path | None = None
    """Transcripts that are imitated in the first `demonstration_steps` updates, for a model that has never held such a
    conversation: a file of rows `{"messages": [...]}` (docs/offline.md). `ConversationEnvironment.transcripts` writes
    some."""
    demonstration_steps: int = Field(0, ge=0)
    """Updates before those that `num_episodes` stands for."""

    learning_rate: float | None = Field(None, gt=0)
    """Without one, what suits the model's size, times `learning_rate_scale`."""
    learning_rate_scale: float = Field(1.0, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_ratio: float = Field(0.1, ge=0, lt=1)
    lr_scheduler: Literal["cosine", "linear", "none"] = "cosine"

    per_device_train_batch_size: int = Field(1, ge=1)
    """Groups that go through the model at once; changes memory and speed, never the result."""
    gradient_accumulation_steps: int = Field(4, ge=1)
    """An update learns from this many times `per_device_train_batch_size` groups."""
    num_generations: int = Field(16, ge=1)
    """Conversations of one scenario: the group that they are compared in."""

    max_prompt_length: int | None = Field(None, ge=8)
    """Tokens of a conversation, all turns before the reply; without it what the agent's model takes."""
    max_completion_length: int | None = Field(None, ge=1)
    """Tokens of a reply; without it the agent's `max_new_tokens`."""
    temperature: float | None = Field(None, gt=0, le=2)
    """Without one, the agent's."""

    clip_range: float | None = Field(None, gt=0, lt=1)
    """How far a ratio may go from 1, to either side."""
    clip_range_left: float | None = Field(None, gt=0, lt=1)
    """Downwards, where the sides differ."""
    clip_range_right: float | None = Field(None, gt=0)
    kl_penalty: float = Field(0.0, ge=0)
    """What it costs to leave the model that training began with."""
    entropy_coef: float | None = Field(None, ge=0)
    gamma: float | None = Field(None, ge=0, le=1)
    """Discount by turn, for algorithms that have one."""
    gae_lambda: float | None = Field(None, ge=0, le=1)

    bf16: bool = False
    """Weights in bfloat16, updated through float32 copies."""
    fp16: bool = False
    use_lora: bool = False
    """Train adapters and leave the model's own weights as they are (needs the extra `peft`)."""
    lora_r: int = Field(16, ge=1)
    lora_alpha: float = Field(32.0, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] | None = None
    """Names such as `["q_proj", "v_proj"]`; without any, every linear layer."""

    eval_steps: int = Field(50, ge=0)
    """Updates between measurements on held-out scenarios; 0 measures before and after only."""
    eval_num_generations: int = Field(4, ge=1)
    """Conversations of each held-out scenario."""
    eval_share: float = Field(EVAL_SHARE, ge=0, lt=1)
    """Of the scenarios, held out where the environment has none apart; at least one of several. 0 measures nothing."""
    save_steps: int = Field(100, ge=1)
    """Updates between checkpoints; the last is always kept."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints to keep."""
    logging_steps: int = Field(10, ge=1)
    """Updates between lines in Python's log, by the name `arborl.conversational`; metrics are written at every one."""
    report_to: Report | tuple[Report, ...] = "none"
    wandb_project: str | None = None

    output_dir: Path | None = None
    """Folder of the run; without it, the next free `runs/<name>-NNN`."""
    resume_from_checkpoint: str | None = None
    """`latest`, a step, or a checkpoint's path, of the run in `output_dir`."""
    seed: int = Field(0, ge=0)
    deterministic: bool = False
    """Episodes then depend on nothing but the seed; slower."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Any other key of a run's configuration: `{"rollout.episode_seconds": 300}`."""

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.algorithm not in PRESETS:
            raise ValueError(
                f"algorithm={self.algorithm!r} is not known.{did_you_mean(self.algorithm, PRESETS)} Write one of "
                f"{', '.join(PRESETS)}."
            )
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both True. Leave one out.")
        if self.learning_rate is not None and self.learning_rate_scale != 1.0:
            raise ValueError(
                f"learning_rate={self.learning_rate:g} and learning_rate_scale={self.learning_rate_scale:g}: the "
                "latter is about the usual rate. Leave one out."
            )
        if self.clip_range is not None and (self.clip_range_left or self.clip_range_right):
            raise ValueError(
                "clip_range says both sides, clip_range_left and clip_range_right one each. Leave one out."
            )
        lora = {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"} & self.said
        if lora and not self.use_lora:
            raise ValueError(f"{sorted(lora)[0]} is about adapters. Write use_lora=True too.")
        if (self.demonstrations is None) != (self.demonstration_steps == 0):
            raise ValueError("demonstrations and demonstration_steps belong together. Give both, or none.")
        if self.wandb_project is not None and "wandb" not in self.followers:
            raise ValueError(f"wandb_project={self.wandb_project} is given. Write report_to='wandb' too.")
        return self

    @property
    def followers(self) -> tuple[str, ...]:
        asked = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(name for name in asked if name != "none")

    @property
    def groups(self) -> int:
        """Groups an update learns from."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def steps(self) -> int:
        """Updates of the run."""
        return math.ceil(self.num_episodes * self.num_epochs / self.groups) + self.demonstration_steps

    @classmethod
    def from_profile(cls, profile: str, **fields: Any) -> Any:
        """A profile's settings, and these over them.

        Example:
            TrainingConfig.from_profile("conservative", num_episodes=200)
        """
        return cls(**profile_settings(profile, fields.get("algorithm")) | fields)

    def with_profile(self, profile: str) -> Any:
        """These settings, where they say nothing the profile's."""
        told = {name: getattr(self, name) for name in self.said}
        return type(self)(**profile_settings(profile, told.get("algorithm")) | told)

    def as_settings(self, agent: AgentConfig) -> dict[str, Any]:
        """The run that these stand for: keys of its configuration."""
        reply = min(agent.max_new_tokens, self.max_completion_length or agent.max_new_tokens)
        window = agent.window if self.max_prompt_length is None else self.max_prompt_length + reply
        temperature = agent.temperature if self.temperature is None else self.temperature
        if temperature <= 0:
            raise ConfigError(
                "AgentConfig, temperature: 0 draws nothing, so nothing is learned. Write temperature=1.0."
            )
        settings: dict[str, Any] = {
            "model": self._model(agent),
            "engine": self._engine(agent),
            "sampling": {
                "temperature": temperature, "top_p": agent.top_p, "top_k": agent.top_k, "stop": list(agent.stop),
                "max_tokens": reply, "max_context": window,
            },
            "rollout": {
                "tasks_per_step": self.groups,
                "group_size": self.num_generations,
                "val_envs": {"group_size": self.eval_num_generations},
            },
            "algorithm": self._algorithm(),
            "learner": self._learner(agent, window),
            "trainer": {"steps": self.steps, "save_every": self.save_steps, "keep": self.save_total_limit},
            "evaluation": {"every": self.eval_steps, "temperature": temperature, "greedy": False},
            "track": self._track(),
            "demonstrations": self._demonstrations(),
            "seed": self.seed,
            "deterministic": self.deterministic,
        }  # fmt: skip
        return settings | ({} if self.output_dir is None else {"output_dir": str(self.output_dir)})

    def _model(self, agent: AgentConfig) -> dict[str, Any]:
        dtype = "bfloat16" if self.bf16 else "float16" if self.fp16 else agent.dtype
        if agent.torch_dtype not in ("auto", dtype):
            raise ConfigError(
                f"AgentConfig, torch_dtype={agent.torch_dtype} and TrainingConfig, {'bf16' if self.bf16 else 'fp16'}="
                "True: two answers to one question. Leave one out."
            )
        told: dict[str, Any] = {
            "name": "seedling" if agent.use_stub_model else agent.model_name,
            "dtype": dtype,
            "device": agent.device_map,
            "chat_template": agent.chat_template,
        }
        if self.use_lora:
            target = list(self.lora_target_modules or ("all-linear",))
            told["lora"] = {
                "rank": self.lora_r, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "target": target,
            }  # fmt: skip
        return told

    def _engine(self, agent: AgentConfig) -> dict[str, Any]:
        return {"name": "scripted", "replies": list(agent.stub_responses)} if agent.use_stub_model else {}

    def _algorithm(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "clip_low": self.clip_range if self.clip_range_left is None else self.clip_range_left,
            "clip_high": self.clip_range if self.clip_range_right is None else self.clip_range_right,
            "entropy_coef": self.entropy_coef,
            "gamma": self.gamma,
            "gae_lambda": self.gae_lambda,
            "kl": {"coef": self.kl_penalty} if self.kl_penalty else None,
        }
        return {"name": self.algorithm} | {name: value for name, value in told.items() if value is not None}

    def _learner(self, agent: AgentConfig, window: int) -> dict[str, Any]:
        return {
            "lr": self.learning_rate,
            "lr_scale": self.learning_rate_scale,
            "betas": [self.adam_beta1, self.adam_beta2],
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "warmup_ratio": self.warmup_ratio,
            "decay": self.lr_scheduler,
            "micro_batch_tokens": self.per_device_train_batch_size * self.num_generations * window,
            "attention": ATTENTION.get(agent.attn_implementation, "auto"),
        }

    def _demonstrations(self) -> dict[str, Any]:
        if self.demonstrations is None:
            return {}
        return {"path": str(self.demonstrations), "steps": self.demonstration_steps}

    def _track(self) -> dict[str, Any]:
        told: dict[str, Any] = {"tensorboard": "tensorboard" in self.followers}
        if "wandb" in self.followers:
            told["wandb"] = {"project": self.wandb_project or "arborl"}
        if "mlflow" in self.followers:
            told["mlflow"] = {"uri": "mlruns"}
        return told


# ------------------------------------------------------------------------------------------------ profiles and tasks

PROFILES: dict[str, dict[str, Any]] = {
    "conservative": {
        "learning_rate_scale": 0.2, "num_generations": 32, "gradient_accumulation_steps": 8, "max_grad_norm": 0.5,
        "warmup_ratio": 0.2, "eval_steps": 25, "clip_range": 0.1, "kl_penalty": 0.02,
    },
    "balanced": {},
    "aggressive": {
        "learning_rate_scale": 2.0, "num_generations": 8, "gradient_accumulation_steps": 2, "max_grad_norm": 2.0,
        "warmup_ratio": 0.05, "eval_steps": 100, "clip_range": 0.3, "entropy_coef": 0.002,
    },
    "experimental": {
        "learning_rate_scale": 4.0, "num_generations": 12, "gradient_accumulation_steps": 1, "max_grad_norm": 1.5,
        "warmup_ratio": 0.0, "lr_scheduler": "linear", "eval_steps": 20, "algorithm": "dapo",
    },
}  # fmt: skip
"""Settings that go together. `balanced` is what `TrainingConfig()` is."""

TASKS: dict[str, dict[str, Any]] = {
    "customer_service": {"num_episodes": 800, "num_generations": 12, "max_completion_length": 256, "kl_penalty": 0.02},
    "technical_support": {"num_episodes": 1000, "num_generations": 16, "max_completion_length": 512},
    "sales": {"num_episodes": 800, "num_generations": 12, "max_completion_length": 256, "entropy_coef": 0.002},
}
"""What suits a domain: how long replies are, how many conversations are compared, how far the model may go."""

LARGE = 3.0
"""Billions of parameters from which on adapters are trained, where a name says how many there are."""


def profile_settings(profile: str, algorithm: str | None = None) -> dict[str, Any]:
    """A profile's settings, as far as they are about this algorithm."""
    if profile not in PROFILES:
        known = ", ".join(PROFILES)
        raise ConfigError(f"profile={profile!r}: must be one of {known}.{did_you_mean(str(profile), PROFILES)}")
    return suiting(PROFILES[profile], algorithm or str(PROFILES[profile].get("algorithm", "grpo")))


def suiting(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The settings without those that this algorithm does not read, or has another measure for (GSPO's clipping)."""
    if algorithm not in PRESETS:
        return dict(settings)  # who is given them will say so
    chosen = {"advantage": "grpo", "loss": "ppo"} | PRESETS[algorithm]
    reads = settings_read(chosen)
    own = BY_LOSS.get(str(chosen["loss"]), {})
    read_as = {"clip_range": "clip_low", "kl_penalty": "kl", "entropy_coef": "entropy_coef"}
    return {
        name: value
        for name, value in settings.items()
        if name not in read_as or (read_as[name] in reads and read_as[name] not in own)
    }


def get_config_for_task(task: str, model_name: str = "seedling", **fields: Any) -> TrainingConfig:
    """Settings that suit a domain and a model; adapters where the model's name says that it is a large one.

    Example:
        get_config_for_task("customer_service", model_name="mistral-7b").use_lora       # True
    """
    if task not in TASKS:
        known = ", ".join(TASKS)
        raise ConfigError(
            f"get_config_for_task, task={task!r}: must be one of {known}.{did_you_mean(str(task), TASKS)}"
        )
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", model_name.replace("-", " ").replace("_", " "))
    large = {"use_lora": True} if size is not None and float(size[1]) >= LARGE else {}
    return TrainingConfig(**suiting(TASKS[task], str(fields.get("algorithm", "grpo"))) | large | fields)
