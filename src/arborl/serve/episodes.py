"""Episodes that programs of others play, behind HTTP: `/e/{id}/v1` is OpenAI's API, and every call of it is recorded.

One server for an event loop, for as long as that lasts; episodes come and go in it. Whoever knows an episode's id may
play it; ids cannot be guessed, so nothing else is asked for.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI, Request

from arborl.envs.env import Env
from arborl.errors import ConfigError, EpisodeError, MaxTurns
from arborl.rewards.answers import POSTED
from arborl.rollout.recorder import Recorder
from arborl.serve.agents import plain
from arborl.serve.chat import chat_routes
from arborl.serve.parsing import RequestWorkers, bounded_route
from arborl.serve.problems import add_problems, problem
from arborl.serve.recorded import GONE, OVER, Recorded
from arborl.serve.responses import response_routes
from arborl.serve.schemas import RewardRequest, StepRequest
from arborl.serve.source import Refused, Unavailable
from arborl.tools.gate import Gate, HalfOpen, listening
from arborl.types import Message, Task

MAX_BODY = 2**24
EPISODE_PATH = re.compile(r"/(?:e|v1/episodes)/(?P<id>[^/]+)(?:/|\Z)")
UNKNOWN = "no such episode: it is over, or never was"
PATIENCE = 600.0
"""Seconds that a connection may be silent: a program's own tools take their time."""


class Visit:
    """An episode that a program plays.

    Args:
        task: what is played.
        opening: what the environment said.
        env: takes what the program does.
        model: records what it asks.
        most: calls of the model that it may make.
    """

    def __init__(self, task: Task, opening: Sequence[Message], env: Env, model: Recorder, most: int):
        self.task, self.opening, self.env, self.model = task, tuple(opening), env, model
        self.id = secrets.token_urlsafe(24)
        self.source = Recorded(model, most)
        self.answer: str | None = None
        """What the program said is its answer."""
        self.rewarded = asyncio.Event()
        self.endpoint: Endpoint | None = None
        """Where it is open."""
        self.steps = 0
        self.stepped_out: MaxTurns | None = None
        self._stepping = asyncio.Lock()
        self._over = False

    @property
    def question(self) -> str:
        """What is asked, as text."""
        return "\n\n".join(message.content for message in self.opening if message.role != "system")

    def told(self) -> dict[str, Any]:
        """The task as a program reads it."""
        return {
            "id": self.task.id,
            "question": self.question,
            "messages": [plain(message) for message in self.opening],
            "fields": json.loads(json.dumps(dict(self.task.fields), default=str)),
        }

    async def step(self, content: str) -> dict[str, Any]:
        """One step of the environment."""
        self._check_open()
        async with self._stepping:
            if self._over:
                raise Refused("the environment is over: there is nothing left to do in it", code="environment_over")
            self.steps += 1
            try:
                step = await self.source.within(self.env.step(Message("assistant", content)))
            except MaxTurns as last:
                self._over, self.stepped_out = True, last
                return {"messages": [], "over": True}
            except EpisodeError as error:
                self.source.fail(error)
                raise Unavailable(f"the environment failed: {error}", status=500, code="environment_error") from error
            self._over = step.over
            return {"messages": [plain(one) for one in step.observation.messages], "over": step.over}

    def reward(self, value: float, answer: str | None) -> None:
        """What the program itself says that it was worth; closes the episode."""
        self._check_open()
        self.answer = answer if answer is not None else self.answer
        self.model.count({POSTED: value})
        self.source.closed = True
        self.rewarded.set()

    async def settled(self) -> None:
        """Wait for a step that is still being taken."""
        self.source.closed = True
        async with self._stepping:
            return

    def _check_open(self) -> None:
        if self.source.closed:
            raise Refused(OVER, code="episode_over", status=GONE)


class Endpoint:
    """The server of an event loop.

    Args:
        host, port: where to listen; port 0 is any that is free.
        public: what programs are told to call, where that is not this address.

    Example:
        endpoint = await Endpoint.here("127.0.0.1", 0)
        with endpoint.open(visit) as at:
            ...                                # programs call f"{at}/v1"
    """

    _made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], Endpoint]] = WeakKeyDictionary()

    def __init__(self, host: str, port: int, public: str | None = None):
        self.visits: dict[str, Visit] = {}
        self._slots: dict[int, asyncio.Semaphore] = {}
        try:
            self.socket = socket.create_server((host, port), backlog=1024, family=family(host))
        except OSError as error:
            raise ConfigError(
                f"agent=endpoint: {host}:{port} cannot be listened at: {error.strerror or error}. Give another "
                "agent.args.port (0 for any that is free), or agent.args.host."
            ) from error
        own, number = self.socket.getsockname()[:2]
        self.at = public or f"http://{f'[{own}]' if ':' in own else own}:{number}"
        self._server = Background(listening(self._app(), host, port, 1, lifespan="off", timeout_keep_alive=PATIENCE))
        self._serving = asyncio.create_task(self._serve())

    @classmethod
    async def here(cls, host: str, port: int, public: str | None = None) -> Endpoint:
        """The one of this event loop."""
        made = cls._made.setdefault(asyncio.get_running_loop(), {})
        if (host, port) not in made:
            made[host, port] = cls(host, port, public)
        found = made[host, port]
        await found._server.up.wait()
        return found

    @contextmanager
    def open(self, visit: Visit) -> Iterator[str]:
        """Let it be played, at the address that it has inside."""
        self.visits[visit.id], visit.endpoint = visit, self
        try:
            yield f"{self.at}/e/{visit.id}"
        finally:
            visit.source.closed = True
            del self.visits[visit.id]

    def slots(self, most: int) -> asyncio.Semaphore:
        """Of the programs that are started here, so many at once."""
        return self._slots.setdefault(most, asyncio.Semaphore(most))

    async def _serve(self) -> None:
        """Until the event loop ends, which cancels this."""
        try:
            await self._server.serve([self.socket])
        finally:
            for one in getattr(self._server, "servers", ()):
                one.close()
            self.socket.close()

    def _find(self, name: str) -> Visit:
        if (found := self.visits.get(name)) is None:
            raise Refused(UNKNOWN, code="episode_not_found", status=404)
        return found

    def _app(self) -> FastAPI:
        app, workers = FastAPI(title="Arbor, episodes", openapi_url=None), RequestWorkers()
        app.state.half_open = HalfOpen(PATIENCE)
        app.router.route_class = bounded_route(workers)
        app.add_middleware(EpisodeGate, known=self.visits)
        add_problems(app)

        def source_of(request: Request) -> Recorded:
            return self._find(request.path_params["id"]).source

        app.include_router(chat_routes(source_of, prefix="/e/{id}/v1", workers=workers))
        app.include_router(response_routes(source_of, prefix="/e/{id}/v1", workers=workers))

        @app.get("/e/{id}")
        async def task(id: str) -> dict[str, Any]:
            return self._find(id).told()

        @app.get("/e/{id}/v1/models")
        async def models(id: str) -> dict[str, Any]:
            about = {"id": self._find(id).source.name, "object": "model", "created": 0, "owned_by": "arborl"}
            return {"object": "list", "data": [about]}

        @app.post("/e/{id}/step")
        async def step(id: str, body: StepRequest) -> dict[str, Any]:
            return await self._find(id).step(body.content)

        @app.post("/e/{id}/reward")
        @app.post("/v1/episodes/{id}/reward")
        async def reward(id: str, body: RewardRequest) -> dict[str, Any]:
            self._find(id).reward(body.reward, body.answer)
            return {"closed": True}

        return app


class Background(uvicorn.Server):
    """A server among other work: signals are the run's, and it says when it is up."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class EpisodeGate(Gate):
    """Refuses requests whose path names no open episode, or that are too large, before their body is read.

    Args:
        app: what comes after.
        known: episodes by their ids. The id is the secret: it cannot be guessed.
    """

    def __init__(self, app: Any, known: Mapping[str, Visit]):
        super().__init__(app, None, MAX_BODY)
        self.known = known

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> Any:
        found = EPISODE_PATH.match(path)
        if found is None or found["id"] not in self.known:
            return problem(404, UNKNOWN, "episode_not_found")
        length = headers.get(b"content-length", b"0")
        return None if length.isdigit() and len(length) < 19 and int(length) <= self.max_body else self._too_large()

    def _too_large(self) -> Any:
        return problem(413, f"a body may have {self.max_body:,} bytes")


def family(host: str) -> socket.AddressFamily:
    with suppress(OSError):
        return socket.AddressFamily(socket.getaddrinfo(host, None)[0][0])
    return socket.AF_INET
