"""Parts selected by name: environment and its prompts, agent, context policy, reward.

Prompt templates are texts with fields in braces, as in ROLL: `Turn {turn_idx}: {observation}`. Two braces are a literal
brace. Templates are checked when the configuration is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from arborl.config.config_base import Config, KeysOf, check_args
from arborl.errors import did_you_mean

EVERY_TURN = {
    "observation": "the current observation",
    "turn_idx": "number of the turn, from 1",
    "actions_left": "remaining messages, this one included",
    "max_response_length": "maximum tokens of a reply",
    "env_instruction": "the system message of the environment: its rules",
    "suffix": "the state as the environment renders it",
    "current_observation": "another name for observation",
    "current_step": "another name for turn_idx",
    "step_count": "number of finished turns",
}
"""Fields of a template that is filled in every turn."""
AT_THE_START = {name: EVERY_TURN[name] for name in ("env_instruction", "max_response_length", "actions_left")}
"""Fields of a template that is filled once."""
HISTORY = ("history", "history_length")
MAX_FILE_BYTES = 1_000_000


def _read_prompt(value: Any) -> Any:
    """`@FILE` is replaced by the text of the file; the run stores the text."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    path = Path(value[1:]).expanduser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, too many for a prompt.")
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise ValueError(f"{value}: cannot read {path} ({error.strerror}). Write @ and a file's path.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{value}: {path} is not a text file.") from error
    if text.startswith("@"):
        raise ValueError(f"{value}: its text begins with @, which means a file. Begin it with another letter.")
    return text


def template_fields(template: str) -> list[str]:
    """The names in braces. Raises ValueError if braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _check_template(template: str, known: dict[str, str]) -> str:
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}. Write {{{{ and }}}} for braces that are text.") from error
    for _, name, form, conversion in found:
        if name is None:
            continue
        if name not in known:
            more = " agent=step includes the last steps: agent.args.history_length." if name in HISTORY else ""
            raise ValueError(
                f"unknown field {{{name}}}.{did_you_mean(name, known)}{more} Known: {', '.join(known)}. Write {{{{ and "
                "}} for braces that are text."
            )
        if form or conversion:
            raise ValueError(f"{{{name}…}}: a field is a name alone. Write {{{name}}}.")
    return template


def _check_observation(template: str) -> str:
    _check_template(template, EVERY_TURN)
    if not {"observation", "current_observation"} & {*template_fields(template)}:
        raise ValueError("has no {observation}: the model would not see the environment. Add it.")
    return template


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}. Write one such as <answer>(.*?)</answer>.") from error
    if not pattern:
        raise ValueError("is empty. Write one such as <answer>(.*?)</answer>, or leave it out.")
    return pattern


PromptText = Annotated[str, BeforeValidator(_read_prompt)]
"""A text, or `@FILE`."""
SystemTemplate = Annotated[PromptText, AfterValidator(lambda text: _check_template(text, AT_THE_START))]
ObservationTemplate = Annotated[PromptText, AfterValidator(_check_observation)]
ActionPattern = Annotated[str, AfterValidator(_check_pattern)]


class PromptConfig(Config):
    """Prompt templates around the observations of an environment, and parsing of replies. Texts may be `@FILE`."""

    system: SystemTemplate | None = None
    """System message instead of the environment's. The environment's rules then precede the first observation, or
    replace `{env_instruction}` in a template. Fields: `{env_instruction}`, `{max_response_length}`,
    `{actions_left}`."""
    instruction: PromptText | None = None
    """Rules instead of the environment's; empty for none."""
    observation: ObservationTemplate | None = None
    """Template of every observation: `Turn {turn_idx}:\\n{observation}\\n{actions_left} actions left.` See
    docs/environments.md for all fields."""
    action_pattern: ActionPattern | None = None
    """Regular expression that finds the action in a reply: `<answer>(.*?)</answer>`. The environment gets the group
    `action`, else the last group, else the whole match. A reply without a match is an invalid action."""

    @property
    def is_set(self) -> bool:
        """Whether any key has a value."""
        return any(value is not None for value in self.model_dump().values())


class NamedConfig(Config):
    """A part selected by name. A bare string is the name."""

    shorthand: ClassVar[str] = "name"

    name: str
    """A short name, or your own as `package.module:attribute`."""


class PartConfig(NamedConfig):
    """A part selected by name, with arguments."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the part; checked against its signature."""

    @model_validator(mode="before")
    @classmethod
    def _from_target(cls, data: Any) -> Any:
        """Hydra's notation: `{_target_: package.module.Class, size: 3}`."""
        if not isinstance(data, Mapping) or "_target_" not in data:
            return data
        module, dot, attribute = str(data["_target_"]).rpartition(".")
        if not dot or "name" in data:
            raise ValueError(f"_target_={data['_target_']} is short for a name. Write _target_: package.module.Class.")
        known = {key: value for key, value in data.items() if key in cls.model_fields}
        args = {key: value for key, value in data.items() if key not in known and key != "_target_"}
        return known | {"name": f"{module}:{attribute}", "args": {**known.get("args", {}), **args}}


class EnvConfig(PartConfig):
    """The environment."""

    name: str = "frozen_lake"
    prompt: PromptConfig = PromptConfig()


class AgentPartConfig(PartConfig):
    """The agent."""

    name: str = "chat"
    """`chat`, `tool` (calls tools in the format of the model), `code` (writes code between tags), `react`, `endpoint`
    (an external program that calls the model over HTTP), or your own."""
    system: PromptText | None = None
    """System prompt, or `@FILE`. It precedes the system message of the environment or row, separated by a blank line.
    Agents of sources and of `data.agents` inherit it."""
    tool_format: str = "auto"
    """Format of tool calls: `hermes`, `llama3`, `mistral`, `pythonic`, `qwen_xml`, `react`, `fence`, or your own.
    `auto` detects it from the chat template."""
    tool_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of tools, by tool: `agent.tool_args.search.corpus=docs.jsonl`."""


class ContextArgs(Config):
    """Arguments of single context policies."""

    window: int = Field(8, ge=1)
    """`window`: number of messages beside the system message and the first and newest user message."""
    compress_at: float = Field(0.75, gt=0, le=1)
    """`truncate` and `summary`: compress above this share of `sampling.max_context`, room for a reply included."""
    compression_ratio: float = Field(0.5, gt=0, le=1)
    """`truncate`: share that remains."""
    train_summaries: bool = True
    """`summary`: whether summary calls are trained."""


CONTEXT_ARGS = {
    "none": (),
    "window": ("window",),
    "truncate": ("compress_at", "compression_ratio"),
    "summary": ("compress_at", "train_summaries"),
}
"""Arguments by policy."""


class ContextConfig(Config):
    """Compression of conversations that exceed the context, with agent `chat`, `tool`, `code`, `react` or `statelm`. A
    bare string is the policy. See docs/context.md."""

    shorthand: ClassVar[str] = "policy"

    policy: Literal["none", "window", "truncate", "summary"] = "none"
    """`window` shows the latest messages; `truncate` drops the oldest; `summary` replaces earlier messages by a summary
    that the model writes. The system prompt and the newest user message always stay."""
    args: Annotated[dict[str, Any], KeysOf(ContextArgs)] = Field(default_factory=dict)
    """Arguments of this policy, as listed below."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        policy = info.data.get("policy")
        if policy is None:
            return args

        def unread(name: str) -> str:
            of = [other for other, names in CONTEXT_ARGS.items() if name in names]
            return f"is for policy={' and '.join(of)}, not for policy={policy}. Leave it out, or write policy={of[0]}."

        given = check_args(ContextArgs, args, CONTEXT_ARGS[policy], unread)
        return given.model_dump(include=set(CONTEXT_ARGS[policy]))


class RewardConfig(PartConfig):
    """One reward and its weight."""

    weight: float = 1.0
