"""What the model is told around an environment's own words, and how an action is read out of a reply.

Templates are texts with places in braces, as in ROLL: `Turn {turn_idx}: {observation}`. Two braces are one that is
text. Everything that can be wrong with them is found when the configuration is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from arborl.config.base import Config
from arborl.errors import did_you_mean

EVERY_TURN = {
    "observation": "what the environment says now",
    "turn_idx": "the turn's number, from 1",
    "actions_left": "messages that may still be sent, this one included",
    "max_response_length": "tokens that a reply may have",
    "env_instruction": "what the environment said as the system: its rules",
    "suffix": "the environment's state as it renders it for people",
    "current_observation": "another name for observation",
    "current_step": "another name for turn_idx",
    "step_count": "turns that are over",
}
"""Places of a template that is filled in every turn."""
AT_THE_START = {name: EVERY_TURN[name] for name in ("env_instruction", "max_response_length", "actions_left")}
"""Places of a template that is filled once."""
HISTORY = ("history", "history_length")
LONGEST_FILE = 1_000_000


def _from_file(given: Any) -> Any:
    """`@FILE` is the text of that file, which is what a run remembers."""
    if not isinstance(given, str) or not given.startswith("@"):
        return given
    path = Path(given[1:]).expanduser()
    try:
        if path.stat().st_size > LONGEST_FILE:
            raise ValueError(f"{path} has more than {LONGEST_FILE:,} bytes, which is no prompt.")
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise ValueError(f"{given}: cannot read {path} ({error.strerror}). Write @ and a file's path.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{given}: {path} is not a text file.") from error
    if text.startswith("@"):
        raise ValueError(f"{given}: its text begins with @, which stands for a file. Begin it with another letter.")
    return text


def places(template: str) -> list[str]:
    """The names in braces; ValueError where braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _checked(template: str, known: dict[str, str]) -> str:
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}. Write {{{{ and }}}} for braces that are text.") from error
    for _, name, form, conversion in found:
        if name is None:
            continue
        if name not in known:
            more = " agent=step shows the last steps by itself: agent.args.history_length." if name in HISTORY else ""
            raise ValueError(
                f"unknown place {{{name}}}.{did_you_mean(name, known)}{more} Known: {', '.join(known)}. Write {{{{ and "
                "}} for braces that are text."
            )
        if form or conversion:
            raise ValueError(f"{{{name}…}}: a place is a name alone. Write {{{name}}}.")
    return template


def _observation(template: str) -> str:
    _checked(template, EVERY_TURN)
    if not {"observation", "current_observation"} & {*places(template)}:
        raise ValueError("has no {observation}, so the model would not see the environment. Put it in.")
    return template


def _pattern(given: str) -> str:
    try:
        re.compile(given, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}. Write one such as <answer>(.*?)</answer>.") from error
    if not given:
        raise ValueError("is empty. Write one such as <answer>(.*?)</answer>, or leave it out.")
    return given


Text = Annotated[str, BeforeValidator(_from_file)]
"""A text, or `@FILE`."""
SystemTemplate = Annotated[Text, AfterValidator(lambda text: _checked(text, AT_THE_START))]
ObservationTemplate = Annotated[Text, AfterValidator(_observation)]
ActionPattern = Annotated[str, AfterValidator(_pattern)]


class PromptConfig(Config):
    """How an environment's words are shown and replies to it are read. Texts may be given as `@FILE`."""

    system: SystemTemplate | None = None
    """The system message in place of the environment's, whose rules then stand in front of the first observation, or
    where a template says `{env_instruction}`. Also knows `{max_response_length}` and `{actions_left}`."""
    instruction: Text | None = None
    """The rules in place of the environment's own; empty for none."""
    observation: ObservationTemplate | None = None
    """Around every observation: `Turn {turn_idx}:\\n{observation}\\n{actions_left} actions left.` See
    docs/environments.md for all places."""
    action_pattern: ActionPattern | None = None
    """A regular expression that finds the action in a reply: `<answer>(.*?)</answer>`. The group called `action`, else
    the last one, else all that it matches, is what the environment is told; a reply without is no action."""

    @property
    def says_something(self) -> bool:
        return any(value is not None for value in self.model_dump().values())
