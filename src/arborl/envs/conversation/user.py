"""A user played by a model: the conversation with its roles exchanged, behind a description of whom to play."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arborl.envs.conversation.scenario import Persona, Scenario
from arborl.registry import load
from arborl.tools.threads import in_thread
from arborl.types import Message

END = "[END]"
"""What a simulated user says when they have nothing more to ask."""

Speaks = Callable[..., Awaitable[Message | str] | Message | str]


class SimulatedUser:
    """Asks a model for the user's next line.

    Args:
        model: has `chat(messages) -> Message`, as the model an agent is given has; or is such a function itself, async
            or plain (which runs in a thread), that returns a message or a text; or `package.module:attribute`. One that
            takes `seed` gets one.
    """

    def __init__(self, model: Any):
        if isinstance(model, str):
            model = load(model, "simulated user")
        speaks = getattr(model, "chat", model)
        if not callable(speaks):
            raise ValueError(f"user={model!r}: give a function of messages, or an object with chat(messages)")
        self.speaks: Speaks = speaks
        self.seeded = "seed" in inspect.signature(speaks).parameters

    def __deepcopy__(self, memo: Any) -> SimulatedUser:
        """Shared by copies of an environment: the model behind it is no part of an episode."""
        return self

    async def say(self, scenario: Scenario, persona: Persona, said: Sequence[Message], seed: int) -> str:
        """The next line; whether it ends the conversation is for the caller to see (`END`)."""
        prompt = [Message("system", describe(scenario, persona)), *map(exchanged, said)]
        ask = functools.partial(self.speaks, prompt, **({"seed": seed} if self.seeded else {}))
        line = ask() if inspect.iscoroutinefunction(self.speaks) else await in_thread(ask, "the simulated user")
        if inspect.isawaitable(line):
            line = await line
        text = line.content if isinstance(line, Message) else line
        if not isinstance(text, str):
            raise TypeError(f"the simulated user said {text!r} ({type(text).__name__}): return a Message or a str")
        return text.strip()


def describe(scenario: Scenario, persona: Persona) -> str:
    """Whom to play."""
    parts = [
        f"You play a user who talks with an assistant about {scenario.topic.replace('_', ' ')}.",
        persona.description,
        f"You want: {scenario.goal}" if scenario.goal else f"You began with: {scenario.lines[0].text}",
        f"Say one short thing at a time. When you have what you want, or give up, say {END}.",
    ]
    return " ".join(part for part in parts if part)


def exchanged(message: Message) -> Message:
    """The message as the other side sees it."""
    return Message("user" if message.role == "assistant" else "assistant", message.content)
