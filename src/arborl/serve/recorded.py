"""The model of one episode as a `Source`: a program that calls it over HTTP is recorded as any agent is.

What decides the distribution (temperature, truncation, seeds) is the run's and not the program's: a program that asks
for temperature 0 would play every attempt alike, and there would be nothing to learn from. What decides where an answer
ends (`max_tokens`, `stop`) is the program's, within what the run allows.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from arborl.chat.fit import USUAL_CHARS, cannot_fit, rendered_cannot_fit, tool_text, tools_cannot_fit
from arborl.chat.tokenizer import TextTokenizer
from arborl.errors import ContextFull, EpisodeError, EpisodeLimitReached, MaxTurns
from arborl.rollout.recorder import Recorder
from arborl.serve.memory import Memory
from arborl.serve.source import TOO_LONG, Asked, Piece, Refused, Unavailable
from arborl.serve.speaker import UNRENDERED
from arborl.types import Call, Message, ToolSpec

T = TypeVar("T")
GONE = 410
OVER = "this episode is over: it has its reward, or the program has ended"


class Recorded:
    """The recorder of an episode, asked from outside.

    Args:
        recorder: writes down what is asked and answered.
        most: calls that the program may make.
    """

    name = "policy"

    def __init__(self, recorder: Recorder, most: int):
        self.recorder, self.most = recorder, most
        self.renderer, self.sampling = recorder.renderer, recorder.sampling
        self.context, self.version = recorder.limits.max_context, 0
        self.memory = Memory()
        self.calls = 0
        """Asked so far."""
        self.last: Message | None = None
        """What the model said last."""
        self.over: EpisodeLimitReached | None = None
        """The limit that the last call ran into."""
        self.failed: EpisodeError | None = None
        """What broke, and was not the program's doing."""
        self.broke = asyncio.Event()
        self.closed = False
        self._inside = contextvars.copy_context()
        """Of the episode: its clocks stand still while the engine has a queue, and its spans are around the calls'."""

    def answers_to(self, model: str) -> bool:
        """Programs have a model's name written into them; whichever it is, this one is meant."""
        return True

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], asked: Sequence[Asked]
    ) -> Sequence[RecordedSaying]:
        if any(one.top for one in asked):
            raise Refused("the likeliest tokens are not told here", "top_logprobs")
        full = self._full(messages, tools)
        return [RecordedSaying(self, messages, tools, one, full) for one in asked]

    def _full(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> ContextFull | None:
        """Set where the prompt is far too long. The recorder tokenises in the run's event loop, so it must not be given
        such a prompt."""
        size = sum(len(message.content) for message in messages) + len(tool_text(messages, tools))
        if size <= USUAL_CHARS * self.context:
            return None
        full = ContextFull(f"the messages and tools have {size:,} characters, the context {self.context} tokens")
        text = TextTokenizer(self.renderer.tokenizer)
        if cannot_fit(messages, text, self.context) or tools_cannot_fit(messages, tools, text, self.context):
            return full
        try:
            shown = self.renderer.render(messages, tools)
        except UNRENDERED as error:
            raise Refused(f"the model cannot be shown these messages: {error}", "messages") from error
        return full if rendered_cannot_fit(shown, self.renderer, self.context) else None

    def complete(self, prompt: Sequence[int], asked: Asked) -> RecordedSaying:
        raise Refused("what is recorded are conversations: use /v1/chat/completions or /v1/responses", status=404)

    async def call(self, saying: RecordedSaying) -> Call:
        """One call of the model, in the episode's name."""
        asked = saying.asked
        self._check_open()
        self.calls += 1
        if self.calls > self.most:
            self.over = MaxTurns(f"{self.most} calls of the model are used up")
            raise Refused(f"{self.over} (agent.args.max_calls)", code="max_calls")
        if asked.sampling.drawn != self.sampling.drawn:
            self.recorder.count({"endpoint/overruled": 1.0})
        try:
            call = await self.within(self._ask(saying))
        except ContextFull as full:
            self.over = full
            raise Refused(str(full), "messages", TOO_LONG) from full
        except EpisodeError as error:
            self.fail(error)
            raise Unavailable(f"the model could not answer: {error}", status=500, code="engine_error") from error
        except UNRENDERED as error:
            raise Refused(f"the model cannot be shown these messages: {error}", "messages") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the program has left
                raise
            raise Refused(OVER, code="episode_over", status=GONE) from None
        except RuntimeError as error:
            if not self.closed:
                raise
            raise Refused(OVER, code="episode_over", status=GONE) from error
        self.over, self.last, self.version = None, call.reply, call.completion.version
        return call

    async def _ask(self, saying: RecordedSaying) -> Call:
        if saying.full is not None:
            raise saying.full
        asked, own = saying.asked, saying.asked.sampling
        return await self.recorder.call(
            saying.messages, saying.tools, stop=own.stop_texts, most=own.max_tokens, begins=asked.begins
        )  # fmt: skip

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to, as a part of the episode."""
        return await asyncio.create_task(work, context=self._inside.copy())

    def fail(self, error: EpisodeError) -> None:
        """The episode has failed, whatever the program makes of it."""
        self.failed = self.failed or error
        self.broke.set()

    def _check_open(self) -> None:
        if self.closed:
            raise Refused(OVER, code="episode_over", status=GONE)


class RecordedSaying:
    """One call. It is told when it is there as a whole: nobody looks on while a program is trained."""

    def __init__(
        self,
        source: Recorded,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        asked: Asked,
        full: ContextFull | None = None,
    ):
        self.source, self.messages, self.tools, self.asked, self.full = source, messages, tools, asked, full
        self.prompt: tuple[int, ...] = ()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        call = await self.source.call(self)
        self.prompt, said = tuple(call.prompt), call.completion
        yield Piece(said.tokens, said.logprobs, finish=said.finish, version=said.version)
