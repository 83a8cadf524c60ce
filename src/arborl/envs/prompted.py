"""An environment in other words: a prompt around what it says, and its action read out of a reply.

The environment itself is as it was, and so are its states; what differs is the text that the agent reads and sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from arborl.config.part_config import PromptConfig, template_fields
from arborl.envs.answers import answer, read_answer
from arborl.envs.env import Env, Observation, Step
from arborl.envs.validation import faults_of_observation, faults_of_step
from arborl.envs.wrapper import PassingEnv, awaited, blocks, word_of
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

NO_PROMPT = PromptConfig()
RULES, STATE = "env_instruction", "suffix"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What prompts may tell of an episode's limits."""

    turns: int
    """Messages to the environment; fewer where it says so itself (`max_steps`)."""
    reply: int
    """Tokens of one."""


def prompted(env: Env, prompt: PromptConfig = NO_PROMPT, system: str | None = None, sizes: Sizes | None = None) -> Env:
    """The environment with these words around its own; as it is, where there are none.

    Args:
        env: plays.
        prompt: templates, and the pattern of an action.
        system: stands in front of the opening's system message.
        sizes: limits that the templates may tell.

    Example:
        prompted(FrozenLake(), PromptConfig(observation="Turn {turn_idx}:\\n{observation}"), "You are a player.")
    """
    if not prompt.is_set and not system:
        return env
    return PromptedEnv(env, prompt, system or "", sizes or Sizes(32, 64))


def opened(messages: Sequence[Message], system: str) -> tuple[Message, ...]:
    """A conversation with a system prompt in front: before what the system says already, as one message."""
    if not system:
        return tuple(messages)
    said = list(takewhile(lambda message: message.role == "system", messages))
    text = "\n\n".join([system, *(message.content for message in said if message.content)])
    return (Message("system", text), *messages[len(said) :])


class PromptedEnv(PassingEnv):
    """An environment in other words; see `prompted`."""

    def __init__(self, env: Env, prompt: PromptConfig, system: str, sizes: Sizes):
        self.env, self.prompt, self.system, self.sizes = awaited(env), prompt, system, sizes
        self.blocking = blocks(env)
        self.pattern = re.compile(prompt.action_pattern, re.DOTALL) if prompt.action_pattern is not None else None
        self.places = _places(prompt.observation or "", prompt.system or "")
        self.tagged = bool(word_of(env, "tagged", False))
        self.turns = self.matched = 0
        self.rules = ""

    # -------------------------------------------------------------------------------------------- what is read

    async def reset(self, task: Task, seed: int) -> Observation:
        observation = await self.env.reset(task, seed)
        if faults_of_observation("reset()", observation):
            return observation  # whoever called it says what is wrong
        self.turns = self.matched = 0
        messages = observation.messages
        head = list(takewhile(lambda message: message.role == "system", messages))
        rest, own = messages[len(head) :], "\n\n".join(message.content for message in head)
        self.rules = own if self.prompt.instruction is None else self.prompt.instruction
        first, system = "", self.rules
        if self.prompt.system is not None:
            system = self._filled(self.prompt.system)
            first = "" if RULES in self.places else self.rules
        elif RULES in self.places:
            system = ""
        if first and not any(message.role == "user" for message in rest):
            system, first = f"{system}\n\n{first}", ""
        shown = self._shown(rest, first)
        opening = (Message("system", system), *shown) if system else shown
        return replace(observation, messages=opened(opening, self.system))

    def _shown(self, messages: tuple[Message, ...], first: str = "") -> tuple[Message, ...]:
        """The messages, the user's latest through the template, and behind the rules where these come first."""
        template = self.prompt.observation
        at = max((n for n, message in enumerate(messages) if message.role == "user"), default=None)
        if at is None or (template is None and not first):
            return messages
        said = messages[at].content
        text = said if template is None else self._filled(template, said)
        told = replace(messages[at], content=f"{first}\n{text}" if first else text)
        return (*messages[:at], told, *messages[at + 1 :])

    def _filled(self, template: str, observation: str = "") -> str:
        own = word_of(self.env, "max_steps")
        most = min(self.sizes.turns, own) if isinstance(own, int) and own > 0 else self.sizes.turns
        known = {
            "observation": observation,
            "current_observation": observation,
            "turn_idx": self.turns + 1,
            "current_step": self.turns + 1,
            "step_count": self.turns,
            "actions_left": max(most - self.turns, 0),
            "max_response_length": self.sizes.reply,
            RULES: self.rules,
            STATE: self.env.render() if STATE in self.places else "",
        }
        return template.format(**known)

    # -------------------------------------------------------------------------------------------- what is said

    async def step(self, action: Message) -> Step:
        found = self._action(action.content)
        told = action if self.pattern is None else replace(action, content=self._told(found))
        step = await self.env.step(told)
        if faults_of_step(step):
            return step
        self.turns += 1
        self.matched += found is not None
        info = step.info if self.pattern is None else {**step.info, "matched": float(found is not None)}
        observation = replace(step.observation, messages=self._shown(step.observation.messages))
        return replace(step, observation=observation, info=info)

    def _action(self, text: str) -> str | None:
        """What the pattern finds in a reply; None where it finds nothing."""
        found = self.pattern.search(text) if self.pattern is not None else None
        if found is None:
            return None
        group: int | str = "action" if "action" in found.re.groupindex else found.re.groups
        return None if found[group] is None else str(found[group]).strip()

    def _told(self, action: str | None) -> str:
        """An action as the environment reads it; none at all is an empty message."""
        if action is None:
            return ""
        return answer(action) if self.tagged else action

    def metrics(self) -> Metrics:
        """The environment's own, and the share of replies in which the pattern found an action."""
        share = {} if self.pattern is None else {"matched": self.matched / max(self.turns, 1)}
        return {**self.env.metrics(), **share}

    # -------------------------------------------------------------------------------------------- players

    def actions(self) -> list[str]:
        return [text for move in self.env.actions() if (text := self._said(move)) is not None]

    def oracle(self) -> str | None:
        return self._said(self.env.oracle())

    def random(self, chance: Generator) -> str | None:
        return self._said(self.env.random(chance))

    def _said(self, move: str | None) -> str | None:
        """A reply in which the pattern finds this move; None where none comes to mind."""
        if move is None or self.pattern is None:
            return move
        bare = (read_answer(move) if self.tagged else None) or move
        return next((text for text in (move, bare, written(self.pattern, bare)) if self._action(text) == bare), None)

    def snapshot(self) -> Any:
        inner = self.env.snapshot()
        return None if inner is None else (inner, self.turns, self.matched, self.rules)

    def restore(self, snapshot: Any) -> None:
        inner, self.turns, self.matched, self.rules = snapshot
        self.env.restore(inner)


@lru_cache(maxsize=256)
def _places(*templates: str) -> frozenset[str]:
    """The names in braces of all of them."""
    return frozenset(name for template in templates for name in template_fields(template))


def written(pattern: re.Pattern[str], action: str) -> str:
    """A text that a simple pattern matches: its own letters, with the action in the place of its last group.

    Example:
        written(re.compile(r"\\[(.*?)\\]"), "Left")      # '[Left]'
    """
    body = pattern.pattern.removeprefix("^").removesuffix("$")
    groups = list(re.finditer(r"(?<!\\)\((?!\?:)[^()]*\)", body))
    parts, at = [], 0
    for group in groups:
        parts += [_letters(body[at : group.start()]), action if group is groups[-1] else ""]
        at = group.end()
    return "".join([*parts, _letters(body[at:])])


def _letters(pattern: str) -> str:
    return re.sub(r"\\(\W)", r"\1", re.sub(r"\\s\+?", " ", re.sub(r"\\s[*?]", "", pattern)))
