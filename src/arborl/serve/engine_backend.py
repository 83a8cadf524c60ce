"""`EngineBackend`: a model served by an engine that runs in its own thread.

A forward pass blocks its thread. In a thread of its own it does not block the event loop of the HTTP server.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from arborl.chat.conversation import messages_exceed, rendered_exceeds, tools_exceed
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import TextTokenizer
from arborl.engines.engine import Engine, TokenListener, Weights
from arborl.engines.engine_requests import read_prompt
from arborl.errors import EngineError, SchemaError
from arborl.retry import CircuitBreaker
from arborl.serve.model_backend import (
    CONTEXT_LENGTH_EXCEEDED,
    TEMPLATE_ERRORS,
    GenerationRequest,
    ReplyCache,
    RequestError,
    ServiceUnavailable,
    TokenChunk,
    TokenStream,
    TopLogprobs,
)
from arborl.types import Completion, Message, Metrics, Sampling, ToolSpec

Token = tuple[int, float, TopLogprobs]  # id, log-probability, most likely tokens


class EngineThread(Engine):
    """An engine with its own thread and event loop, callable from any other event loop."""

    def __init__(self, engine: Engine):
        self.engine, self.follows_weights = engine, engine.follows_weights
        self.can_stream = engine.can_stream
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    def prepare(self, version: int, sampling: Sampling) -> None:
        """Set the policy version and warm the engine up."""

        async def warm_up() -> None:
            await self.engine.load({}, version)
            self.engine.warm_up(sampling)

        asyncio.run_coroutine_threadsafe(warm_up(), self.loop).result()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        more: dict[str, Any] = {} if listener is None else {"listener": listener}
        completion: Completion = await self._call(self.engine.generate(prompt, sampling, session=session, **more))
        return completion

    def check_request(self, sampling: Sampling) -> None:
        self.engine.check_request(sampling)

    async def load(self, weights: Weights, version: int) -> None:
        await self._call(self.engine.load(weights, version))

    async def close(self) -> None:
        if not self.loop.is_running():
            return
        await self._call(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join)
        self.loop.close()

    def metrics(self) -> Metrics:
        return self.engine.metrics()

    @property
    def is_saturated(self) -> bool:
        return self.engine.is_saturated

    async def _call(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class TokenQueue:
    """Moves tokens from the engine's thread into this event loop, with one wake-up for all tokens that are waiting."""

    def __init__(self, top: int):
        self.top, self.ready = top, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tokens: list[Token] = []
        self._wake_up_scheduled = False

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        self._tokens.append((token, logprob, tuple(pair for pair in top if math.isfinite(pair[1]))))
        if not self._wake_up_scheduled:
            self._wake_up_scheduled = True
            self._loop.call_soon_threadsafe(self.ready.set)

    def take(self) -> list[Token]:
        self.ready.clear()
        self._wake_up_scheduled = False  # before the list is emptied: a token that arrives now is taken or wakes again
        tokens, self._tokens = self._tokens, []
        return tokens


class EngineTokenStream:
    """One request to an engine."""

    def __init__(self, backend: EngineBackend, prompt: tuple[int, ...], sampling: Sampling, request: GenerationRequest):
        self.backend, self.prompt, self.sampling, self.request = backend, prompt, sampling, request

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        engine = self.backend.engine
        breaker, session, top = self.backend.breaker, self.request.session, self.request.top_logprobs
        await self.backend.check_breaker()
        queue, num_sent = TokenQueue(top), 0
        if engine.can_stream:
            generation = engine.generate(self.prompt, self.sampling, session=session, listener=queue)
        else:
            generation = engine.generate(self.prompt, self.sampling, session=session)
        sampling = asyncio.ensure_future(generation)
        sampling.add_done_callback(lambda _: queue.ready.set())
        try:
            while not sampling.done():
                await queue.ready.wait()
                if tokens := queue.take():
                    num_sent += len(tokens)
                    yield _chunk(tokens, top)
            completion: Completion = sampling.result()
        except SchemaError as error:  # of this request, not of the engine
            breaker.cancel()
            raise RequestError(str(error), "response_format", "invalid_json_schema") from error
        except EngineError as error:
            breaker.record_failure()
            raise ServiceUnavailable(f"the engine failed: {error}", status=500, code="engine_error") from error
        except BaseException:
            breaker.cancel()
            raise
        finally:
            sampling.cancel()
        breaker.record_success()
        rest = queue.take()
        last = _chunk(rest, top)
        if num_sent + len(rest) < len(completion.tokens):  # an engine that does not stream
            last = TokenChunk(completion.tokens[num_sent:], completion.logprobs[num_sent:])
        yield replace(last, finish=completion.finish, version=completion.version)


def _chunk(tokens: Sequence[Token], top_logprobs: int) -> TokenChunk:
    ids, logprobs, top = zip(*tokens, strict=True) if tokens else ((), (), ())
    return TokenChunk(ids, logprobs, top if top_logprobs else ())


class EngineBackend:
    """A model with its chat template, sampled by an engine."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        vocab_size: int,
        name: str,
        max_context: int,
        sampling: Sampling | None = None,
        breaker: CircuitBreaker | None = None,
    ):
        self.engine, self.renderer, self.vocab_size = engine, renderer, vocab_size
        self.name, self.max_context = name, max_context
        self.sampling, self.breaker = sampling or Sampling(), breaker or CircuitBreaker(longest=30.0)
        self.version, self.reply_cache = 0, ReplyCache()

    def accepts_model(self, model: str) -> bool:
        return model == self.name

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], requests: Sequence[GenerationRequest]
    ) -> Sequence[TokenStream]:
        renderer, text = self.renderer, TextTokenizer(self.renderer.tokenizer)
        too_long = f"the messages and tools have more tokens than the context of {self.max_context}"
        as_user = [replace(message, role="user") for message in messages]
        if messages_exceed(as_user, text, self.max_context) or tools_exceed(messages, tools, text, self.max_context):
            raise RequestError(too_long, "messages", CONTEXT_LENGTH_EXCEEDED)
        try:
            rendered = renderer.render(messages, tools)
            if prefix := requests[0].prefix:
                rendered += renderer.escape_reply(prefix)
            if rendered_exceeds(rendered, renderer, self.max_context):
                raise RequestError(too_long, "messages", CONTEXT_LENGTH_EXCEEDED)
            prompt = renderer.encode(rendered)
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template rejects these messages: {error}", "messages") from error
        return [self._stream(prompt, request, "messages") for request in requests]

    def complete(self, prompt: Sequence[int], request: GenerationRequest) -> TokenStream:
        return self._stream(prompt, request, "prompt")

    def _stream(self, prompt: Sequence[int], request: GenerationRequest, param: str) -> EngineTokenStream:
        room = self.max_context - len(prompt)
        if room < 1:
            message = f"the prompt has {len(prompt)} tokens and fills the context of {self.max_context}"
            raise RequestError(message, param, CONTEXT_LENGTH_EXCEEDED)
        if request.top_logprobs and not self.engine.can_stream:
            raise RequestError("this engine does not return the most likely tokens", "top_logprobs")
        max_tokens = min(request.sampling.max_tokens, room)
        sampling = replace(request.sampling, max_tokens=max_tokens, stop=self.renderer.stop)
        try:
            read_prompt(prompt, self.vocab_size, self.max_context)
            self.engine.check_request(sampling)
        except SchemaError as error:
            raise RequestError(str(error), "response_format", "invalid_json_schema") from error
        except EngineError as error:
            raise RequestError(str(error), param) from error
        return EngineTokenStream(self, tuple(prompt), sampling, request)

    async def check_breaker(self) -> None:
        try:
            async with asyncio.timeout(0.02):
                await self.breaker.acquire()
        except TimeoutError as error:
            raise ServiceUnavailable("the engine failed several times in a row; retry later") from error
