"""All sections of a run's configuration as one tree, and the sections of model, sampling and sandbox.

The defaults are the demo: `arborl train` without arguments runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.config_base import Config, StopStrings
from arborl.config.data_config import DataConfig, DemonstrationsConfig
from arborl.config.engine_config import EngineConfig, PlacementConfig
from arborl.config.part_config import AgentPartConfig, ContextConfig, EnvConfig, NamedConfig, RewardConfig
from arborl.config.rollout_config import RolloutConfig
from arborl.config.tool_config import ToolConfig
from arborl.config.training_config import EvaluationConfig, LearnerConfig, TrackConfig, TrainerConfig
from arborl.errors import did_you_mean

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu", "hpu", "xla")


class LoraConfig(Config):
    """LoRA adapters (needs the extra `peft`)."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights. With adapters, only they are trained and saved."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the input of an adapter in training; above 0 gradients are random."""
    target: tuple[str, ...] = ("all-linear",)
    """Layers with adapters: `all-linear`, or names such as `[q_proj, v_proj]`."""


class ModelConfig(NamedConfig):
    """The policy."""

    name: str = "seedling"
    """`seedling`, `smollm2`, a folder, or a Hugging Face id such as `gpt2` or `Qwen/Qwen2.5-0.5B-Instruct`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """`auto` is `bfloat16` on a GPU that supports it, else `float32`; `trpo` uses `float32`. `float16` and `bfloat16`
    are trained with float32 master weights (`learner.master`)."""
    device: str = "auto"
    """`auto` is the GPU if there is one."""
    head: Literal["model", "float32"] = "model"
    """Precision of the output layer in sampling and training: that of the model, or float32."""
    quantize: Literal["none", "4bit"] = "none"
    """`4bit` stores the frozen weights under the adapters in 4 bits (QLoRA; needs bitsandbytes and a GPU)."""
    chat_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template: `{enable_thinking: false}`. Arguments that it does not read are refused."""
    chat_template: str | None = None
    """Chat template instead of the model's: `chatml`, `plain`, a file, or Jinja. A model without a template gets
    `chatml` if its tokenizer has the tokens for it, else `plain`."""
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _check_device(self) -> ModelConfig:
        if self.device.partition(":")[0] not in DEVICES:
            raise ValueError(
                f"device={self.device} is not a device.{did_you_mean(self.device, DEVICES)} Write auto, cpu or cuda."
            )
        if self.quantize != "none" and not self.lora.rank:
            raise ValueError(
                f"quantize={self.quantize} with lora.rank=0: weights in 4 bits cannot be trained. Write "
                "model.lora.rank=16, or model.quantize=none."
            )
        return self


class SamplingConfig(Config):
    """Sampling in training. The learner computes log-probabilities under the same distribution."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this probability relative to the most likely token."""
    stop: StopStrings = ()
    """Stop strings, beside the end-of-turn token of the model."""
    max_tokens: int = Field(64, ge=1)
    """Maximum tokens of a completion."""
    max_context: int = Field(1024, ge=8)
    """Maximum tokens of prompt and completion. An episode ends if its next prompt does not fit."""


class SandboxConfig(Config):
    """Execution of code that the model wrote: the `python` tool, the code agent, `code_tests`. See docs/security.md."""

    allow_unsafe: bool = False
    """Also run the code if this machine cannot isolate it: it can then read and write your files and use the network.
    Without this setting such a run does not start."""


class RunSections(Config):
    """The settings of a run."""

    name: str = ""
    """Name of the run and of its folder. Default: the name of the configuration file (of its folder, if the file is
    called `run`, `config` or `train`), else of the environment, else of the rows."""
    seed: int = Field(0, ge=0)
    """Seed of tasks, sampling and environments. Held-out tasks are the same for all seeds."""
    output_dir: Path | None = None
    """Run folder. Default: the next free `runs/<name>-NNN`."""
    deterministic: bool = False
    """Episodes depend on the seed only, not on concurrency, batch composition or restarts. Slower."""
    threads: int = Field(0, ge=0)
    """CPU threads of torch; 0 for its default."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    agent: AgentPartConfig = AgentPartConfig()
    context: ContextConfig = ContextConfig()
    tools: tuple[ToolConfig, ...] = ()
    """Tools: a name from the library, your own as `package.module:attribute`, `{server: URL}`, `{mcp: {command: […]}}`
    or `{mcp: {url: URL}}`, with limits beside it. See docs/tools.md."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="env"),)
    """Rewards with `name`, `weight` and `args`; the reward of an episode is their weighted sum. `env` is the reward of
    the environment."""
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: TrainerConfig = TrainerConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    track: TrackConfig = TrackConfig()
    sandbox: SandboxConfig = SandboxConfig()
    placement: PlacementConfig = PlacementConfig()

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        """Expand `~`, which a shell leaves in `output_dir=~/runs/x`."""
        return value.expanduser() if value is not None else None
