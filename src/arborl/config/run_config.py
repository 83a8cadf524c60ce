"""`RunConfig`: all sections as one tree, with defaults that depend on other settings; model and sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from arborl.config.algorithm_config import OFFLINE_LOSSES, PRESETS, AlgorithmConfig, KLConfig
from arborl.config.config_base import Config, as_list, expand_shorthand
from arborl.config.consistency import check_run
from arborl.config.data_config import DataConfig, DemonstrationsConfig
from arborl.config.engine_config import EngineConfig, PlacementConfig
from arborl.config.fault_config import FaultsConfig
from arborl.config.part_config import AgentPartConfig, ContextConfig, EnvConfig, NamedConfig, PartConfig, RewardConfig
from arborl.config.rollout_config import RolloutConfig, SamplingConfig
from arborl.config.tool_config import ToolConfig
from arborl.config.training_config import EvaluationConfig, LearnerConfig, TrackConfig, TrainerConfig
from arborl.errors import did_you_mean
from arborl.registry import short_name

__all__ = [
    "AgentPartConfig", "AlgorithmConfig", "ContextConfig", "DataConfig", "DemonstrationsConfig", "EngineConfig",
    "EnvConfig", "EvaluationConfig", "KLConfig", "LearnerConfig", "LoraConfig", "ModelConfig", "NamedConfig",
    "PartConfig", "PlacementConfig", "RewardConfig", "RolloutConfig", "RunConfig", "SamplingConfig", "SandboxConfig",
    "ToolConfig", "TrackConfig", "TrainerConfig", "default_run_name", "folder_name",
]  # fmt: skip


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
    """Arguments of the chat template: `{enable_thinking: false}`. One that it does not read has no effect, with a
    warning; a misspelt one is refused."""
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


class SandboxConfig(Config):
    """Execution of code that the model wrote: the `python` tool, the code agent, `code_tests`. See docs/security.md."""

    allow_unsafe: bool = False
    """Also run the code if this machine cannot isolate it: it can then read and write your files and use the network.
    Without this setting such a run does not start."""


class RunConfig(Config):
    """The settings of a run. The defaults are the demo: `arborl train` without arguments runs them."""

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
    stub: bool = False
    """The same as `--stub`: a few small steps with scripted replies and with stand-ins for what this machine lacks, to
    check the loop."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    agent: AgentPartConfig = AgentPartConfig()
    context: ContextConfig = ContextConfig()
    tools: Annotated[tuple[ToolConfig, ...], BeforeValidator(as_list)] = ()
    """Tools: a name from the library, your own as `package.module:attribute`, `{server: URL}`, `{mcp: {command: […]}}`
    or `{mcp: {url: URL}}`, with limits beside it. See docs/tools.md."""
    rewards: Annotated[tuple[RewardConfig, ...], BeforeValidator(as_list)] = (RewardConfig(name="env"),)
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
    faults: FaultsConfig = FaultsConfig()

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        """Expand `~`, which a shell leaves in `output_dir=~/runs/x`."""
        return value.expanduser() if value is not None else None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: Any) -> Any:
        """Defaults that depend on other settings."""
        if not isinstance(settings, Mapping):
            return settings
        sections: dict[str, dict[str, Any]] = {}
        for key, model in DEPENDENT.items():
            value = expand_shorthand(model, settings.get(key, {}))
            value = value.model_dump(exclude_unset=True) if isinstance(value, Config) else value
            if not isinstance(value, Mapping):
                return settings  # reported by the validation of the section
            sections[key] = dict(value)
        env, data, evaluation = sections["env"], sections["data"], sections["evaluation"]
        filled = {**settings, "name": settings.get("name") or default_run_name(env, data)}
        if _has_rows(data) and not {"name", "_target_"} & env.keys():
            if _loss_name(sections["algorithm"]) in OFFLINE_LOSSES and not settings.get("rewards"):
                data.setdefault("offline", True)
            env["name"] = "question"
        if data.get("offline"):
            filled.setdefault("engine", {"name": "none"})
        if (tasks := _evaluation_tasks(data)) is not None and evaluation.setdefault("tasks", tasks) != tasks:
            given = evaluation["tasks"]
            raise ValueError(
                f"data.sources: evaluation_tasks add up to {tasks}, but evaluation.tasks={given}. Leave one out."
            )
        return {**filled, **{key: section for key, section in sections.items() if section}}

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        check_run(self)
        return self


DEPENDENT: dict[str, type[Config]] = {
    "env": EnvConfig, "data": DataConfig, "algorithm": AlgorithmConfig, "evaluation": EvaluationConfig,
}  # fmt: skip
"""Sections on which defaults depend."""


def _loss_name(algorithm: Mapping[str, Any]) -> str:
    """The loss of the section `algorithm` before validation."""
    return str(algorithm.get("loss") or PRESETS.get(str(algorithm.get("name", "grpo")), {}).get("loss", "ppo"))


def _sources(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sources of the section `data` before validation; invalid ones are left out."""
    sources = data.get("sources")
    inner = [expand_shorthand(DataConfig, one) for one in sources.values()] if isinstance(sources, Mapping) else []
    return [one for one in inner if isinstance(one, Mapping)]


def _has_rows(data: Mapping[str, Any]) -> bool:
    return any(one.get(key) is not None for one in (data, *_sources(data)) for key in ("path", "hub", "rows"))


def _evaluation_tasks(data: Mapping[str, Any]) -> int | None:
    """The sum of `evaluation_tasks` of the sources, if they have it."""
    sources = _sources(data)
    tasks = [one["evaluation_tasks"] for one in sources if isinstance(one.get("evaluation_tasks"), int)]
    return sum(tasks) if tasks and len(tasks) == len(sources) else None


def default_run_name(env: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """A name from the environment, else from the rows."""
    rows = expand_shorthand(PartConfig, data.get("rows"))
    candidates = (
        short_name(str(env.get("name") or env.get("_target_", "").rpartition(".")[2])).replace("_", "-"),
        Path(str(data.get("path") or "")).stem,
        str(data.get("hub") or "").partition(":")[0].rpartition("/")[2],
        short_name(str(rows.get("name", ""))) if isinstance(rows, Mapping) else "",
        "-".join(map(str, list(data.get("sources") or ())[:3])),
    )
    return next((name for text in candidates if (name := folder_name(text))), "frozen-lake")


def folder_name(text: str) -> str:
    """The text as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")
