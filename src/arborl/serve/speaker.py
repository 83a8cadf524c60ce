"""A model at work as a `Source`: its engine in a thread of its own, heard token by token.

A step of the model holds whoever runs it. In its own thread it holds neither those who connect meanwhile nor those who
are being told their tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from arborl.chat.conversation import messages_exceed, rendered_exceeds, tools_exceed
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import TextTokenizer
from arborl.engines.engine import Engine, TokenListener, Weights
from arborl.engines.engine_requests import check_sampling, read_prompt
from arborl.errors import EngineError
from arborl.serve.memory import Memory
from arborl.serve.source import TOO_LONG, Asked, Likely, Piece, Refused, Saying, Unavailable
from arborl.tools.remote.circuit_breaker import CircuitBreaker
from arborl.types import Completion, Message, Metrics, Sampling, ToolSpec

UNRENDERED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What a template raises over messages that it was not written for."""


class EngineThread(Engine):
    """An engine that works in a thread and event loop of its own; called from any other.

    Args:
        engine: at work nowhere yet.
    """

    def __init__(self, engine: Engine):
        self.engine, self.follows_weights = engine, engine.follows_weights
        self.can_stream = engine.can_stream
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def prepare(self, version: int, sampling: Sampling) -> None:
        """Say which version the engine's weights are, and make now what its first requests would wait for."""

        async def there() -> None:
            await self.engine.load({}, version)
            self.engine.warm_up(sampling)

        asyncio.run_coroutine_threadsafe(there(), self.loop).result()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        more: dict[str, Any] = {"listener": listener} if listener is not None else {}
        return await self._there(self.engine.generate(prompt, sampling, session=session, **more))

    async def load(self, weights: Weights, version: int) -> None:
        await self._there(self.engine.load(weights, version))

    async def close(self) -> None:
        if not self.loop.is_running():
            return
        await self._there(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()

    def metrics(self) -> Metrics:
        return self.engine.metrics()

    @property
    def is_saturated(self) -> bool:
        return self.engine.is_saturated

    async def _there(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class Pipe:
    """Carries what an engine's thread says into the event loop of who listens: one wake-up for all that gathered."""

    def __init__(self, top: int):
        self.top, self.ready = top, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._said: list[tuple[int, float, Likely]] = []
        self._woken = False

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        self._said.append((token, logprob, tuple(top)))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.ready.set)

    def take(self) -> list[tuple[int, float, Likely]]:
        """What was said since the last time."""
        self.ready.clear()
        self._woken = False  # before it is emptied: what comes now is taken now, or wakes again
        said, self._said = self._said, []
        return said


class EngineSaying:
    """One request to an engine."""

    def __init__(self, speaker: Speaker, prompt: tuple[int, ...], sampling: Sampling, asked: Asked):
        self.speaker, self.prompt, self.sampling, self.asked = speaker, prompt, sampling, asked

    async def __aiter__(self) -> AsyncIterator[Piece]:
        engine, breaker = self.speaker.engine, self.speaker.breaker
        await self.speaker.admitted()
        pipe, told = Pipe(self.asked.top), 0
        more: dict[str, Any] = {"listener": pipe} if engine.can_stream else {}
        sampled = asyncio.ensure_future(
            engine.generate(self.prompt, self.sampling, session=self.asked.session, **more)
        )
        sampled.add_done_callback(lambda _: pipe.ready.set())
        try:
            while not sampled.done():
                await pipe.ready.wait()
                if said := pipe.take():
                    told += len(said)
                    yield piece(said, self.asked.top)
            whole = sampled.result()
        except EngineError as error:
            breaker.record_failure()
            raise Unavailable(f"the model could not answer: {error}", status=500, code="engine_error") from error
        except BaseException:
            breaker.cancel()
            raise
        finally:
            sampled.cancel()
        breaker.record_success()
        rest = pipe.take()
        last = piece(rest, self.asked.top)
        if told + len(rest) < len(whole.tokens):  # an engine that does not stream says all at the end
            last = Piece(whole.tokens[told:], whole.logprobs[told:])
        yield replace(last, finish=whole.finish, version=whole.version)


def piece(said: Sequence[tuple[int, float, Likely]], top: int) -> Piece:
    tokens, logprobs, likely = zip(*said, strict=True) if said else ((), (), ())
    return Piece(tokens, logprobs, likely if top else ())


class Speaker:
    """A model with its chat template.

    Args:
        engine, renderer: the model. The engine is called from this event loop.
        vocabulary: ids there are.
        name: what clients call it.
        context: longest prompt and completion together.
        sampling: how tokens are drawn where a request says nothing.
        breaker: counts failures of the engine in a row.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        vocabulary: int,
        name: str,
        context: int,
        sampling: Sampling | None = None,
        breaker: CircuitBreaker | None = None,
    ):
        self.engine, self.renderer, self.vocabulary = engine, renderer, vocabulary
        self.name, self.context = name, context
        self.sampling, self.breaker = sampling or Sampling(), breaker or CircuitBreaker(longest=30.0)
        self.version, self.memory = 0, Memory()

    def answers_to(self, model: str) -> bool:
        return model == self.name

    def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec], asked: Sequence[Asked]) -> Sequence[Saying]:
        renderer, text = self.renderer, TextTokenizer(self.renderer.tokenizer)
        long = f"the messages and tools have more tokens than the context of {self.context}"
        written = [replace(message, role="user") for message in messages]
        if messages_exceed(written, text, self.context) or tools_exceed(messages, tools, text, self.context):
            raise Refused(long, "messages", TOO_LONG)
        try:
            shown = renderer.render(messages, tools)
            if begins := asked[0].begins:
                shown += renderer.escape_reply(begins)
            if rendered_exceeds(shown, renderer, self.context):
                raise Refused(long, "messages", TOO_LONG)
            ids = renderer.encode(shown)
        except UNRENDERED as error:
            raise Refused(f"the model cannot be shown these messages: {error}", "messages") from error
        return [self._begin(ids, one, "messages") for one in asked]

    def complete(self, prompt: Sequence[int], asked: Asked) -> Saying:
        return self._begin(prompt, asked, "prompt")

    def _begin(self, prompt: Sequence[int], asked: Asked, param: str) -> EngineSaying:
        if (room := self.context - len(prompt)) < 1:
            raise Refused(
                f"the prompt has {len(prompt)} tokens and the context {self.context}: no room for an answer", param,
                TOO_LONG,
            )  # fmt: skip
        if asked.top and not self.engine.can_stream:
            raise Refused("this engine does not tell the likeliest tokens", "top_logprobs")
        sampling = replace(asked.sampling, max_tokens=min(asked.sampling.max_tokens, room), stop=self.renderer.stop)
        try:
            read_prompt(prompt, self.vocabulary, self.context)
            check_sampling(sampling)
        except EngineError as error:
            raise Refused(str(error), param) from error
        return EngineSaying(self, tuple(prompt), sampling, asked)

    async def admitted(self) -> None:
        """Return at once, or raise where the engine has failed too often to be asked now."""
        try:
            async with asyncio.timeout(0.02):
                await self.breaker.acquire()
        except TimeoutError as error:
            raise Unavailable("the model has failed several times in a row; it is tried again soon") from error
