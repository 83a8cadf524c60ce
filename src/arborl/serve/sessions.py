"""A trained agent in use: its own loop, its tools, its way of keeping its context, with a person for an environment.

A session is an episode. The agent runs as it did in training, and what it would tell its environment it tells a person,
whose next message is what it observes. So tools keep their state, a context that is edited stays edited, and what was
said can be saved as any other episode. `arborl serve` and `arborl chat` both talk through this class.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from arborl.chat.renderer import Renderer
from arborl.engines.engine import Engine
from arborl.envs.env import Env, Observation, Step
from arborl.errors import EpisodeError, EpisodeLimitReached, boundary
from arborl.rollout.recorder import Limits, RecordedEnv, Recorder
from arborl.rollout.runner import Cast
from arborl.serve.source import Refused, Unavailable
from arborl.spans import span
from arborl.types import Call, Episode, Message, Sampling, StopReason, Task, ToolSpec

FOR_EVER = 7 * 24 * 3600.0
"""Seconds that a person may take; sessions that nobody uses are ended before."""


@dataclass(frozen=True, slots=True)
class Happened:
    """Something the agent did on its way to an answer."""

    message: Message
    """What the model wrote (with its tool calls), or what a tool answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent answered."""

    content: str
    happened: tuple[Happened, ...] = ()
    over: str | None = None
    """Why the agent came to no answer, where it did not: a full context, a last round. The next message begins anew."""
    given: int = 0
    sampled: int = 0


class Person(Env):
    """Whoever talks to the agent, as its environment. The first thing said is shown as the run's own environment would
    show it, with its system message.

    Args:
        like: the run's environment.
    """

    blocking = False

    def __init__(self, like: Env):
        self.like, self.alike = like, False
        """The latter: whether it shows what a task says; else it plays a game of its own, which is not played here."""
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        """From the person."""
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        """To the person."""

    async def reset(self, task: Task, seed: int) -> Observation:
        asked, mark = await self.heard.get(), uuid.uuid4().hex
        opened: Sequence[Message] = ()
        with suppress(Exception):  # an environment that cannot open such a task has nothing to say to it
            opened = (await self.like.reset(replace(task, messages=(Message("user", mark),)), seed)).messages
        self.alike = any(mark in message.content for message in opened)
        if self.alike:
            return Observation(tuple(replace(one, content=one.content.replace(mark, asked)) for one in opened))
        return Observation((*(one for one in opened if one.role == "system"), Message("user", asked)))

    async def step(self, action: Message) -> Step:
        self.said.put_nowait(action)
        return Step(Observation((Message("user", await self.heard.get()),)))

    async def close(self) -> None:
        await self.like.close()

    def __getattr__(self, name: str) -> Any:
        """What tools may look for in the run's environment (`document`)."""
        if not self.__dict__.get("alike"):
            raise AttributeError(name)
        return getattr(self.__dict__["like"], name)


class Watched(Recorder):
    """The model, with somebody who looks on."""

    watch: Callable[[Happened], None] = staticmethod(lambda happened: None)

    async def call(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        **more: Any,
    ) -> Call:
        for answer in _since_last_word(messages):
            self.watch(Happened(answer))
        call = await super().call(messages, tools, **more)
        if call.reply is not None and call.reply.tool_calls:
            self.watch(Happened(call.reply))
        return call


def _since_last_word(messages: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """What tools have answered since the model last spoke."""
    found: list[Message] = []
    for message in reversed(messages):
        if not isinstance(message, Message) or message.role != "tool":
            break
        found.insert(0, message)
    return found


@dataclass(frozen=True, slots=True)
class Company:
    """Who can be talked to, and with which model."""

    engine: Engine
    renderer: Renderer
    cast: Cast
    sampling: Sampling
    limits: Limits
    agents: tuple[str, ...]
    """Their names; the first is the run's."""


class AgentSession:
    """A conversation with an agent.

    Example:
        session = AgentSession(company, fields={"document_content": text})
        reply = await session.say("What is the trade of the keeper?")

    Args:
        company: who can be talked to.
        agent: which of them; the run's by default.
        fields: what tasks had as columns.
        seed: of all chance in it.
        temperature: of sampling; as in `company` by default.
        watch: told what the agent does, as it happens.
    """

    def __init__(
        self,
        company: Company,
        agent: str | None = None,
        fields: Mapping[str, Any] | None = None,
        seed: int = 0,
        temperature: float | None = None,
        watch: Callable[[Happened], None] = lambda happened: None,
    ):
        self.company, self.fields, self.seed, self.watch = company, dict(fields or {}), seed, watch
        self.agent = agent or company.agents[0]
        self.sampling = company.sampling if temperature is None else replace(company.sampling, temperature=temperature)
        self.id = uuid.uuid4().hex
        self.used = time.monotonic()
        self.episodes: list[Episode] = []
        """One for each time the agent began anew."""
        self.busy = False
        self._person: Person | None = None
        self._run: asyncio.Task[None] | None = None
        self._happened: list[Happened] = []

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the agent may call."""
        agent = self.company.cast.agent(self._task())
        box = getattr(agent, "toolbox", None)
        return tuple(box.specs) if box is not None else tuple(getattr(agent, "specs", ()))

    async def say(self, content: str) -> Reply:
        """Say something, and wait for the answer. Given up, it ends the agent's run: it would be half-way."""
        if self.busy:
            raise Refused("the agent is still answering; one message at a time", code="busy", status=409)
        self.busy, self.used = True, time.monotonic()
        try:
            reply = await self._answer(content) if self._run is not None and not self._run.done() else None
            if reply is None:  # the agent had given its last answer, and did not go on
                self._begin()
                reply = await self._answer(content)
            return reply or Reply("", over=self.episodes[-1].stop.value)
        except BaseException:
            await self.end()
            raise
        finally:
            self.busy, self.used = False, time.monotonic()

    async def end(self) -> None:
        """End the agent's run; what it said stays."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
            self._run = None

    def _task(self) -> Task:
        named = None if self.agent == self.company.agents[0] else self.agent
        return Task(f"session-{self.id}", fields=self.fields, agent=named, seed=self.seed)

    def _begin(self) -> None:
        task = self._task()
        episode = Episode(f"{task.id}#{len(self.episodes)}", task, self.seed)
        self.episodes.append(episode)
        self._person = Person(self.company.cast.env(task))
        self._run = asyncio.create_task(self._play(episode, self._person))

    async def _play(self, episode: Episode, person: Person) -> None:
        """The agent's own loop, as a rollout runs it."""
        company, task = self.company, episode.task
        usual = company.cast.limits(task, company.limits) if company.cast.limits else company.limits
        limits = replace(usual, max_turns=10**6, step_seconds=FOR_EVER)  # these are a person's, and no task's
        env = RecordedEnv(person, "person", limits, episode)
        model = Watched(company.engine, company.renderer, self.sampling, limits, episode)
        model.watch = self._tell  # type: ignore[method-assign]
        try:
            with span("arborl.session", inside_arborl__episode=episode.id):
                async with boundary(f"agent {self.agent}"):
                    try:
                        with closing(model):
                            await company.cast.agent(task).run(task, env, model)
                    except EpisodeLimitReached as over:
                        episode.stop = StopReason(over.stop)
                    finally:
                        await env.close()
        except EpisodeError as error:
            episode.fail(error)

    def _tell(self, happened: Happened) -> None:
        self._happened.append(happened)
        self.watch(happened)

    async def _answer(self, content: str) -> Reply | None:
        """None where the agent is done without having asked the model or said anything."""
        assert self._run is not None
        assert self._person is not None
        episode, person, self._happened = self.episodes[-1], self._person, []
        calls = len(episode.calls)
        person.heard.put_nowait(content)
        said = asyncio.create_task(person.said.get())
        try:
            await asyncio.wait([said, self._run], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # an agent that ends with its answer does so now
        finally:
            if not said.done():
                said.cancel()
                await asyncio.wait([said])
        if episode.failure is not None:
            raise Unavailable(f"the agent failed: {episode.failure}", status=500, code="agent_error")
        new = episode.calls[calls:]
        over = episode.stop.value if self._run.done() else None
        if over and not new and said.cancelled():
            return None
        text = "" if said.cancelled() else said.result().content
        sampled = sum(len(call.completion.tokens) for call in new)
        return Reply(text, tuple(self._happened), over, sum(len(call.prompt) for call in new), sampled)


@dataclass(slots=True)
class Sessions:
    """The sessions of a server: so many, each for as long as it is used. A session belongs to the key that began it;
    other keys cannot find it."""

    company: Company
    most: int = 256
    idle: float = 3600.0
    """Seconds after which one that was not used is ended."""
    keys: int = 1
    """API keys that share them. None may have more than its share, so none can take those of another."""
    _open: dict[tuple[str, str], AgentSession] = field(default_factory=dict)
    """By the name of the key and the session's id."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def share(self) -> int:
        """Sessions that one key may have."""
        return max(1, self.most // self.keys)

    async def open(self, agent: str, key: str, **more: Any) -> AgentSession:
        self.check(agent)
        await self._forget()
        if len(self._open) >= self.most:
            raise Unavailable(f"{self.most} sessions are open", 10.0, 429, "too_many_sessions")
        if sum(owner == key for owner, _ in self._open) >= self.share:
            told = f"{self.share} sessions of this key are open, which is its share of {self.most}"
            raise Unavailable(told, 10.0, 429, "too_many_sessions")
        made = AgentSession(self.company, agent, **more)
        self._open[key, made.id] = made
        return made

    def check(self, agent: str) -> None:
        if agent not in self.company.agents:
            known = ", ".join(self.company.agents)
            raise Refused(f"no agent is called {agent!r} here; there is: {known}", "name", "agent_not_found", 404)

    def find(self, agent: str, key: str, name: str) -> AgentSession:
        self.check(agent)
        found = self._open.get((key, name))
        if found is None or found.agent != agent:
            raise Refused("no such session: it was ended, or never begun", "id", "session_not_found", 404)
        return found

    async def end(self, agent: str, key: str, name: str) -> None:
        await self.find(agent, key, name).end()
        self._open.pop((key, name), None)

    async def close(self) -> None:
        for session in list(self._open.values()):
            await session.end()
        self._open.clear()

    async def _forget(self) -> None:
        now = time.monotonic()
        for place, session in list(self._open.items()):
            if not session.busy and now - session.used > self.idle:
                await session.end()
                self._open.pop(place, None)
