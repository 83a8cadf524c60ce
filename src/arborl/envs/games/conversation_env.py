"""A conversation with a scripted or simulated user. The user writes first; every message of the agent is a reply.

A scripted user sends the lines of a scenario, in order or shuffled; a simulated user is a model. A reply that mentions
everything that a line expects earns 1 / (number of lines with expectations).
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Observation, Step, task_split
from arborl.envs.games.conversation_presets import (
    CONVERSATION_CONFIGS,
    PRESETS,
    Persona,
    Scenario,
    UserLine,
    read_scenario,
    split_pairs,
)
from arborl.envs.games.text_game import TextGame, require
from arborl.registry import load
from arborl.seeds import derive, generator
from arborl.tools.core.background_threads import run_in_thread
from arborl.types import Message, Metrics, Role, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image

__all__ = ["CONVERSATION_CONFIGS", "Conversation", "Persona", "Scenario", "SimulatedUser", "UserLine", "read_scenarios"]

ORDERS = ("in_order", "random")
EMPTY = "Sorry, I did not get that."
FILLER = ("I understand.", "Can you tell me more?", "Let me check that for you.", "Please wait a moment.", "Goodbye.")


class Conversation(TextGame):
    """A conversation with a scripted or simulated user.

    Args:
        preset: `customer_service`, `technical_support` or `sales`.
        scenarios: replace the preset's scenarios: a list, or the path of a JSON file with a list. A task with the field
            `user_responses` is a scenario itself.
        topics: use only scenarios with these topics.
        personas: personas of the user; by default those of the preset.
        order: `in_order`, or `random` (the first line stays; the order depends on the task's seed).
        user: a model that replaces the script; see `SimulatedUser`.
        system: the system message; by default that of the preset.
        max_turns: the episode is truncated after this many replies.
        format_penalty: reward of an empty reply; the user then repeats the line.
    """

    blocking = False

    def __init__(
        self,
        preset: str = "customer_service",
        scenarios: Sequence[Mapping[str, Any] | Scenario] | str | None = None,
        topics: Sequence[str] = (),
        personas: Sequence[Mapping[str, str] | Persona] | None = None,
        order: str = "in_order",
        user: Any = None,
        system: str | None = None,
        max_turns: int = 8,
        format_penalty: float = -0.05,
    ):
        require(preset in PRESETS, f"preset={preset!r}: give one of {', '.join(PRESETS)}")
        require(order in ORDERS, f"order={order!r}: give one of {', '.join(ORDERS)}")
        require(max_turns >= 1, f"max_turns={max_turns}: give at least 1")
        self.max_steps, self.format_penalty = max_turns, format_penalty
        self.check_limits()
        base = PRESETS[preset]
        self.scenarios = base.scenarios if scenarios is None else read_scenarios(scenarios)
        if topics:
            self.scenarios = tuple(one for one in self.scenarios if one.topic in topics)
        given = base.personas if personas is None else personas
        self.personas = tuple(one if isinstance(one, Persona) else Persona(**one) for one in given)
        self.system = base.system if system is None else system
        self.user = None if user is None else SimulatedUser(user)
        self.order = order
        require(bool(self.scenarios), f"topics={list(topics)}: no scenario has one of these topics")
        require(bool(self.personas), "personas: give at least one, or omit the key")
        names = [persona.name for persona in self.personas]
        for scenario in self.scenarios:
            known = f"scenario {scenario.id!r}: no persona {scenario.persona!r}; known: {', '.join(names)}"
            require(not scenario.persona or scenario.persona in names, known)

    async def reset(self, task: Task, seed: int) -> Observation:
        self.scenario, self.persona = self._draw(task)
        first, *rest = self.scenario.lines
        if self.order == "random":
            rest = [rest[i] for i in generator(task.seed, "lines").permutation(len(rest))]
        self.lines: tuple[UserLine, ...] = (first, *rest)
        self.line_index = self.turns = self.valid = self.met = 0
        self.over, self.seed = False, seed
        opening = f"{first.text} {self.persona.remark}".strip()
        self.messages: tuple[Message, ...] = (Message("user", opening),)
        system = (Message("system", self.system),) if self.system else ()
        return Observation((*system, *self.messages), state_key=self.state_key())

    def _draw(self, task: Task) -> tuple[Scenario, Persona]:
        if "user_responses" in task.fields:
            row = {key: task.fields[key] for key in ("topic", "user_responses", "goal") if key in task.fields}
            found = [(read_scenario({"id": task.id, **row}, f"task {task.id}"), persona) for persona in self.personas]
        else:
            split = task_split(task, "conversation")
            found = split_pairs(self.scenarios, self.personas, split)
            if not found:
                raise ValueError(f"one scenario and one persona leave nothing for split {split!r}: give more of either")
        return found[int(generator(task.seed, "conversation").integers(len(found)))]

    async def step(self, action: Message) -> Step:
        reply = action.content.strip()
        line, valid = self.lines[min(self.line_index, len(self.lines) - 1)], bool(reply)
        scripted = self.user is None
        met = valid and scripted and bool(line.expect) and line.is_met_by(reply)
        self.turns += 1
        self.valid += valid
        self.met += met
        self.messages = (*self.messages, Message("assistant", action.content))
        user_text = await self._next_user_message() if valid else EMPTY
        if user_text is not None:
            self.messages = (*self.messages, Message("user", user_text))
        self.over = user_text is None
        return Step(
            Observation(self.messages[-1:] if user_text is not None else (), state_key=self.state_key()),
            reward=(met / max(self._num_expectations(), 1)) if valid else self.format_penalty,
            terminated=self.over,
            truncated=not self.over and self.turns >= self.max_steps,
            info={"valid": float(valid), "met": float(met)},
        )

    async def _next_user_message(self) -> str | None:
        if self.user is not None:
            turn = derive(self.seed, "user", self.turns)
            text = await self.user.next_message(self.scenario, self.persona, self.messages, turn)
            return None if END in text or not text else text
        self.line_index += 1
        return self.lines[self.line_index].text if self.line_index < len(self.lines) else None

    def _num_expectations(self) -> int:
        return sum(bool(line.expect) for line in self.lines)

    def metrics(self) -> Metrics:
        """`success`: all expectations are met. Without expectations, `judged` is 0: rewards judge the episode."""
        wanted = self._num_expectations() if self.user is None else 0
        numbers = {"finished": float(self.over), "valid": self.valid / max(self.turns, 1)}
        if not wanted:
            return {"judged": 0.0, **numbers}
        return {"success": float(self.met == wanted), "met": self.met / wanted, **numbers}

    def oracle(self) -> str | None:
        """A good reply to the current line; None with a simulated user."""
        return None if self.user is not None else self.lines[min(self.line_index, len(self.lines) - 1)].good_reply

    def random(self, rng: Generator) -> str:
        replies = [*(line.good_reply for line in self.lines), *FILLER]
        return replies[int(rng.integers(len(replies)))]

    def state_key(self) -> str:
        """Scenario, persona, and all user messages so far."""
        user_texts = " | ".join(message.content for message in self.messages if message.role == "user")
        return f"{self.scenario.id}/{self.persona.name}/{user_texts}"

    def render(self) -> str:
        names = {"user": "User", "assistant": "Agent"}
        return "\n".join(f"{names[message.role]}: {message.content}" for message in self.messages)

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_text_page

        return draw_text_page(self.render(), f"{self.scenario.topic.replace('_', ' ')}: {self.persona.name} user")


def read_scenarios(given: Sequence[Mapping[str, Any] | Scenario] | str) -> tuple[Scenario, ...]:
    if isinstance(given, str):
        return _from_file(given)
    return tuple(read_scenario(one, f"scenarios.{number}") for number, one in enumerate(given))


@lru_cache(maxsize=16)
def _from_file(path: str) -> tuple[Scenario, ...]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"scenarios={path}: no such file; give a list, or a JSON file with a list")
    rows = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: contains a {type(rows).__name__}; write a list of scenarios")
    return tuple(read_scenario(row, f"{path}, {number}") for number, row in enumerate(rows))


END = "[END]"
"""Ends the conversation when a simulated user writes it."""

ChatFunction = Callable[..., Awaitable[Message | str] | Message | str]


class SimulatedUser:
    """A user whose messages are generated by a model.

    Args:
        model: an object with `chat(messages) -> Message`; or such a function, async or plain (run in a thread), that
            returns a message or a text; or `package.module:attribute`. A parameter `seed` is passed if it exists.
    """

    def __init__(self, model: Any):
        if isinstance(model, str):
            model = load(model, "simulated user")
        chat = getattr(model, "chat", model)
        if not callable(chat):
            raise ValueError(f"user={model!r}: give a function of messages, or an object with chat(messages)")
        self.chat: ChatFunction = chat
        self.takes_seed = "seed" in inspect.signature(chat).parameters

    def __deepcopy__(self, memo: Any) -> SimulatedUser:
        """Copies of an environment share the model."""
        return self

    async def next_message(self, scenario: Scenario, persona: Persona, messages: Sequence[Message], seed: int) -> str:
        swapped: dict[str, Role] = {"user": "assistant", "assistant": "user"}
        prompt = [Message("system", user_prompt(scenario, persona))]
        prompt += [replace(message, role=swapped[message.role]) for message in messages]
        call = functools.partial(self.chat, prompt, **({"seed": seed} if self.takes_seed else {}))
        line = call() if inspect.iscoroutinefunction(self.chat) else await run_in_thread(call, "the simulated user")
        if inspect.isawaitable(line):
            line = await line
        text = line.content if isinstance(line, Message) else line
        if not isinstance(text, str):
            raise TypeError(f"the simulated user returned {text!r} ({type(text).__name__}): return a Message or a str")
        return text.strip()


def user_prompt(scenario: Scenario, persona: Persona) -> str:
    parts = [
        f"You play a user who talks with an assistant about {scenario.topic.replace('_', ' ')}.",
        persona.description,
        f"You want: {scenario.goal}" if scenario.goal else f"You began with: {scenario.lines[0].text}",
        f"Say one short thing at a time. When you have what you want, or give up, say {END}.",
    ]
    return " ".join(part for part in parts if part)
