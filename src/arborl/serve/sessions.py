"""Sessions with a trained agent: the agent runs as in training, with a user in place of its environment.

A session is an episode. The agent's messages to the environment go to the user, and the user's next message is the
observation. Tools keep their state, an edited context stays edited, and the session can be saved as an episode.
`arborl serve` and `arborl chat` use `AgentSession`.
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
from arborl.rollout.recorder import EpisodeLimits, RecordedEnv, Recorder
from arborl.rollout.runner import EpisodeFactories
from arborl.serve.model_backend import RequestError, ServiceUnavailable
from arborl.spans import span
from arborl.types import Call, Episode, Message, Sampling, StopReason, Task, ToolSpec

USER_SECONDS = 7 * 24 * 3600.0  # time limit of a user's reply; idle sessions are closed earlier


@dataclass(frozen=True, slots=True)
class SessionReply:
    """The agent's answer to one message."""

    content: str
    steps: tuple[Message, ...] = ()
    stop_reason: str | None = None
    """Why the agent's run ended, such as a full context; the next message starts a new run. None if it goes on."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UserEnv(Env):
    """The user as an environment. The first message is presented as the run's environment presents a task, with its
    system message."""

    blocking = False

    def __init__(self, run_env: Env):
        self.run_env = run_env
        self.shows_task = False
        """Whether `run_env` shows the task's messages. If not, it is a game of its own, which is not played here."""
        self.from_user: asyncio.Queue[str] = asyncio.Queue()
        self.to_user: asyncio.Queue[Message] = asyncio.Queue()

    async def reset(self, task: Task, seed: int) -> Observation:
        content, marker = await self.from_user.get(), uuid.uuid4().hex
        messages: Sequence[Message] = ()
        with suppress(Exception):  # an environment that cannot open this task contributes no messages
            messages = (await self.run_env.reset(replace(task, messages=(Message("user", marker),)), seed)).messages
        self.shows_task = any(marker in message.content for message in messages)
        if self.shows_task:
            return Observation(tuple(replace(one, content=one.content.replace(marker, content)) for one in messages))
        return Observation((*(one for one in messages if one.role == "system"), Message("user", content)))

    async def step(self, action: Message) -> Step:
        self.to_user.put_nowait(action)
        return Step(Observation((Message("user", await self.from_user.get()),)))

    async def close(self) -> None:
        await self.run_env.close()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the run's environment that tools read, such as `document`."""
        if not self.__dict__.get("shows_task"):
            raise AttributeError(name)
        return getattr(self.__dict__["run_env"], name)


class ObservedRecorder(Recorder):
    """A recorder that reports tool calls and tool results to a callback."""

    on_step: Callable[[Message], None] = staticmethod(lambda message: None)

    async def call(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        **options: Any,
    ) -> Call:
        for result in _last_tool_results(messages):
            self.on_step(result)
        call = await super().call(messages, tools, **options)
        if call.reply is not None and call.reply.tool_calls:
            self.on_step(call.reply)
        return call


def _last_tool_results(messages: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    results: list[Message] = []
    for message in reversed(messages):
        if not isinstance(message, Message) or message.role != "tool":
            break
        results.insert(0, message)
    return results


@dataclass(frozen=True, slots=True)
class ServedAgents:
    """The agents of a run and the model that they use."""

    engine: Engine
    renderer: Renderer
    episode_factories: EpisodeFactories
    sampling: Sampling
    limits: EpisodeLimits
    names: tuple[str, ...]  # agent names; the first is the run's default


class AgentSession:
    """A conversation with an agent.

    Example:
        session = AgentSession(agents, fields={"document_content": text})
        reply = await session.send("What is the trade of the keeper?")

    Args:
        agents: the run's agents.
        agent: name of one of them; default: the first.
        fields: task fields.
        seed: seed of sampling and environment.
        temperature: default: that of `agents`.
        on_step: called with tool calls and tool results as they happen.
    """

    def __init__(
        self,
        agents: ServedAgents,
        agent: str | None = None,
        fields: Mapping[str, Any] | None = None,
        seed: int = 0,
        temperature: float | None = None,
        on_step: Callable[[Message], None] = lambda message: None,
    ):
        self.agents, self.fields, self.seed, self.on_step = agents, dict(fields or {}), seed, on_step
        self.agent = agent or agents.names[0]
        self.sampling = agents.sampling if temperature is None else replace(agents.sampling, temperature=temperature)
        self.id = uuid.uuid4().hex
        self.last_used = time.monotonic()
        self.episodes: list[Episode] = []  # one for each run of the agent
        self.is_busy = False
        self._user: UserEnv | None = None
        self._run: asyncio.Task[None] | None = None
        self._steps: list[Message] = []

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        agent = self.agents.episode_factories.agent(self._task())
        toolbox = getattr(agent, "toolbox", None)
        return tuple(toolbox.specs) if toolbox is not None else tuple(getattr(agent, "specs", ()))

    def check_idle(self) -> None:
        if self.is_busy:
            raise RequestError("the agent is still answering; send one message at a time", code="busy", status=409)

    async def send(self, content: str) -> SessionReply:
        """Send a message and wait for the answer. Cancelling it ends the agent's run."""
        self.check_idle()
        self.is_busy, self.last_used = True, time.monotonic()
        try:
            is_running = self._run is not None and not self._run.done()
            reply = await self._reply(content) if is_running else None
            if reply is None:  # the agent ended after its last answer
                self._start()
                reply = await self._reply(content)
            return reply or SessionReply("", stop_reason=self.episodes[-1].stop.value)
        except BaseException:
            await self.end()
            raise
        finally:
            self.is_busy, self.last_used = False, time.monotonic()

    async def end(self) -> None:
        """End the agent's run; its episodes stay."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
            self._run = None

    def _task(self) -> Task:
        agent = None if self.agent == self.agents.names[0] else self.agent
        return Task(f"session-{self.id}", fields=self.fields, agent=agent, seed=self.seed)

    def _start(self) -> None:
        task = self._task()
        episode = Episode(f"{task.id}#{len(self.episodes)}", task, self.seed)
        self.episodes.append(episode)
        self._user = UserEnv(self.agents.episode_factories.env(task))
        self._run = asyncio.create_task(self._play(episode, self._user))

    async def _play(self, episode: Episode, user: UserEnv) -> None:
        agents, task = self.agents, episode.task
        limits = agents.episode_factories.limits(task, agents.limits)
        limits = replace(limits, max_turns=10**6, step_seconds=USER_SECONDS)
        env = RecordedEnv(user, "user", limits, episode)
        model = ObservedRecorder(agents.engine, agents.renderer, self.sampling, limits, episode)
        model.on_step = self._add_step  # type: ignore[method-assign]
        try:
            with span("arborl.session", inside_arborl__episode=episode.id):
                async with boundary(f"agent {self.agent}"):
                    try:
                        with closing(model):
                            await agents.episode_factories.agent(task).run(task, env, model)
                    except EpisodeLimitReached as over:
                        episode.stop = StopReason(over.stop)
                    finally:
                        await env.close()
        except EpisodeError as error:
            episode.fail(error)

    def _add_step(self, message: Message) -> None:
        self._steps.append(message)
        self.on_step(message)

    async def _reply(self, content: str) -> SessionReply | None:
        """The answer; None if the agent ended without a model call and without an answer."""
        assert self._run is not None
        assert self._user is not None
        episode, user, self._steps = self.episodes[-1], self._user, []
        num_calls = len(episode.calls)
        user.from_user.put_nowait(content)
        answer = asyncio.create_task(user.to_user.get())
        try:
            await asyncio.wait([answer, self._run], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # an agent that ends with its answer ends now
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.wait([answer])
        if episode.failure is not None:
            raise ServiceUnavailable(f"the agent failed: {episode.failure}", status=500, code="agent_error")
        calls = episode.calls[num_calls:]
        stop_reason = episode.stop.value if self._run.done() else None
        if stop_reason and not calls and answer.cancelled():
            return None
        text = "" if answer.cancelled() else answer.result().content
        num_sampled = sum(len(call.completion.tokens) for call in calls)
        num_prompt = sum(len(call.prompt) for call in calls)
        return SessionReply(text, tuple(self._steps), stop_reason, num_prompt, num_sampled)


@dataclass(slots=True)
class SessionStore:
    """The open sessions of a server. A session is visible only to the API key that created it."""

    agents: ServedAgents
    max_sessions: int = 256
    idle_seconds: float = 3600.0
    num_keys: int = 1
    """API keys that share the sessions. Each has an equal share, so that no key can exhaust those of another."""
    _open: dict[tuple[str, str], AgentSession] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def max_per_key(self) -> int:
        return max(1, self.max_sessions // self.num_keys)

    async def open(self, agent: str, key: str, **options: Any) -> AgentSession:
        self.check_agent(agent)
        await self._close_idle()
        message = None
        if len(self._open) >= self.max_sessions:
            message = f"{self.max_sessions} sessions are open"
        elif sum(owner == key for owner, _ in self._open) >= self.max_per_key:
            message = f"{self.max_per_key} sessions of this key are open, its share of {self.max_sessions}"
        if message is not None:
            raise ServiceUnavailable(message, 10.0, 429, "too_many_sessions")
        session = AgentSession(self.agents, agent, **options)
        self._open[key, session.id] = session
        return session

    def check_agent(self, agent: str) -> None:
        if agent not in self.agents.names:
            known = ", ".join(self.agents.names)
            raise RequestError(f"unknown agent {agent!r}; known: {known}", "name", "agent_not_found", 404)

    def find(self, agent: str, key: str, id: str) -> AgentSession:
        self.check_agent(agent)
        session = self._open.get((key, id))
        if session is None or session.agent != agent:
            raise RequestError("unknown session, or it has ended", "id", "session_not_found", 404)
        return session

    async def end(self, agent: str, key: str, id: str) -> None:
        await self.find(agent, key, id).end()
        self._open.pop((key, id), None)

    async def close(self) -> None:
        for session in list(self._open.values()):
            await session.end()
        self._open.clear()

    async def _close_idle(self) -> None:
        now = time.monotonic()
        for key, session in list(self._open.items()):
            if not session.is_busy and now - session.last_used > self.idle_seconds:
                await session.end()
                self._open.pop(key, None)
