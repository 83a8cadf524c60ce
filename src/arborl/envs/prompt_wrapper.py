"""Prompt templates around observations, and an action pattern for replies.

The wrapped environment and its states do not change; only the text that the agent reads and sends does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from arborl.config.part_config import PromptConfig, template_fields
from arborl.envs.env import Env, Observation, Step, format_answer, parse_answer
from arborl.envs.validation import observation_errors, step_errors
from arborl.envs.wrapper import EnvWrapper, as_async_env, inner_attribute, is_blocking
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator

NO_PROMPT = PromptConfig()
RULES, STATE = "env_instruction", "suffix"


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of an episode that templates can state."""

    turns: int
    """Messages to the environment; its own `max_steps` where that is smaller."""
    reply: int
    """Tokens of one reply."""


def wrap_with_prompt(
    env: Env, prompt: PromptConfig = NO_PROMPT, system: str | None = None, limits: PromptLimits | None = None
) -> Env:
    """The environment with prompt templates; the environment itself where there are none."""
    if not prompt.is_set and not system:
        return env
    return PromptWrapper(env, prompt, system or "", limits or PromptLimits(32, 64))


def prepend_system_prompt(messages: Sequence[Message], system: str) -> tuple[Message, ...]:
    """The messages with `system` before their system messages, joined into one message."""
    if not system:
        return tuple(messages)
    head = list(takewhile(lambda message: message.role == "system", messages))
    text = "\n\n".join([system, *(message.content for message in head if message.content)])
    return (Message("system", text), *messages[len(head) :])


class PromptWrapper(EnvWrapper):
    """See `wrap_with_prompt`."""

    def __init__(self, env: Env, prompt: PromptConfig, system: str, limits: PromptLimits):
        self.env, self.prompt, self.system, self.limits = as_async_env(env), prompt, system, limits
        self.blocking = is_blocking(env)
        self.pattern = re.compile(prompt.action_pattern, re.DOTALL) if prompt.action_pattern is not None else None
        self.placeholders = _placeholders(prompt.observation or "", prompt.system or "")
        self.tagged = bool(inner_attribute(env, "tagged", False))
        self.turns = self.matched = 0
        self.rules = ""

    async def reset(self, task: Task, seed: int) -> Observation:
        observation = await self.env.reset(task, seed)
        if observation_errors("reset()", observation):
            return observation  # the caller reports the errors
        self.turns = self.matched = 0
        messages = observation.messages
        head = list(takewhile(lambda message: message.role == "system", messages))
        rest, env_rules = messages[len(head) :], "\n\n".join(message.content for message in head)
        self.rules = env_rules if self.prompt.instruction is None else self.prompt.instruction
        first, system = "", self.rules
        if self.prompt.system is not None:
            system = self._fill(self.prompt.system)
            first = "" if RULES in self.placeholders else self.rules
        elif RULES in self.placeholders:
            system = ""
        if first and not any(message.role == "user" for message in rest):
            system, first = f"{system}\n\n{first}", ""
        rest = self._apply_template(rest, first)
        opening = (Message("system", system), *rest) if system else rest
        return replace(observation, messages=prepend_system_prompt(opening, self.system))

    def _apply_template(self, messages: tuple[Message, ...], first: str = "") -> tuple[Message, ...]:
        """The messages with the template applied to the last user message, after the text `first`."""
        template = self.prompt.observation
        index = max((n for n, message in enumerate(messages) if message.role == "user"), default=None)
        if index is None or (template is None and not first):
            return messages
        text = messages[index].content
        text = text if template is None else self._fill(template, text)
        message = replace(messages[index], content=f"{first}\n{text}" if first else text)
        return (*messages[:index], message, *messages[index + 1 :])

    def _fill(self, template: str, observation: str = "") -> str:
        env_limit = inner_attribute(self.env, "max_steps")
        turns = self.limits.turns
        turns = min(turns, env_limit) if isinstance(env_limit, int) and env_limit > 0 else turns
        values = {
            "observation": observation,
            "current_observation": observation,
            "turn_idx": self.turns + 1,
            "current_step": self.turns + 1,
            "step_count": self.turns,
            "actions_left": max(turns - self.turns, 0),
            "max_response_length": self.limits.reply,
            RULES: self.rules,
            STATE: self.env.render() if STATE in self.placeholders else "",
        }
        return template.format(**values)

    async def step(self, action: Message) -> Step:
        found = self._find_action(action.content)
        if self.pattern is not None:
            text = "" if found is None else format_answer(found) if self.tagged else found
            action = replace(action, content=text)
        step = await self.env.step(action)
        if step_errors(step):
            return step
        self.turns += 1
        self.matched += found is not None
        info = step.info if self.pattern is None else {**step.info, "matched": float(found is not None)}
        observation = replace(step.observation, messages=self._apply_template(step.observation.messages))
        return replace(step, observation=observation, info=info)

    def _find_action(self, text: str) -> str | None:
        found = self.pattern.search(text) if self.pattern is not None else None
        if found is None:
            return None
        group: int | str = "action" if "action" in found.re.groupindex else found.re.groups
        return None if found[group] is None else str(found[group]).strip()

    def metrics(self) -> Metrics:
        """The environment's metrics, and `matched`: the fraction of replies in which the pattern found an action."""
        matched = {} if self.pattern is None else {"matched": self.matched / max(self.turns, 1)}
        return {**self.env.metrics(), **matched}

    def actions(self) -> list[str]:
        return [text for move in self.env.actions() if (text := self._reply(move)) is not None]

    def oracle(self) -> str | None:
        return self._reply(self.env.oracle())

    def random(self, rng: Generator) -> str | None:
        return self._reply(self.env.random(rng))

    def _reply(self, move: str | None) -> str | None:
        """A reply in which the pattern finds this move; None where none can be constructed."""
        if move is None or self.pattern is None:
            return move
        bare = (parse_answer(move) if self.tagged else None) or move
        candidates = (move, bare, example_reply(self.pattern, bare))
        return next((text for text in candidates if self._find_action(text) == bare), None)

    def snapshot(self) -> Any:
        inner = self.env.snapshot()
        return None if inner is None else (inner, self.turns, self.matched, self.rules)

    def restore(self, snapshot: Any) -> None:
        inner, self.turns, self.matched, self.rules = snapshot
        self.env.restore(inner)


@lru_cache(maxsize=256)
def _placeholders(*templates: str) -> frozenset[str]:
    return frozenset(name for template in templates for name in template_fields(template))


def example_reply(pattern: re.Pattern[str], action: str) -> str:
    """A text that a simple pattern matches: its literal characters, with the action in place of the last group."""
    body = pattern.pattern.removeprefix("^").removesuffix("$")
    groups = list(re.finditer(r"(?<!\\)\((?!\?:)[^()]*\)", body))
    parts, start = [], 0
    for group in groups:
        parts += [_literal(body[start : group.start()]), action if group is groups[-1] else ""]
        start = group.end()
    return "".join([*parts, _literal(body[start:])])


def _literal(pattern: str) -> str:
    return re.sub(r"\\(\W)", r"\1", re.sub(r"\\s\+?", " ", re.sub(r"\\s[*?]", "", pattern)))
