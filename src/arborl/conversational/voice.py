"""Who answers when an agent asks: the model that is being trained, the agent's own, or a list of fixed replies.

All three are the model as any agent sees it (`arborl.agents.Model`), so what an agent is shown in use is made by the
same code as what it was shown in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

from arborl.agents.agent_interface import Model
from arborl.agents.context.managed_conversation import ContextPolicy, ManagedConversation
from arborl.chat.messages import read_messages
from arborl.rollout.recorder import EpisodeLimits, Recorder
from arborl.seeds import derive
from arborl.types import Episode, Message, Metrics, Sampling, Task, ToolSpec

if TYPE_CHECKING:
    from arborl.chat import Renderer
    from arborl.engines import Engine

KEPT = 64
"""Conversations in use whose edits (summaries, say) are kept for their next turn."""


class Voice:
    """One conversation with a model, as far as it has come.

    Args:
        model: answers.
        policy: what is done when the conversation outgrows its window; None for nothing.
    """

    def __init__(self, model: Model, policy: ContextPolicy | None):
        self.model, self.policy = model, policy
        self.heard: tuple[Message, ...] = ()
        self.talk: ManagedConversation | None = None

    def goes_on_to(self, messages: Sequence[Message]) -> bool:
        """Whether these messages are this conversation, and perhaps more of it."""
        return tuple(messages[: len(self.heard)]) == self.heard

    async def say(self, messages: Sequence[Message]) -> Message:
        """The reply to these messages."""
        if self.policy is None:
            return await self.model.chat(messages)
        if self.talk is None or not self.goes_on_to(messages):
            opening = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
            self.talk, self.heard = (
                ManagedConversation(self.model, messages[:opening], self.policy),
                tuple(messages[:opening]),
            )
        for message in messages[len(self.heard) :]:
            if message.role == "assistant":
                self.talk.add(message)
            else:
                self.talk.observe([message])
        self.heard = tuple(messages)
        return await self.talk.sample()

    def close(self) -> None:
        """Count what was edited."""
        if self.talk is not None:
            self.talk.__exit__(None, None, None)


SPEAKING: ContextVar[Voice | None] = ContextVar("speaking", default=None)
"""The conversation of the episode that is being played, where one is."""


class Scripted:
    """Fixed replies, each in its turn: the first to what the user says first, and so on, and then from the start."""

    def __init__(self, replies: Sequence[str]):
        self.replies = tuple(replies)

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
    ) -> Message:
        shown = read_messages(messages, "messages")
        said = sum(message.role == "assistant" for message in shown)
        return Message("assistant", self.replies[said % len(self.replies)])

    def count(self, metrics: Metrics) -> None:
        return None


class Speaker:
    """A model in memory, ready to talk.

    Args:
        engine, renderer: the model.
        sampling: how tokens are drawn.
        max_context: prompt and reply together.
        seed: of all replies.
        policy: as of `Voice`.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        max_context: int,
        seed: int,
        policy: ContextPolicy | None,
    ):
        self.engine, self.renderer, self.sampling, self.policy = engine, renderer, sampling, policy
        self.limits, self.seed = EpisodeLimits(max_context=max_context), seed
        self._numbers = count()
        self._voices: list[Voice] = []

    async def say(self, messages: Sequence[Message]) -> Message:
        """The reply to these messages. Conversations may be interleaved, and asked at once."""
        going_on = [voice for voice in self._voices if voice.goes_on_to(messages)]
        voice = max(going_on, key=lambda voice: len(voice.heard)) if going_on else Voice(self._model(), self.policy)
        self._voices = [other for other in self._voices if other is not voice]  # nobody else goes on with it meanwhile
        try:
            return await voice.say(messages)
        finally:
            if self.policy is not None:
                self._voices = [*self._voices, voice][-KEPT:]

    def _model(self) -> Recorder:
        number = next(self._numbers)
        name, seed = f"conversation-{number}", derive(self.seed, "conversation", number)
        return Recorder(self.engine, self.renderer, self.sampling, self.limits, Episode(name, Task(name), seed=seed))
