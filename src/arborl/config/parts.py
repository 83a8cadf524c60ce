"""Parts chosen by name: the sections that a run and each of its sources share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from arborl.config.base import Config


class Named(Config):
    """Something chosen by name. A bare string is short for the name."""

    shorthand: ClassVar[str] = "name"

    name: str
    """A short name, or your own as `package.module:attribute`."""


class Part(Named):
    """Something chosen by name, with its own arguments."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that part; checked against its signature."""

    @model_validator(mode="before")
    @classmethod
    def _from_target(cls, given: Any) -> Any:
        """Hydra's way of writing it: `{_target_: package.module.Class, size: 3}`."""
        if not isinstance(given, Mapping) or "_target_" not in given:
            return given
        module, dot, attribute = str(given["_target_"]).rpartition(".")
        if not dot or "name" in given:
            raise ValueError(f"_target_={given['_target_']} is short for a name. Write _target_: package.module.Class.")
        known = {key: value for key, value in given.items() if key in cls.model_fields}
        own = {key: value for key, value in given.items() if key not in known and key != "_target_"}
        return known | {"name": f"{module}:{attribute}", "args": {**known.get("args", {}), **own}}


class EnvConfig(Part):
    """The environment."""

    name: str = "frozen_lake"


class AgentConfig(Part):
    """The agent."""

    name: str = "chat"
    """`chat`, `tool` (calls tools in the model's own format), `code` (writes code between tags), `react`, or yours."""
    tool_format: str = "auto"
    """How the model writes tool calls: `hermes`, `llama3`, `mistral`, `pythonic`, `qwen_xml`, `react`, `fence`, or your
    own; `auto` is what its chat template shows it."""
    tool_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of the tools that take some, by tool: `agent.tool_args.search.corpus=docs.jsonl`."""


class RewardConfig(Part):
    """One reward and its weight."""

    weight: float = 1.0
