"""The conversation as an environment: the user speaks first, every message of the agent is a reply.

A scripted user says the lines of a scenario, in order or shuffled; a simulated one is played by a model. Where a line
says what a good reply mentions, replies are rewarded with their share of 1; rewards of your own may judge the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.envs.conversation.presets import PRESETS
from arborl.envs.conversation.scenario import Line, Persona, Scenario, pairs, read_scenario
from arborl.envs.conversation.user import END, SimulatedUser
from arborl.envs.env import Env, Observation, Step
from arborl.envs.splits import wanted_split
from arborl.seeds import derive, generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image

ORDERS = ("in_order", "random")
EMPTY = "Sorry, I did not get that."
FILLER = ("I understand.", "Can you tell me more?", "Let me check that for you.", "Please wait a moment.", "Goodbye.")


class Conversation(Env):
    """Talk with a user, scripted or simulated.

    Args:
        preset: `customer_service`, `technical_support` or `sales`.
        scenarios: your own instead: a list of scenarios, or the path of a JSON file that holds one. A task that has the
            field `user_responses` is a scenario itself.
        topics: only scenarios about these.
        personas: who the user may be; by default those of the preset.
        order: `in_order`, or `random` (the opening stays; the order follows from the task's seed).
        user: plays the user instead of the script; see `SimulatedUser`.
        system: the system message; by default that of the preset.
        max_turns: the episode is truncated after this many replies.
        format_penalty: reward of an empty reply; the user then says the line again.
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
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r}: give one of {', '.join(PRESETS)}")
        if order not in ORDERS:
            raise ValueError(f"order={order!r}: give one of {', '.join(ORDERS)}")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: give at least 1")
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        base = PRESETS[preset]
        self.scenarios = base.scenarios if scenarios is None else read_scenarios(scenarios)
        if topics:
            self.scenarios = tuple(one for one in self.scenarios if one.topic in topics)
        self.personas = base.personas if personas is None else tuple(map(_persona, personas))
        self.system = base.system if system is None else system
        self.user = None if user is None else SimulatedUser(user)
        self.order, self.max_turns, self.format_penalty = order, max_turns, format_penalty
        self._check(topics)

    def _check(self, topics: Sequence[str]) -> None:
        if not self.scenarios:
            raise ValueError(f"topics={list(topics)}: no scenario is about any of these")
        if not self.personas:
            raise ValueError("personas: give at least one, or leave them out")
        names = [persona.name for persona in self.personas]
        for scenario in self.scenarios:
            if scenario.persona and scenario.persona not in names:
                raise ValueError(
                    f"scenario {scenario.id!r}: no persona {scenario.persona!r}; known: {', '.join(names)}"
                )

    async def reset(self, task: Task, seed: int) -> Observation:
        self.scenario, self.persona = self._draw(task)
        first, *rest = self.scenario.lines
        if self.order == "random":
            rest = [rest[i] for i in generator(task.seed, "lines").permutation(len(rest))]
        self.lines: tuple[Line, ...] = (first, *rest)
        self.at = self.turns = self.valid = self.met = 0
        self.over, self.seed = False, seed
        opening = f"{first.text} {self.persona.manner}".strip()
        self.said: tuple[Message, ...] = (Message("user", opening),)
        return Observation((*self._system(), *self.said), state_key=self.state_key())

    def _draw(self, task: Task) -> tuple[Scenario, Persona]:
        if "user_responses" in task.fields:
            row = {key: task.fields[key] for key in ("topic", "user_responses", "goal") if key in task.fields}
            found = [(read_scenario({"id": task.id, **row}, f"task {task.id}"), persona) for persona in self.personas]
        else:
            split = wanted_split(task, "conversation")
            found = pairs(self.scenarios, self.personas, split)
            if not found:
                raise ValueError(f"one scenario and one persona leave nothing for split {split!r}: give more of either")
        return found[int(generator(task.seed, "conversation").integers(len(found)))]

    def _system(self) -> tuple[Message, ...]:
        return (Message("system", self.system),) if self.system else ()

    async def step(self, action: Message) -> Step:
        reply = action.content.strip()
        line, valid = self.lines[min(self.at, len(self.lines) - 1)], bool(reply)
        scripted = self.user is None
        met = valid and scripted and bool(line.expect) and line.met_by(reply)
        self.turns += 1
        self.valid += valid
        self.met += met
        self.said = (*self.said, Message("assistant", action.content))
        answer = await self._answer() if valid else EMPTY
        if answer is not None:
            self.said = (*self.said, Message("user", answer))
        self.over = answer is None
        return Step(
            Observation(self.said[-1:] if answer is not None else (), state_key=self.state_key()),
            reward=(met / max(self._wanted(), 1)) if valid else self.format_penalty,
            terminated=self.over,
            truncated=not self.over and self.turns >= self.max_turns,
            info={"valid": float(valid), "met": float(met)},
        )

    async def _answer(self) -> str | None:
        """What the user says next; None when they have nothing more to say."""
        if self.user is not None:
            turn = derive(self.seed, "user", self.turns)
            text = await self.user.say(self.scenario, self.persona, self.said, turn)
            return None if END in text or not text else text
        self.at += 1
        return self.lines[self.at].text if self.at < len(self.lines) else None

    def _wanted(self) -> int:
        """Lines that expect something of the reply."""
        return sum(bool(line.expect) for line in self.lines)

    @property
    def max_steps(self) -> int:
        return self.max_turns

    def metrics(self) -> Metrics:
        """`success`: every expectation was met. Without any, the conversation is not judged here: rewards may do so."""
        wanted = self._wanted() if self.user is None else 0
        numbers = {"finished": float(self.over), "valid": self.valid / max(self.turns, 1)}
        if not wanted:
            return {"judged": 0.0, **numbers}
        return {"success": float(self.met == wanted), "met": self.met / wanted, **numbers}

    def oracle(self) -> str | None:
        """A good reply to the present line; unknown where a model plays the user."""
        return None if self.user is not None else self.lines[min(self.at, len(self.lines) - 1)].good_reply

    def random(self, chance: Generator) -> str:
        """A good reply to some line of the conversation, or a filler."""
        replies = [*(line.good_reply for line in self.lines), *FILLER]
        return replies[int(chance.integers(len(replies)))]

    def state_key(self) -> str:
        """What the user has said so far; with a script that is how far it has come."""
        heard = " | ".join(message.content for message in self.said if message.role == "user")
        return f"{self.scenario.id}/{self.persona.name}/{heard}"

    def render(self) -> str:
        names = {"user": "User", "assistant": "Agent"}
        return "\n".join(f"{names[message.role]}: {message.content}" for message in self.said)

    def picture(self) -> Image:
        from arborl.envs.text_picture import write

        return write(self.render(), f"{self.scenario.topic.replace('_', ' ')}: {self.persona.name} user")


def read_scenarios(given: Sequence[Mapping[str, Any] | Scenario] | str) -> tuple[Scenario, ...]:
    """Scenarios from Python, or from a JSON file."""
    if isinstance(given, str):
        return _from_file(given)
    return tuple(read_scenario(one, f"scenarios.{number}") for number, one in enumerate(given))


@lru_cache(maxsize=16)
def _from_file(path: str) -> tuple[Scenario, ...]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"scenarios={path}: no such file; give a list, or a JSON file that holds one")
    rows = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: holds a {type(rows).__name__}; a list of scenarios is wanted")
    return tuple(read_scenario(row, f"{path}, {number}") for number, row in enumerate(rows))


def _persona(given: Mapping[str, str] | Persona) -> Persona:
    return given if isinstance(given, Persona) else Persona(**given)
