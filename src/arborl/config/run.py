"""The whole configuration tree. Its defaults are the demo: `arborl train` with no arguments runs `RunConfig()`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from arborl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from arborl.config.algorithm import is_own
from arborl.config.algorithm_parts import KLConfig as KLConfig
from arborl.config.base import Config, StopTexts, spelt_out
from arborl.config.data import DataConfig as DataConfig
from arborl.config.data import DemonstrationsConfig as DemonstrationsConfig
from arborl.config.data import SourceConfig
from arborl.config.engine import EngineConfig as EngineConfig
from arborl.config.given import brings_rows, check_given, with_given
from arborl.config.parts import AgentConfig as AgentConfig
from arborl.config.parts import ContextConfig as ContextConfig
from arborl.config.parts import EnvConfig as EnvConfig
from arborl.config.parts import Named as Named
from arborl.config.parts import Part as Part
from arborl.config.parts import RewardConfig as RewardConfig
from arborl.config.placement import PlacementConfig as PlacementConfig
from arborl.config.placement import check_placement
from arborl.config.rollout import RolloutConfig as RolloutConfig
from arborl.config.rollout import tags_as_sources
from arborl.config.sandbox import SandboxConfig
from arborl.config.tools import ToolConfig as ToolConfig
from arborl.config.track import TrackConfig as TrackConfig
from arborl.config.training import EvaluationConfig as EvaluationConfig
from arborl.config.training import LearnerConfig as LearnerConfig
from arborl.config.training import TrainerConfig as TrainerConfig
from arborl.errors import did_you_mean
from arborl.registry import short

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu", "hpu", "xla")


class LoraConfig(Config):
    """Low-rank adapters (needs the extra `peft`)."""

    rank: int = Field(0, ge=0)
    """Of each adapter; 0 trains all weights. With one, only adapters are trained and saved."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On what goes into an adapter while gradients are taken; above 0, gradients then depend on chance."""
    target: tuple[str, ...] = ("all-linear",)
    """Which layers: `all-linear`, or names such as `[q_proj, v_proj]`."""


class ModelConfig(Named):
    """The policy."""

    name: str = "seedling"
    """`seedling`, `smollm2`, a folder, or a Hugging Face id such as `gpt2` or `Qwen/Qwen2.5-0.5B-Instruct`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """`auto` is `bfloat16` on a GPU that has it, else `float32`; a trust region (`trpo`) has `float32`. `float16` and
    `bfloat16` are trained with float32 copies of the weights (`learner.master`)."""
    device: str = "auto"
    """`auto` takes the GPU where there is one."""
    head: Literal["model", "float32"] = "model"
    """Precision of the product that gives the logits: the model's own, or float32, in sampling and training alike."""
    quantize: Literal["none", "4bit"] = "none"
    """`4bit` keeps the frozen weights under the adapters in 4 bits (QLoRA; needs bitsandbytes and a GPU)."""
    chat_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template: `{enable_thinking: false}`. One that it never reads is refused."""
    chat_template: str | None = None
    """In place of the model's own: `chatml`, `plain`, a file, or Jinja. A model that has none is given `chatml` where
    its tokenizer has the tokens for it, else `plain`."""
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _is_a_device(self) -> ModelConfig:
        if self.device.partition(":")[0] not in DEVICES:
            raise ValueError(
                f"device={self.device} is not a device.{did_you_mean(self.device, DEVICES)} Write auto, cpu or cuda."
            )
        return self

    @model_validator(mode="after")
    def _quantized_weights_cannot_be_trained(self) -> ModelConfig:
        if self.quantize != "none" and not self.lora.rank:
            raise ValueError(
                f"quantize={self.quantize} with lora.rank=0: weights in 4 bits cannot be trained. Write "
                "model.lora.rank=16, or model.quantize=none."
            )
        return self


class SamplingConfig(Config):
    """How tokens are drawn in training."""

    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens only; 0 from all. The learner scores under the same distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the fewest tokens that hold this much of the probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens at least this many times as likely as the likeliest."""
    stop: StopTexts = ()
    """Texts that end a completion once written, besides the model's own end of turn."""
    max_tokens: int = Field(64, ge=1)
    """Sampled tokens a model call."""
    max_context: int = Field(1024, ge=8)
    """Prompt and completion together; an episode whose next prompt would not fit ends."""


class RunConfig(Config):
    """One run."""

    name: str = ""
    """What the run is called; its folder is named after it. Without one, the name of the configuration file (of its
    folder, where the file is called `run`, `config` or `train`); else of the environment; else of the rows."""
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
    context: ContextConfig = ContextConfig()
    tools: tuple[ToolConfig, ...] = ()
    """Each a name from the library, your own as `package.module:attribute`, `{server: URL}`, `{mcp: {command: […]}}` or
    `{mcp: {url: URL}}`, with limits beside it; its keys are below. See docs/tools.md."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="env"),)
    """Each with `name`, `weight` and `args`; their weighted sum is learned from. `env` is the environment's own."""
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
    def _home_is_home(cls, given: Path | None) -> Path | None:
        """A shell leaves the `~` of `output_dir=~/runs/x` as it is."""
        return given.expanduser() if given is not None else None

    @model_validator(mode="before")
    @classmethod
    def _tags_are_sources(cls, given: Any) -> Any:
        return tags_as_sources(given) if isinstance(given, Mapping) else given

    @model_validator(mode="before")
    @classmethod
    def _rows_are_questions(cls, given: Any) -> Any:
        """Rows from a file and no environment named: the environment that asks them."""
        if not isinstance(given, Mapping):
            return given
        data = spelt_out(DataConfig, given.get("data"))
        env = spelt_out(EnvConfig, given.get("env", {}))
        if not brings_rows(data) or not isinstance(env, Mapping) or "name" in env or "_target_" in env:
            return given
        return {**given, "env": {**env, "name": "question"}}

    @model_validator(mode="before")
    @classmethod
    def _has_a_name(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("name"):
            return given
        return {**given, "name": named_after(given)}

    @model_validator(mode="before")
    @classmethod
    def _rows_may_be_given(cls, given: Any) -> Any:
        return with_given(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        check_given(self)
        if self.model.dtype == "float16" and self.learner.master == "none":
            raise ValueError(
                "learner.master=none with model.dtype=float16: small gradients and updates would be lost. Write "
                "learner.master=float32, or model.dtype=bfloat16."
            )
        for chosen in (self.algorithm, *self.algorithm.by_source.values()):
            if chosen.compares and self.rollout.group_size < 2:
                raise ValueError(_alone(chosen))
            if self.learner.max_samples_per_trajectory is not None and _needs_every_branch(chosen):
                raise ValueError(
                    f"learner.max_samples_per_trajectory with algorithm.loss={chosen.loss}, which is of whole "
                    f"episodes: leave it out{', or write algorithm.sequence=call' if chosen.loss == 'gspo' else ''}."
                )
        self._check_critic()
        for name in self.algorithm.by_source if self.data.sources else ():
            if name not in self.data.sources:
                near = did_you_mean(name, self.data.sources)
                raise ValueError(f"algorithm.by_source.{name}: no such source.{near} See data.sources.")
        if self.learner.minibatches > self.rollout.tasks_per_step:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} with rollout.tasks_per_step="
                f"{self.rollout.tasks_per_step}: a minibatch holds whole groups. Write learner.minibatches="
                f"{self.rollout.tasks_per_step} or less."
            )
        for name in ("redundancy", "group_seconds"):
            if self.deterministic and getattr(self.rollout, name):
                raise ValueError(
                    f"deterministic=true with rollout.{name}={getattr(self.rollout, name)}: who finishes first depends "
                    f"on the clock. Leave rollout.{name} out, or write deterministic=false."
                )
        if self.sampling.max_tokens >= self.sampling.max_context and not self.data.offline:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} with sampling.max_context="
                f"{self.sampling.max_context}: no room for a prompt. Write a larger sampling.max_context."
            )
        if self.engine.name == "local" and 0 < self.engine.kv_tokens < self.sampling.max_context:
            raise ValueError(
                f"engine.kv_tokens={self.engine.kv_tokens} with sampling.max_context={self.sampling.max_context}: not "
                f"even one sequence would fit. Write engine.kv_tokens={self.sampling.max_context} or more, or 0 for a "
                "share of the memory."
            )
        asked = self.evaluation.max_tokens
        if asked is not None and asked >= self.sampling.max_context:
            raise ValueError(
                f"evaluation.max_tokens={asked} with sampling.max_context={self.sampling.max_context}: no room for a "
                "prompt. Write a larger sampling.max_context."
            )
        if self.env.prompt.says_something and self.data.sources and all(s.env for s in self.data.sources.values()):
            raise ValueError(
                "env.prompt is of the run's own environment, and every source names another. Write "
                f"data.sources.{next(iter(self.data.sources))}.env.prompt, or agent_template and the like of a tag."
            )
        for where, source in self._places():
            self._check_place(where, source)
        self._check_engine()
        check_placement(self)
        return self

    def _check_engine(self) -> None:
        name = self.engine.name
        if name in ("vllm", "http"):
            if self.deterministic:
                raise ValueError(
                    f"deterministic=true with engine={name}: what it rounds depends on what else it samples. Write "
                    "engine=local, or deterministic=false."
                )
            if self.sampling.min_p > 0 and self.sampling.top_p < 1:
                raise ValueError(
                    f"sampling.min_p={self.sampling.min_p:g} with sampling.top_p={self.sampling.top_p:g} and engine="
                    f"{name}: vLLM applies them in the other order. Write one of them, or engine=local."
                )
        if self.track.top_logprobs and (name != "local" or self.placement.engines):
            who = f"engine={name}" if name != "local" else "placement.engines"
            raise ValueError(
                f"track.top_logprobs={self.track.top_logprobs} with {who}, which does not tell them. Write engine=local in this "
                "process, or track.top_logprobs=0."
            )
        if name in ("vllm", "http") and self.model.quantize != "none":
            raise ValueError(
                f"model.quantize={self.model.quantize} with engine={name}: quantised weights are not sent. Write "
                "engine=local, or model.quantize=none."
            )

    @model_validator(mode="after")
    def _may_play_ahead(self) -> RunConfig:
        lag = self.rollout.max_lag
        if self.deterministic and lag:
            raise ValueError(
                f"deterministic=true with rollout.max_lag={lag}: who is trained with whom depends on the clock. Write "
                "rollout.max_lag=0, or deterministic=false."
            )
        if self.data.offline and lag:
            raise ValueError(f"rollout.max_lag={lag} with data.offline, where nothing is played. Leave it out.")
        if lag and self.engine.name == "vllm" and self.engine.sleep_mode:
            raise ValueError(
                f"rollout.max_lag={lag} with engine.sleep_mode: vLLM samples while the learner works. Write "
                "rollout.max_lag=0, or engine.sleep_mode=false."
            )
        return self

    def _check_critic(self) -> None:
        name, critic = self.algorithm.name, self.learner.critic
        chosen = (self.algorithm, *self.algorithm.by_source.values())
        values = any(one.values for one in chosen)
        if not values and any(is_own(one.advantage) for one in chosen):
            return  # whether it wants a critic is known when it is imported
        if values and critic == "none":
            raise ValueError(
                f"learner.critic=none: algorithm={name} needs values. Write learner.critic=shared or separate."
            )
        if not values and critic in ("shared", "separate"):
            raise ValueError(f"learner.critic={critic}: algorithm={name} needs no values. Write learner.critic=auto.")
        if not values and self.learner.critic_from is not None:
            raise ValueError(
                f"learner.critic_from={self.learner.critic_from}: algorithm={name} needs no values. Leave it out, or "
                "write algorithm=ppo."
            )

    def _places(self) -> list[tuple[str, SourceConfig]]:
        """Every source with where it is written, the run's own settings filled in; a run without sources is one."""
        data = self.data
        if not data.sources:
            return [("", SourceConfig(path=data.path, hub=data.hub, rows=data.rows))]
        rows = {"path": data.path, "hub": data.hub} if data.by else {}
        return [
            (f"data.sources.{name}.", source.model_copy(update=rows) if rows else source)
            for name, source in data.sources.items()
        ]

    def _check_place(self, where: str, source: SourceConfig) -> None:
        agent, env = source.agent or self.agent, source.env or self.env
        tools = self.tools if source.tools is None else source.tools
        rewards = self.rewards if source.rewards is None else source.rewards
        if tools and agent.name == "chat" and (source.tools or source.agent or not where):
            raise ValueError(f"{where}tools are given but agent=chat calls none. Write {where}agent=tool.")
        if agent.name == "endpoint" and (tools or agent.system is not None):
            what = f"{where}tools" if tools else f"{where if source.agent else ''}agent.system"
            raise ValueError(f"{what}: with agent=endpoint the program has its own tools and prompts. Leave it out.")
        if source.agent is not None and source.agent.tool_format not in ("auto", self.agent.tool_format):
            raise ValueError(f"{where}agent.tool_format: one model writes calls in one way. Write agent.tool_format.")
        if not source.has_rows and env.name == "question":
            raise ValueError(f"{where}env=question takes its tasks from a file. Write {where or 'data.'}path=FILE.")
        if env.name == "question" and env.prompt.action_pattern is not None:
            raise ValueError(
                f"{where}env.prompt.action_pattern with env=question, which takes every reply as the answer; rewards "
                "read it whole. Leave it out, or let a reward look for the pattern: rewards=[format]."
            )
        judged = not self.data.offline and self.algorithm.loss != "distill"
        if judged and source.has_rows and env.name == "question" and [reward.name for reward in rewards] == ["env"]:
            raise ValueError(
                f"{where}env=question gives no reward of its own. Write {where}rewards=[exact], which compares with "
                "the column `answer`, or your own."
            )
        for key, most in (("max_tokens", self.sampling.max_context - 1), ("max_context", self.sampling.max_context)):
            asked = source.sampling.max_tokens if key == "max_tokens" else source.limits.max_context
            if asked is not None and asked > most:
                raise ValueError(
                    f"{where}{'sampling' if key == 'max_tokens' else 'limits'}.{key}={asked} with "
                    f"sampling.max_context={self.sampling.max_context}. Write a larger sampling.max_context."
                )


def named_after(given: Mapping[str, Any]) -> str:
    """What a run of these settings is called where nobody said.

    Example:
        named_after({"env": "frozen_lake"}), named_after({"data": "sets/gsm8k.jsonl"})     # frozen-lake, gsm8k
    """
    env, data = spelt_out(EnvConfig, given.get("env")), spelt_out(DataConfig, given.get("data"))
    sections = [one.model_dump(exclude_unset=True) if isinstance(one, Config) else one for one in (env, data)]
    env, data = (one if isinstance(one, Mapping) else {} for one in sections)
    rows = spelt_out(Part, data.get("rows"))
    places = (
        short(str(env.get("name") or env.get("_target_", "").rpartition(".")[2])).replace("_", "-"),
        Path(str(data.get("path") or "")).stem,
        str(data.get("hub") or "").partition(":")[0].rpartition("/")[2],
        short(str(rows.get("name", ""))) if isinstance(rows, Mapping) else "",
        "-".join(map(str, list(data.get("sources") or ())[:3])),
    )
    return next((name for text in places if (name := as_name(text))), "frozen-lake")


def as_name(text: str) -> str:
    """The text as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _needs_every_branch(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss adds up an episode's tokens before anything else: a part of them cannot stand for all."""
    return algorithm.loss in ("dpo", "ipo", "kto") or (algorithm.loss == "gspo" and algorithm.sequence == "episode")


def _alone(algorithm: AlgorithmConfig) -> str:
    if algorithm.loss in ("dpo", "ipo"):
        what, instead = f"loss={algorithm.loss}: one episode makes no pair", "algorithm.loss=sft"
    elif algorithm.advantage in ("grpo", "step_reinforce"):
        what = "baseline=mean: an episode alone equals its own mean, so every advantage is 0"
        instead = "algorithm.baseline=none"
    else:
        what = f"advantage={algorithm.advantage}: an episode alone has nothing to be compared with"
        instead = "algorithm.advantage=reinforce"
    return f"rollout.group_size=1 with algorithm.{what}. Write rollout.group_size=8, or {instead}."
