"""Settings of agents and training as Python objects, and the run configuration that they stand for.

The fields have the names of Hugging Face's trainers. Each is one or more keys of a run's configuration
(`TrainingConfig.run_settings`), which checks them too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from arborl.agents.context.managed_conversation import ContextPolicy, stateset_context
from arborl.config.algorithm_config import BY_LOSS, PRESETS, settings_read
from arborl.config.config_base import Config, explain
from arborl.errors import ConfigError, did_you_mean
from arborl.models.model_files import read_model_config, resolve

STUB = "stub://"
STUB_RESPONSES = ("Hello! How can I help you?", "I understand. Let me see what I can do.", "Is there anything else?")
MAX_CONTEXT = 4096
"""Default context in tokens of models that support more."""
EVAL_SHARE = 0.1
"""Default share of held-out scenarios."""
ATTENTION = {"eager": "dense", "flex_attention": "kernel"}
Tracker = Literal["none", "tensorboard", "wandb", "mlflow"]


def check_counts(owner: str, **counts: Any) -> None:
    """ConfigError for an argument that is not a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner}, {name}={value!r}: must be a whole number >= 1.")


class MutableConfig(Config):
    """Base of settings whose fields can be assigned. Every wrong value is a `ConfigError`, also on assignment."""

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    def __init__(self, **fields: Any):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from error

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from error

    @property
    def set_fields(self) -> dict[str, Any]:
        """The fields that were set explicitly."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def replace(self, **fields: Any) -> Self:
        """A copy with other values of these fields."""
        return type(self)(**self.set_fields | fields)

    def _explain(self, error: ValidationError) -> str:
        """One line for each error: class, field, requirement, default."""
        lines = explain(error, type(self)).split("\n")
        return "\n".join(f"{type(self).__name__}, {line}{self._default_hint(line)}" for line in lines)

    def _default_hint(self, line: str) -> str:
        field = type(self).model_fields.get(line.partition(":")[0])
        if field is None or field.is_required() or "Did you mean" in line:
            return ""
        default = field.get_default(call_default_factory=True)
        return " Leave it out, or write None." if default is None else f" Default: {default!r}."


class AgentConfig(MutableConfig):
    """Model, system prompt and sampling of an agent.

    Example:
        AgentConfig(model_name="seedling", system_prompt="You are helpful.", temperature=0.8, max_new_tokens=64)
    """

    model_name: str = "seedling"
    """`seedling`, `smollm2`, a folder (also the `model` of a checkpoint), or a Hugging Face id such as `gpt2`."""
    system_prompt: str | None = Field(None, max_length=10_000)
    """Default: the environment's."""
    max_new_tokens: int = Field(64, ge=1, le=8192)
    """Tokens of one reply."""
    temperature: float = Field(1.0, ge=0, le=2)
    """0 is greedy, for use only; training needs a value above 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; training uses the same distribution."""
    top_k: int = Field(0, ge=0, le=1000)
    """Sample from the k most likely tokens; 0 for all."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    max_context: int | None = Field(None, ge=8)
    """Tokens of conversation and reply; default: the model's limit, at most 4,096."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 elsewhere."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "flex_attention", "eager"] = "auto"
    """Attention of the learner. `auto`, `flash_attention_2` and `sdpa`: Arbor's fused kernels for token trees; `eager`:
    plain PyTorch. All give the same result."""
    device_map: str = "auto"
    """`auto`: the GPU if there is one; else a device: `cpu`, `cuda:1`."""
    chat_template: str | None = None
    """As `model.chat_template`."""
    enable_reasoning: bool = False
    """Ask the model to think between `<think>` and `</think>`; only the text behind it is the reply."""
    use_stub_model: bool = False
    """Load no model; reply with `stub_responses` in turn."""
    stub_responses: tuple[str, ...] = STUB_RESPONSES
    enable_context_compression: bool = False
    compression_ratio: float = Field(0.5, gt=0, le=1)
    """Share of the context that is kept, or that triggers a summary (`arborl.agents.context.managed_conversation`)."""
    compression_strategy: Literal["summary", "truncate", "sliding_window"] = "summary"
    seed: int = Field(0, ge=0)
    """Seed of replies in use; training has its own."""

    @model_validator(mode="after")
    def _check_combination(self) -> AgentConfig:
        if self.model_name.startswith(STUB) and not self.use_stub_model:
            raise ValueError(f"model_name={self.model_name} is a stub. Write use_stub_model=True too.")
        if self.use_stub_model and not (self.stub_responses and all(self.stub_responses)):
            raise ValueError("stub_responses: must contain at least one text, and no empty one.")
        compression = {"compression_ratio", "compression_strategy"} & self.model_fields_set
        if compression and not self.enable_context_compression:
            raise ValueError("compression_ratio and compression_strategy: write enable_context_compression=True too.")
        return self

    @property
    def compression_policy(self) -> ContextPolicy | None:
        """How a conversation is compressed that exceeds the context."""
        if not self.enable_context_compression:
            return None
        fields = stateset_context(True, self.compression_ratio, self.compression_strategy)
        return ContextPolicy(kind=fields["policy"], **fields["args"])

    @property
    def context_length(self) -> int:
        """Tokens of conversation and reply."""
        if self.max_context is not None:
            return self.max_context
        model = {} if self.use_stub_model else read_model_config(resolve(self.model_name, "AgentConfig, model_name"))
        return min(int(model.get("max_position_embeddings") or model.get("n_positions") or MAX_CONTEXT), MAX_CONTEXT)

    @property
    def dtype(self) -> str:
        """`torch_dtype`, with `auto` resolved."""
        if self.torch_dtype != "auto":
            return self.torch_dtype
        from arborl.models.model_loading import dtype_of

        return dtype_of("auto", self.device_map)


class TrainingConfig(MutableConfig):
    """Settings of training.

    Example:
        TrainingConfig(num_episodes=400, num_generations=8, learning_rate=5e-6, use_lora=True)
    """

    num_episodes: int = Field(1000, ge=1)
    """Scenarios to play, each by a group of `num_generations`; they repeat if there are fewer."""
    num_epochs: int = Field(1, ge=1)
    """Multiplies `num_episodes`."""
    algorithm: str = "grpo"
    """`grpo`, `gspo`, `ppo`, `dpo`, `a2c`, `trpo`, `gigpo`, `rloo`, …: any of `algorithm.name`."""

    demonstrations: Path | None = None
    """Transcripts to imitate in the first `demonstration_steps` updates: a file of rows `{"messages": [...]}`
    (docs/offline.md), for example from `ConversationEnvironment.transcripts`."""
    demonstration_steps: int = Field(0, ge=0)
    """Updates of imitation, in addition to those of `num_episodes`."""

    learning_rate: float | None = Field(None, gt=0)
    """Default: by the model's size, times `learning_rate_scale`."""
    learning_rate_scale: float = Field(1.0, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_ratio: float = Field(0.1, ge=0, lt=1)
    lr_scheduler: Literal["cosine", "linear", "none"] = "cosine"

    per_device_train_batch_size: int = Field(1, ge=1)
    """Groups in a micro-batch; changes memory and speed, never the result."""
    gradient_accumulation_steps: int = Field(4, ge=1)
    """An update has this many times `per_device_train_batch_size` groups."""
    num_generations: int = Field(16, ge=1)
    """Conversations of one scenario: the group size."""

    max_prompt_length: int | None = Field(None, ge=8)
    """Tokens of a conversation before the reply; default: by the model's context."""
    max_completion_length: int | None = Field(None, ge=1)
    """Tokens of a reply; default: the agent's `max_new_tokens`."""
    temperature: float | None = Field(None, gt=0, le=2)
    """Default: the agent's."""

    clip_range: float | None = Field(None, gt=0, lt=1)
    """Clip of the importance ratio, on both sides."""
    clip_range_left: float | None = Field(None, gt=0, lt=1)
    """Lower clip, if the sides differ."""
    clip_range_right: float | None = Field(None, gt=0)
    kl_penalty: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence from the reference model."""
    entropy_coef: float | None = Field(None, ge=0)
    gamma: float | None = Field(None, ge=0, le=1)
    """Discount per turn, for algorithms that have one."""
    gae_lambda: float | None = Field(None, ge=0, le=1)

    bf16: bool = False
    """Weights in bfloat16 with float32 master copies."""
    fp16: bool = False
    use_lora: bool = False
    """Train LoRA adapters on a frozen model (needs the extra `peft`)."""
    lora_r: int = Field(16, ge=1)
    lora_alpha: float = Field(32.0, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    lora_target_modules: tuple[str, ...] | None = None
    """Names such as `["q_proj", "v_proj"]`; default: every linear layer."""

    eval_steps: int = Field(50, ge=0)
    """Updates between evaluations on held-out scenarios; 0: only before and after."""
    eval_num_generations: int = Field(4, ge=1)
    """Conversations of each held-out scenario."""
    eval_share: float = Field(EVAL_SHARE, ge=0, lt=1)
    """Share of held-out scenarios if the environment has none; at least one of several. 0: no evaluation."""
    save_steps: int = Field(100, ge=1)
    """Updates between checkpoints; the last one is always kept."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints to keep."""
    logging_steps: int = Field(10, ge=1)
    """Updates between lines of the logger `arborl.conversational`; metrics are written at every update."""
    report_to: Tracker | tuple[Tracker, ...] = "none"
    wandb_project: str | None = None

    output_dir: Path | None = None
    """Run folder; default: the next free `runs/<name>-NNN`."""
    resume_from_checkpoint: str | None = None
    """`latest`, a step, or the path of a checkpoint of the run in `output_dir`."""
    seed: int = Field(0, ge=0)
    deterministic: bool = False
    """Episodes depend on the seed alone; slower."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Any other key of a run's configuration: `{"rollout.episode_seconds": 300}`."""

    @model_validator(mode="after")
    def _check_combination(self) -> TrainingConfig:
        if self.algorithm not in PRESETS:
            near = did_you_mean(self.algorithm, PRESETS)
            raise ValueError(f"algorithm={self.algorithm!r}: unknown.{near} Write one of {', '.join(PRESETS)}.")
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both True. Leave one out.")
        if self.learning_rate is not None and self.learning_rate_scale != 1.0:
            raise ValueError(
                f"learning_rate={self.learning_rate:g} and learning_rate_scale={self.learning_rate_scale:g}: the "
                "latter scales the default rate. Leave one out."
            )
        if self.clip_range is not None and (self.clip_range_left or self.clip_range_right):
            raise ValueError("clip_range sets both sides, clip_range_left and clip_range_right one. Leave one out.")
        lora = {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"} & self.model_fields_set
        if lora and not self.use_lora:
            raise ValueError(f"{sorted(lora)[0]} needs adapters. Write use_lora=True too.")
        if (self.demonstrations is None) != (self.demonstration_steps == 0):
            raise ValueError("demonstrations and demonstration_steps: write both, or none.")
        if self.wandb_project is not None and "wandb" not in self.trackers:
            raise ValueError(f"wandb_project={self.wandb_project}: write report_to='wandb' too.")
        return self

    @property
    def trackers(self) -> tuple[str, ...]:
        names = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(name for name in names if name != "none")

    @property
    def groups_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def steps(self) -> int:
        """Updates of the run."""
        return math.ceil(self.num_episodes * self.num_epochs / self.groups_per_step) + self.demonstration_steps

    @classmethod
    def from_profile(cls, profile: str, **fields: Any) -> Any:
        """The settings of a profile, with these fields in place of its own."""
        own = None if cls is TrainingConfig else cls.model_fields["algorithm"].default
        settings = profile_settings(profile, fields.get("algorithm", own))
        if own is not None:
            settings.pop("algorithm", None)
        given = {name for name, others in OTHER_NAMES.items() if any(fields.get(one) is not None for one in others)}
        return cls(**{name: value for name, value in settings.items() if name not in given} | fields)

    def with_profile(self, profile: str) -> Any:
        """These settings, with those of the profile for fields that are not set."""
        return type(self).from_profile(profile, **self.set_fields)

    def run_settings(self, agent: AgentConfig) -> dict[str, Any]:
        """The keys of the run's configuration."""
        max_tokens = min(agent.max_new_tokens, self.max_completion_length or agent.max_new_tokens)
        context = agent.context_length if self.max_prompt_length is None else self.max_prompt_length + max_tokens
        temperature = agent.temperature if self.temperature is None else self.temperature
        if temperature <= 0:
            raise ConfigError("AgentConfig, temperature: training needs a value above 0. Write temperature=1.0.")
        demonstrations = {"path": str(self.demonstrations), "steps": self.demonstration_steps}
        stub = {"name": "scripted", "args": {"replies": list(agent.stub_responses)}}
        settings: dict[str, Any] = {
            "model": self._model(agent),
            "engine": stub if agent.use_stub_model else {},
            "sampling": {
                "temperature": temperature, "top_p": agent.top_p, "top_k": agent.top_k, "stop": list(agent.stop),
                "max_tokens": max_tokens, "max_context": context,
            },
            "rollout": {"tasks_per_step": self.groups_per_step, "group_size": self.num_generations},
            "algorithm": self._algorithm(),
            "learner": self._learner(agent, context),
            "trainer": {"steps": self.steps, "save_every": self.save_steps, "keep": self.save_total_limit},
            "evaluation": {
                "every": self.eval_steps, "group_size": self.eval_num_generations, "greedy": False,
                "sampling": {"temperature": temperature},
            },
            "track": self._track(),
            "demonstrations": {} if self.demonstrations is None else demonstrations,
            "seed": self.seed,
            "deterministic": self.deterministic,
        }  # fmt: skip
        return settings | ({} if self.output_dir is None else {"output_dir": str(self.output_dir)})

    def _model(self, agent: AgentConfig) -> dict[str, Any]:
        dtype = "bfloat16" if self.bf16 else "float16" if self.fp16 else agent.dtype
        if agent.torch_dtype not in ("auto", dtype):
            raise ConfigError(
                f"AgentConfig, torch_dtype={agent.torch_dtype} and TrainingConfig, {'bf16' if self.bf16 else 'fp16'}="
                "True contradict each other. Leave one out."
            )
        name = "seedling" if agent.use_stub_model else agent.model_name
        model: dict[str, Any] = {"name": name, "dtype": dtype, "device": agent.device_map}
        model["chat_template"] = agent.chat_template
        if self.use_lora:
            target = list(self.lora_target_modules or ("all-linear",))
            model["lora"] = {
                "rank": self.lora_r, "alpha": self.lora_alpha, "dropout": self.lora_dropout, "target": target,
            }  # fmt: skip
        return model

    def _algorithm(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "clip_low": self.clip_range if self.clip_range_left is None else self.clip_range_left,
            "clip_high": self.clip_range if self.clip_range_right is None else self.clip_range_right,
            "entropy_coef": self.entropy_coef,
            "gamma": self.gamma,
            "args": {"gae_lambda": self.gae_lambda} if self.gae_lambda is not None else None,
            "kl": {"coef": self.kl_penalty} if self.kl_penalty else None,
        }
        return {"name": self.algorithm} | {name: value for name, value in keys.items() if value is not None}

    def _learner(self, agent: AgentConfig, context: int) -> dict[str, Any]:
        return {
            "lr": self.learning_rate,
            "lr_scale": self.learning_rate_scale,
            "betas": [self.adam_beta1, self.adam_beta2],
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "warmup": self.warmup_ratio,
            "decay": self.lr_scheduler,
            "micro_batch_tokens": self.per_device_train_batch_size * self.num_generations * context,
            "attention": ATTENTION.get(agent.attn_implementation, "auto"),
        }

    def _track(self) -> dict[str, Any]:
        track: dict[str, Any] = {"tensorboard": "tensorboard" in self.trackers}
        args = {"wandb": {"project": self.wandb_project} if self.wandb_project else {}, "mlflow": {}}
        track["trackers"] = [{"name": name, "args": args[name]} for name in args if name in self.trackers]
        return track


class GSPOConfig(TrainingConfig):
    """Settings of GSPO: importance ratios of whole conversations, with a much narrower clip.

    Example:
        GSPOConfig(num_generations=4, num_outer_iterations=100, use_lora=True, lora_r=16)
    """

    algorithm: str = "gspo"
    num_generations: int = Field(4, ge=1)
    clip_range_left: float | None = Field(3e-4, gt=0, lt=1)
    clip_range_right: float | None = Field(4e-4, gt=0)
    beta: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence; another name of `kl_penalty`."""
    num_outer_iterations: int = Field(100, ge=1)
    """Updates."""

    def _algorithm(self) -> dict[str, Any]:
        if self.beta and self.kl_penalty:
            raise ConfigError("GSPOConfig: beta and kl_penalty are the same setting. Leave one out.")
        return super()._algorithm() | ({"kl": {"coef": self.beta}} if self.beta else {})

    @property
    def steps(self) -> int:
        return super().steps if "num_episodes" in self.model_fields_set else self.num_outer_iterations


class ValueFunction(MutableConfig):
    """A value head on the model and GAE per turn (Schulman et al. 2016).

    Example:
        ValueFunction(gamma=0.99, gae_lambda=0.95)
    """

    hidden_size: int | None = Field(None, ge=1)
    """Hidden size of the model; checked if it is set."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """0: one-step temporal difference; 1: Monte-Carlo returns."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the critic; default: ten times the policy's."""
    shared: bool = True
    """A head on the policy; False: a separate model."""

    def compute_advantages(self, rewards: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Advantages and returns of one conversation, per turn (equation 16)."""
        if len(rewards) != len(values):
            raise ValueError(f"{len(rewards)} rewards and {len(values)} values: must be one of each per turn")
        advantages, advantage, next_value = [0.0] * len(rewards), 0.0, 0.0
        for turn in reversed(range(len(rewards))):
            delta = rewards[turn] + self.gamma * next_value - values[turn]
            advantage = delta + self.gamma * self.gae_lambda * advantage
            advantages[turn], next_value = advantage, values[turn]
        return advantages, [a + v for a, v in zip(advantages, values, strict=True)]

    def apply(self, settings: dict[str, Any], agent: AgentConfig) -> None:
        """Write the critic and GAE into the settings of a run."""
        name = "seedling" if agent.use_stub_model else agent.model_name
        model = read_model_config(resolve(name, "AgentConfig, model_name"))
        size = model.get("hidden_size") or model.get("n_embd")
        is_known = size is not None and not agent.use_stub_model
        if self.hidden_size is not None and is_known and self.hidden_size != size:
            raise ConfigError(
                f"ValueFunction, hidden_size={self.hidden_size}: {name} has {size}. Write hidden_size={size}, or leave "
                "it out."
            )
        algorithm = settings["algorithm"]
        written = algorithm | algorithm.get("args", {})
        for key in ("gamma", "gae_lambda"):
            if written.get(key, getattr(self, key)) != getattr(self, key):
                raise ConfigError(
                    f"TrainingConfig, {key}={written[key]} and ValueFunction, {key}={getattr(self, key)} contradict "
                    "each other. Leave one out."
                )
        algorithm |= {"advantage": "gae", "gamma": self.gamma, "args": {"gae_lambda": self.gae_lambda}}
        settings["learner"] |= {"critic": "shared" if self.shared else "separate", "critic_lr": self.learning_rate}


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
"""Sets of settings. `balanced` equals `TrainingConfig()`."""
OTHER_NAMES = {
    "learning_rate_scale": ("learning_rate",),
    "clip_range": ("clip_range_left", "clip_range_right"),
    "kl_penalty": ("beta",),
}
"""Fields that take the place of a field of a profile."""

TASKS: dict[str, dict[str, Any]] = {
    "customer_service": {"num_episodes": 800, "num_generations": 12, "max_completion_length": 256, "kl_penalty": 0.02},
    "technical_support": {"num_episodes": 1000, "num_generations": 16, "max_completion_length": 512},
    "sales": {"num_episodes": 800, "num_generations": 12, "max_completion_length": 256, "entropy_coef": 0.002},
}
"""Settings of domains."""

LORA_BILLIONS = 3.0
"""`get_config_for_task` uses LoRA from this model size on, in billions of parameters."""


def profile_settings(profile: str, algorithm: str | None = None) -> dict[str, Any]:
    """The settings of a profile that apply to this algorithm."""
    if profile not in PROFILES:
        known = ", ".join(PROFILES)
        raise ConfigError(f"profile={profile!r}: must be one of {known}.{did_you_mean(str(profile), PROFILES)}")
    return settings_for(PROFILES[profile], algorithm or str(PROFILES[profile].get("algorithm", "grpo")))


def settings_for(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The settings without those that the algorithm does not read or scales differently (the clip of GSPO)."""
    if algorithm not in PRESETS:
        return dict(settings)  # `TrainingConfig` reports the unknown algorithm
    preset = {"advantage": "grpo", "loss": "ppo"} | PRESETS[algorithm]
    supported, defaults = settings_read(preset), BY_LOSS.get(str(preset["loss"]), {})
    keys = {"clip_range": "clip_low", "kl_penalty": "kl", "entropy_coef": "entropy_coef"}
    return {
        name: value
        for name, value in settings.items()
        if name not in keys or (keys[name] in supported and keys[name] not in defaults)
    }


def get_config_for_task(task: str, model_name: str = "seedling", **fields: Any) -> TrainingConfig:
    """Settings for a domain and a model; with LoRA if the model's name contains a size of 3b or more.

    Example:
        get_config_for_task("customer_service", model_name="mistral-7b").use_lora       # True
    """
    if task not in TASKS:
        known = ", ".join(TASKS)
        near = did_you_mean(str(task), TASKS)
        raise ConfigError(f"get_config_for_task, task={task!r}: must be one of {known}.{near}")
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", model_name.replace("-", " ").replace("_", " "))
    lora = {"use_lora": True} if size is not None and float(size[1]) >= LORA_BILLIONS else {}
    return TrainingConfig(**settings_for(TASKS[task], str(fields.get("algorithm", "grpo"))) | lora | fields)
