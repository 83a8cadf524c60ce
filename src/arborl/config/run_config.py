"""`RunConfig`: the configuration of a run, with defaults that depend on other settings and all consistency checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from arborl.config.algorithm_config import OFFLINE_LOSSES, PRESETS, AlgorithmConfig, KLConfig
from arborl.config.config_base import Config, expand_shorthand
from arborl.config.consistency import check_run
from arborl.config.data_config import DataConfig, DemonstrationsConfig, SourceConfig
from arborl.config.engine_config import EngineConfig, PlacementConfig
from arborl.config.part_config import AgentPartConfig, ContextConfig, EnvConfig, NamedConfig, PartConfig, RewardConfig
from arborl.config.rollout_config import RolloutConfig, tags_as_sources
from arborl.config.run_sections import LoraConfig, ModelConfig, RunSections, SamplingConfig, SandboxConfig
from arborl.config.tool_config import ToolConfig
from arborl.config.training_config import EvaluationConfig, LearnerConfig, TrackConfig, TrainerConfig
from arborl.registry import short_name

__all__ = [
    "AgentPartConfig", "AlgorithmConfig", "ContextConfig", "DataConfig", "DemonstrationsConfig", "EngineConfig",
    "EnvConfig", "EvaluationConfig", "KLConfig", "LearnerConfig", "LoraConfig", "ModelConfig", "NamedConfig",
    "PartConfig", "PlacementConfig", "RewardConfig", "RolloutConfig", "RunConfig", "SamplingConfig", "SandboxConfig",
    "ToolConfig", "TrackConfig", "TrainerConfig", "default_run_name", "folder_name",
]  # fmt: skip


class RunConfig(RunSections):
    """One run."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Defaults that depend on other settings: offline runs, the run's name, the environment, sources of tags."""
        if not isinstance(data, Mapping):
            return data
        data = with_offline(data)
        data = data if data.get("name") else {**data, "name": default_run_name(data)}
        return tags_as_sources(with_question_env(data))

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        check_run(self)
        return self


def with_question_env(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `env=question` if there are rows and no environment is named."""
    env = expand_shorthand(EnvConfig, settings.get("env", {}))
    if not has_rows(settings.get("data")) or not isinstance(env, Mapping) or "name" in env or "_target_" in env:
        return settings
    return {**settings, "env": {**env, "name": "question"}}


def with_offline(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the default of `data.offline`, and `engine=none` if the run is offline."""
    data = expand_shorthand(DataConfig, settings.get("data"))
    written = data if isinstance(data, Mapping) else getattr(data, "model_fields_set", ())
    if "offline" not in written:
        wanted = loss_name(settings.get("algorithm")) in OFFLINE_LOSSES
        if not wanted or not has_rows(data) or settings.get("rewards") or _names_env(settings.get("env")):
            return settings
        update = {"offline": True}
        data = {**data, **update} if isinstance(data, Mapping) else data.model_copy(update=update)
        settings = {**settings, "data": data}
    offline = data["offline"] if isinstance(data, Mapping) else data.offline
    return {**settings, "engine": {"name": "none"}} if offline and "engine" not in settings else settings


def _names_env(value: Any) -> bool:
    env = expand_shorthand(EnvConfig, value)
    return env is not None and not (isinstance(env, Mapping) and not {"name", "_target_"} & env.keys())


def loss_name(value: Any) -> str:
    """The loss of the section `algorithm` before validation."""
    algorithm = expand_shorthand(AlgorithmConfig, value)
    if isinstance(algorithm, AlgorithmConfig):
        return algorithm.loss
    chosen = algorithm if isinstance(algorithm, Mapping) else {}
    return str(chosen.get("loss") or PRESETS.get(str(chosen.get("name", "grpo")), {}).get("loss", "ppo"))


def has_rows(value: Any) -> bool:
    """Whether the section `data`, before or after validation, has rows of its own or of a source."""
    data = expand_shorthand(DataConfig, value)
    if isinstance(data, DataConfig):
        return data.has_rows or any(source.has_rows for source in data.sources.values())
    if not isinstance(data, Mapping):
        return False
    sources = data.get("sources")
    inner = [expand_shorthand(SourceConfig, one) for one in sources.values()] if isinstance(sources, Mapping) else []
    return any(data.get(key) is not None for key in ("path", "hub", "rows")) or any(map(has_rows, inner))


def default_run_name(settings: Mapping[str, Any]) -> str:
    """A name from the environment, else from the rows."""
    env, data = expand_shorthand(EnvConfig, settings.get("env")), expand_shorthand(DataConfig, settings.get("data"))
    sections = [one.model_dump(exclude_unset=True) if isinstance(one, Config) else one for one in (env, data)]
    env, data = (one if isinstance(one, Mapping) else {} for one in sections)
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
