"""Training episodes of external programs over HTTP: `/e/{id}/v1` is OpenAI's API, and every call of it is recorded.

One server per event loop. An episode is played by a program that knows its id, which cannot be guessed.

Temperature, truncation and seeds are the run's: a program with temperature 0 would make all attempts at a task equal,
with zero variance and no gradient. `max_tokens` and `stop` are the program's, within the limits of the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI

from arborl.chat.conversation import USUAL_CHARS, messages_exceed, rendered_exceeds, tool_text, tools_exceed
from arborl.chat.tokenizer import TextTokenizer
from arborl.envs.env import Env
from arborl.errors import ConfigError, ContextFull, EpisodeError, EpisodeLimitReached, MaxTurns, SchemaError
from arborl.rewards.answers import POSTED
from arborl.rollout.recorder import Recorder
from arborl.serve.middleware import add_error_handlers, error_response
from arborl.serve.model_backend import (
    CONTEXT_LENGTH_EXCEEDED,
    TEMPLATE_ERRORS,
    GenerationRequest,
    ReplyCache,
    RequestError,
    ServiceUnavailable,
    TokenChunk,
)
from arborl.serve.openai_routes import openai_routes
from arborl.serve.parsing import RequestWorkers, bounded_route
from arborl.serve.schemas import RewardRequest, StepRequest
from arborl.serve.session_routes import message_object
from arborl.serve.warm_start import WarmStart
from arborl.tools.remote.http_middleware import PendingConnections, RequestFilter, uvicorn_config
from arborl.types import Call, Message, Sampling, Task, ToolSpec

T = TypeVar("T")
MAX_BODY_BYTES = 2**24
EPISODE_PATH = re.compile(r"/(?:e|v1/episodes)/(?P<id>[^/]+)(?:/|\Z)")
UNKNOWN_EPISODE = "unknown episode, or it has ended"
EPISODE_ENDED = "this episode has ended: its reward was posted, or the program exited"
KEEP_ALIVE_SECONDS = 600.0  # time that a connection may be idle: a program may work for minutes between two calls


class RecordingBackend:
    """The model of one episode: every call goes through the episode's recorder."""

    name = "policy"

    def __init__(self, recorder: Recorder, max_calls: int):
        self.recorder, self.max_calls = recorder, max_calls
        self.renderer, self.sampling = recorder.renderer, recorder.sampling
        self.max_context, self.version = recorder.limits.max_context, 0
        self.reply_cache = ReplyCache()
        self.num_calls = 0
        self.last_reply: Message | None = None
        self.limit_reached: EpisodeLimitReached | None = None  # the limit that the last call exceeded
        self.failure: EpisodeError | None = None  # A failure that the program did not cause
        self.failed = asyncio.Event()
        self.is_closed = False
        self._context = contextvars.copy_context()
        """Context of the episode: its clock stops while the engine's queue is full, and its span contains the calls."""

    def accepts_model(self, model: str) -> bool:
        """Programs have their model's name built in, so every name is accepted."""
        return True

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], requests: Sequence[GenerationRequest]
    ) -> Sequence[RecordedTokenStream]:
        if any(request.top_logprobs for request in requests):
            raise RequestError("the most likely tokens are not available in training", "top_logprobs")
        for name in ("frequency_penalty", "presence_penalty"):
            if any(getattr(request.sampling, name) for request in requests):
                raise RequestError(f"{name} is not available in training: leave it out", name)
        self._check_schema(requests[0].sampling)
        overflow = self._check_size(messages, tools)
        return [RecordedTokenStream(self, messages, tools, request, overflow) for request in requests]

    def _check_schema(self, sampling: Sampling) -> None:
        if not sampling.schema:
            return
        try:
            self.recorder.engine.check_request(replace(sampling, stop=self.renderer.stop, max_tokens=1))
        except SchemaError as error:
            raise RequestError(str(error), "response_format", "invalid_json_schema") from error

    def _check_size(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> ContextFull | None:
        """An error if the prompt is far too long: the recorder would tokenize it in the run's event loop."""
        limit = self.max_context
        num_chars = sum(len(message.content) for message in messages) + len(tool_text(messages, tools))
        if num_chars <= USUAL_CHARS * limit:
            return None
        overflow = ContextFull(f"the messages and tools have {num_chars:,} characters, the context {limit} tokens")
        text = TextTokenizer(self.renderer.tokenizer)
        if messages_exceed(messages, text, limit) or tools_exceed(messages, tools, text, limit):
            return overflow
        try:
            rendered = self.renderer.render(messages, tools)
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template rejects these messages: {error}", "messages") from error
        return overflow if rendered_exceeds(rendered, self.renderer, limit) else None

    def complete(self, prompt: Sequence[int], request: GenerationRequest) -> RecordedTokenStream:
        raise RequestError("training records conversations: use /v1/chat/completions or /v1/responses", status=404)

    async def call(self, stream: RecordedTokenStream) -> Call:
        self.check_open()
        self.num_calls += 1
        if self.num_calls > self.max_calls:
            self.limit_reached = MaxTurns(f"{self.max_calls} model calls are used up")
            raise RequestError(f"{self.limit_reached} (agent.args.max_calls)", code="max_calls")
        if stream.request.sampling.drawn != self.sampling.drawn:
            self.recorder.count({"endpoint/sampling_overridden": 1.0})
        try:
            call = await self.run_in_episode(self._record(stream))
        except ContextFull as full:
            self.limit_reached = full
            raise RequestError(str(full), "messages", CONTEXT_LENGTH_EXCEEDED) from full
        except EpisodeError as error:
            self.fail(error)
            raise ServiceUnavailable(f"the engine failed: {error}", status=500, code="engine_error") from error
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the chat template rejects these messages: {error}", "messages") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the program disconnected
                raise
            raise _ended() from None
        except RuntimeError as error:
            if not self.is_closed:
                raise
            raise _ended() from error
        self.limit_reached, self.last_reply, self.version = None, call.reply, call.completion.version
        return call

    async def _record(self, stream: RecordedTokenStream) -> Call:
        if stream.overflow is not None:
            raise stream.overflow
        sampling, prefix = stream.request.sampling, stream.request.prefix
        return await self.recorder.call(
            stream.messages, stream.tools, stop=sampling.stop_texts, most=sampling.max_tokens, begins=prefix,
            schema=sampling.schema,
        )  # fmt: skip

    async def run_in_episode(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.create_task(work, context=self._context.copy())

    def fail(self, error: EpisodeError) -> None:
        self.failure = self.failure or error
        self.failed.set()

    def check_open(self) -> None:
        if self.is_closed:
            raise _ended()


def _ended() -> RequestError:
    return RequestError(EPISODE_ENDED, code="episode_over", status=410)


class RecordedTokenStream:
    """One recorded call; its tokens arrive as one chunk at the end."""

    def __init__(
        self,
        backend: RecordingBackend,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        request: GenerationRequest,
        overflow: ContextFull | None = None,
    ):
        self.backend, self.messages, self.tools = backend, messages, tools
        self.request, self.overflow = request, overflow
        self.prompt: tuple[int, ...] = ()

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        call = await self.backend.call(self)
        self.prompt, completion = tuple(call.prompt), call.completion
        yield TokenChunk(completion.tokens, completion.logprobs, finish=completion.finish, version=completion.version)


class ExternalEpisode:
    """An episode that an external program plays."""

    def __init__(self, task: Task, opening: Sequence[Message], env: Env, model: Recorder, max_calls: int):
        self.task, self.opening, self.env, self.model = task, tuple(opening), env, model
        self.id = secrets.token_urlsafe(24)
        self.backend = RecordingBackend(model, max_calls)
        self.answer: str | None = None
        self.rewarded = asyncio.Event()
        self.server: EpisodeServer | None = None
        self.num_steps = 0
        self.max_turns: MaxTurns | None = None  # set if the environment reached its last turn
        self._step_lock = asyncio.Lock()
        self._is_done = False

    @property
    def question(self) -> str:
        return "\n\n".join(message.content for message in self.opening if message.role != "system")

    def task_object(self) -> dict[str, Any]:
        return {
            "id": self.task.id,
            "question": self.question,
            "messages": [message_object(message) for message in self.opening],
            "fields": json.loads(json.dumps(dict(self.task.fields), default=str)),
        }

    async def step(self, content: str) -> dict[str, Any]:
        self.backend.check_open()
        async with self._step_lock:
            if self._is_done:
                raise RequestError("the environment is done: no further steps", code="environment_over")
            self.num_steps += 1
            try:
                step = await self.backend.run_in_episode(self.env.step(Message("assistant", content)))
            except MaxTurns as error:
                self._is_done, self.max_turns = True, error
                return {"messages": [], "done": True}
            except EpisodeError as error:
                self.backend.fail(error)
                message = f"the environment failed: {error}"
                raise ServiceUnavailable(message, status=500, code="environment_error") from error
            self._is_done = step.over
            return {"messages": [message_object(one) for one in step.observation.messages], "done": step.over}

    def post_reward(self, value: float, answer: str | None) -> None:
        """Set the reward that the program computed; ends the episode."""
        self.backend.check_open()
        self.answer = answer if answer is not None else self.answer
        self.model.count({POSTED: value})
        self.backend.is_closed = True
        self.rewarded.set()

    async def finish(self) -> None:
        self.backend.is_closed = True
        async with self._step_lock:
            return


class EpisodeServer:
    """The HTTP server of an event loop, with the episodes that are open."""

    _servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], EpisodeServer]] = WeakKeyDictionary()

    def __init__(self, host: str, port: int, public_url: str | None = None):
        self.episodes: dict[str, ExternalEpisode] = {}
        self.warm_start = WarmStart()
        self._slots: dict[int, asyncio.Semaphore] = {}
        try:
            self.socket = socket.create_server((host, port), backlog=1024, family=_address_family(host))
        except OSError as error:
            raise ConfigError(
                f"agent.args: cannot listen on {host}:{port}: {error.strerror or error}. Write another agent.args.port "
                "(0 for any free one), or agent.args.host."
            ) from error
        address, number = self.socket.getsockname()[:2]
        self.url = public_url or f"http://{f'[{address}]' if ':' in address else address}:{number}"
        config = uvicorn_config(self._app(), host, port, 1, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS)
        self._server = BackgroundServer(config)
        self._serving = asyncio.create_task(self._serve())

    @classmethod
    async def get(cls, host: str, port: int, public_url: str | None = None) -> EpisodeServer:
        """The server of this event loop, started on the first call."""
        servers = cls._servers.setdefault(asyncio.get_running_loop(), {})
        if (host, port) not in servers:
            servers[host, port] = cls(host, port, public_url)
        server = servers[host, port]
        await server._server.is_up.wait()
        return server

    @contextmanager
    def open(self, episode: ExternalEpisode) -> Iterator[str]:
        """Accept requests of an episode at the URL that this yields."""
        self.episodes[episode.id], episode.server = episode, self
        try:
            yield f"{self.url}/e/{episode.id}"
        finally:
            episode.backend.is_closed = True
            del self.episodes[episode.id]

    def process_slots(self, max_processes: int) -> asyncio.Semaphore:
        return self._slots.setdefault(max_processes, asyncio.Semaphore(max_processes))

    async def _serve(self) -> None:
        """Serve until the event loop ends, which cancels this task."""
        try:
            await self._server.serve([self.socket])
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()
            self.socket.close()
            await self.warm_start.close()

    def _find(self, id: str) -> ExternalEpisode:
        if (episode := self.episodes.get(id)) is None:
            raise RequestError(UNKNOWN_EPISODE, code="episode_not_found", status=404)
        return episode

    def _app(self) -> FastAPI:
        app, workers = FastAPI(title="Arbor, episodes", openapi_url=None), RequestWorkers()
        app.state.half_open = PendingConnections(KEEP_ALIVE_SECONDS)
        app.router.route_class = bounded_route(workers)
        app.add_middleware(EpisodeMiddleware, episodes=self.episodes)
        add_error_handlers(app)
        app.include_router(
            openai_routes(
                lambda request: self._find(request.path_params["id"]).backend, prefix="/e/{id}/v1", workers=workers
            )
        )

        @app.get("/e/{id}")
        async def task(id: str) -> dict[str, Any]:
            return self._find(id).task_object()

        @app.get("/e/{id}/v1/models")
        async def models(id: str) -> dict[str, Any]:
            model = {"id": self._find(id).backend.name, "object": "model", "created": 0, "owned_by": "arborl"}
            return {"object": "list", "data": [model]}

        @app.post("/e/{id}/step")
        async def step(id: str, body: StepRequest) -> dict[str, Any]:
            return await self._find(id).step(body.content)

        @app.post("/e/{id}/reward")
        @app.post("/v1/episodes/{id}/reward")
        async def reward(id: str, body: RewardRequest) -> dict[str, Any]:
            self._find(id).post_reward(body.reward, body.answer)
            return {"closed": True}

        return app


class BackgroundServer(uvicorn.Server):
    """A server that leaves signals to the run and sets an event when it is up."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class EpisodeMiddleware(RequestFilter):
    """Rejects requests to unknown episodes and too large ones before their body is read."""

    def __init__(self, app: Any, episodes: Mapping[str, ExternalEpisode]):
        super().__init__(app, None, MAX_BODY_BYTES)
        self.episodes = episodes

    def _rejection(self, path: str, headers: Mapping[bytes, bytes]) -> Any:
        match = EPISODE_PATH.match(path)
        if match is None or match["id"] not in self.episodes:
            return error_response(404, UNKNOWN_EPISODE, "episode_not_found")
        return self._length_error(headers)

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None) -> Any:
        return error_response(status, detail, headers=headers)


def _address_family(host: str) -> socket.AddressFamily:
    with suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, None)[0][0])
    return socket.AF_INET
