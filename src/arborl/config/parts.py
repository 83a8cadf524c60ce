"""Parts chosen by name: the sections that a run and each of its sources share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.base import Config
from arborl.config.prompt import PromptConfig, Text


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
    prompt: PromptConfig = PromptConfig()


class AgentConfig(Part):
    """The agent."""

    name: str = "chat"
    """`chat`, `tool` (calls tools in the model's own format), `code` (writes code between tags), `react`,
    `endpoint` (a program of others that calls the model over HTTP), or yours."""
    system: Text | None = None
    """A system prompt, or `@FILE`. It stands in front of the system message that the environment or the row has of its
    own, and a blank line between them. An agent of a source, or of `data.agents`, that has none takes the run's."""
    tool_format: str = "auto"
    """How the model writes tool calls: `hermes`, `llama3`, `mistral`, `pythonic`, `qwen_xml`, `react`, `fence`, or your
    own; `auto` is what its chat template shows it."""
    tool_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of the tools that take some, by tool: `agent.tool_args.search.corpus=docs.jsonl`."""


class ContextConfig(Config):
    """What is done about a conversation that outgrows its window, with agent `chat`, `tool`, `code`, `react` or
    `statelm`. A bare string is the policy. See docs/context.md."""

    shorthand: ClassVar[str] = "policy"

    policy: Literal["none", "window", "truncate", "summary"] = "none"
    """`window` shows the latest messages; `truncate` leaves out the oldest; `summary` asks the model for a summary,
    which replaces what came before. None of them drops the system prompt or the newest message of the user."""
    window: int = Field(8, ge=1)
    """With `window`: messages shown besides the system's, and the user's first and newest."""
    compress_at: float = Field(0.75, gt=0, le=1)
    """With `truncate` and `summary`: the share of `sampling.max_context`, room for a reply included, that starts it."""
    compression_ratio: float = Field(0.5, gt=0, le=1)
    """With `truncate`: the share that is left afterwards."""
    train_summaries: bool = True
    """With `summary`: whether the calls that write summaries are trained on."""

    @model_validator(mode="after")
    def _is_read(self) -> ContextConfig:
        fields = type(self).model_fields
        for key, policies in READ_BY.items():
            if self.policy not in policies and getattr(self, key) != fields[key].default:
                raise ValueError(
                    f"{key} is about policy={' and '.join(policies)}, and policy={self.policy}. Leave it out, or write "
                    f"policy={policies[0]}."
                )
        return self


READ_BY = {
    "window": ("window",),
    "compress_at": ("truncate", "summary"),
    "compression_ratio": ("truncate",),
    "train_summaries": ("summary",),
}
"""Which policies read a key."""


class RewardConfig(Part):
    """One reward and its weight."""

    weight: float = 1.0
