"""The model and the environment that an agent sees. Both record everything into one `Episode`.

`Recorder` is the model; `RecordedEnv` wraps the environment. They also enforce the limits on turns and context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from arborl.busy_time import BusyTime
from arborl.chat.conversation import Conversations, Prompt, messages_exceed
from arborl.chat.json_schema import schema_text
from arborl.chat.messages import read_messages, read_tools
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import TextTokenizer
from arborl.engines.engine import Engine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.validation import number_errors, observation_errors, step_errors
from arborl.envs.wrapper import EnvWrapper
from arborl.errors import ContextFull, EpisodeError, MaxTurns
from arborl.rollout.deadlines import ENGINE, call_with_deadline, call_without_deadline
from arborl.seeds import derive
from arborl.spans import span
from arborl.types import (
    NOT_SAMPLED,
    Call,
    Completion,
    Episode,
    FinishReason,
    Message,
    Metrics,
    Sampling,
    SamplingDistribution,
    StopReason,
    Task,
    ToolSpec,
    Turn,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    max_turns: int = 32
    max_context: int = 1024
    """Prompt and completion together, in tokens."""
    episode_seconds: float = 120.0
    step_seconds: float = 30.0


class CallPosition(NamedTuple):
    turn: int
    after: int
    """Number of calls that the agent's own task has made; its own calls count themselves."""
    task: int
    """0 for the agent's own task; tasks that it starts are numbered by their first call."""
    number: int


class CallNumbering:
    """Gives each model call a seed and a position that do not depend on timing. An agent may start concurrent tasks
    (`asyncio.gather`, a `TaskGroup`). Calls of the agent's own task are numbered. The seed of a call from another task
    depends on its prompt, on the call that returned the last reply in that prompt, and on how often both occurred. So
    two tasks whose conversations happen to have equal texts keep their own seeds, if they pass on the `Message`s that
    `chat` returned (not copies or dicts). In the episode, the calls of a task stand together, behind the agent's last
    call before them. A call that fails or is cancelled keeps its number."""

    def __init__(self, seed: int):
        self.seed = seed
        self.agent_task = _current_task()
        self.num_agent_calls = 0
        self.tasks: dict[Any, int] = {}
        self.calls_of_task: Counter[int] = Counter()
        self.calls_of_prompt: Counter[tuple[int, bytes]] = Counter()
        self.seed_of_reply: dict[int, int] = {}
        """By the identity of the message, which the episode keeps alive."""

    def next(self, prompt: Sequence[int], messages: Sequence[Message], turn: int) -> tuple[int, CallPosition]:
        task = _current_task()
        if task is self.agent_task:
            self.num_agent_calls += 1
            number = self.num_agent_calls
            return derive(self.seed, "sampling", number - 1), CallPosition(turn, number, 0, 0)
        index = self.tasks.setdefault(task, len(self.tasks) + 1)
        self.calls_of_task[index] += 1
        digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        seeds = (self.seed_of_reply.get(id(message)) for message in reversed(messages))
        previous = next((seed for seed in seeds if seed is not None), self.seed)
        self.calls_of_prompt[previous, digest] += 1
        seed = derive(previous, "sampling", digest.hex(), self.calls_of_prompt[previous, digest])
        return seed, CallPosition(turn, self.num_agent_calls, index, self.calls_of_task[index])


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


class TopLogprobs:
    """Collects the most likely alternatives of each sampled token (`engines.engine.TokenListener`)."""

    def __init__(self, count: int):
        self.count, self.top = count, count + 1  # the sampled token may be among them
        self.alternatives: list[tuple[tuple[int, float], ...]] = []

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        others = [(other, value) for other, value in top if other != token and math.isfinite(value)]
        self.alternatives.append(tuple(others[: self.count]))


SAME_FOR_ALL_CALLS = frozenset(field.name for field in dataclasses.fields(Sampling)) - {
    "max_tokens",
    "seed",
    "stop_texts",
    "schema",
}


class Recorder:
    """The model as the agent sees it. Token ids and log-probabilities of each call are recorded in `episode.calls`.
    Calls may be concurrent; see `CallNumbering`."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        limits: EpisodeLimits,
        episode: Episode,
        drawn: SamplingDistribution | None = None,
        engine_time: BusyTime | None = None,
        num_top_logprobs: int = 0,
    ):
        self.engine_time = BusyTime() if engine_time is None else engine_time
        self.num_top_logprobs = num_top_logprobs
        self.tokenizer = TextTokenizer(renderer.tokenizer)
        self.engine, self.renderer, self.sampling, self.drawn = engine, renderer, sampling, drawn
        self.limits, self.episode = limits, episode
        self.conversations = Conversations(renderer)
        self._fixed: dict[str, Any] = {name: getattr(sampling, name) for name in SAME_FOR_ALL_CALLS}
        self._fixed["stop"] = sampling.stop or renderer.stop
        self._numbering = CallNumbering(episode.seed)
        self._positions: list[CallPosition] = []
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_unused, self._is_closed = True, False

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        *,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> Message:
        text = None if schema is None else schema_text(schema)
        reply = (await self.call(messages, tools, stop=stop, schema=text)).reply
        assert reply is not None
        return reply

    async def call(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        *,
        stop: str | Sequence[str] = (),
        most: int | None = None,
        begins: str = "",
        schema: str | None = None,
    ) -> Call:
        """Sample the next message and return the whole call with its tokens. `schema` as in `Sampling`."""
        self._check_open()
        self._is_unused = False
        shown = read_messages(messages, where="model.chat, messages")
        if messages_exceed(shown, self.tokenizer, self.limits.max_context):
            size = sum(len(message.content) for message in shown)
            raise ContextFull(f"the messages have {size:,} characters, the context {self.limits.max_context} tokens")
        specs = read_tools(tools, where="model.chat, tools") if tools else ()
        prompt = self.conversations.prompt(shown, specs, begins)
        room = self.limits.max_context - len(prompt.tokens)
        if room < 1:
            raise ContextFull(f"the prompt has {len(prompt.tokens)} tokens, the context {self.limits.max_context}")
        turn = len(self.episode.turns)
        seed, position = self._numbering.next(prompt.tokens, shown, turn)
        sampling = Sampling(
            **self._fixed,
            max_tokens=min(self.sampling.max_tokens, room, room if most is None else most),
            seed=seed,
            stop_texts=(*self.sampling.stop_texts, *((stop,) if isinstance(stop, str) else stop)),
            schema=self.sampling.schema if schema is None else schema,
        )
        if sampling.edits_logits:
            self.engine.check_request(sampling)
        alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
        if (chat := self.engine.chat) is not None:
            completion, reply = await self._chat_completion(chat, shown, specs, sampling)
            written = self.renderer.split_completion(completion)
        else:
            completion, alternatives = await self._generate(prompt, sampling)
            written = self.renderer.split_completion(completion)
            reply = self.renderer.message(begins + written[0])
        call = Call(prompt.tokens, completion, turn, True, shown, reply, self.drawn, alternatives, sampling.schema)
        self._record(prompt, call, position, written)
        self._numbering.seed_of_reply[id(reply)] = seed
        return call

    async def _generate(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[Completion, tuple[tuple[tuple[int, float], ...], ...]]:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        top = TopLogprobs(self.num_top_logprobs) if self.num_top_logprobs else None
        more = {} if top is None else {"listener": top}
        try:
            with span("chat", gen_ai__operation__name="chat", gen_ai__usage__input_tokens=len(prompt.tokens)) as trace:
                with self.engine_time:
                    completion: Completion = await call_without_deadline(
                        ENGINE, self.engine.generate, prompt.tokens, sampling, session=self.episode.id, **more
                    )
                trace.note(
                    gen_ai__usage__output_tokens=len(completion.tokens),
                    gen_ai__response__finish_reasons=[completion.finish.value],
                )
        finally:
            self._waiting.discard(task)
        return completion, () if top is None else tuple(top.alternatives[: len(completion.tokens)])

    async def _chat_completion(
        self, chat: Callable[..., Any], messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling
    ) -> tuple[Completion, Message]:
        """From an engine that takes messages. The log-probabilities are unknown (NaN)."""
        reply, finish = await call_without_deadline(ENGINE, chat, messages, tools, sampling, session=self.episode.id)
        ids = self.renderer.encode(self.renderer.escape_reply(reply.content))
        tokens = (*ids, *(self.renderer.stop[:1] if finish is FinishReason.STOP else ()))
        return Completion(tokens, (math.nan,) * len(tokens), finish, NOT_SAMPLED), reply

    def _record(self, prompt: Prompt, call: Call, position: CallPosition, written: tuple[str, str]) -> None:
        self._check_open()
        at = bisect(self._positions, position)
        self._positions.insert(at, position)
        self.episode.calls.insert(at, call)
        self.conversations.record(prompt, call.completion, at, call.reply, written)

    def leave_out(self, message: Message) -> None:
        """Exclude the call that returned this message from training. It stays in the episode."""
        at = next(index for index, call in enumerate(self.episode.calls) if call.reply is message)
        self.episode.calls[at] = dataclasses.replace(self.episode.calls[at], trained=False)

    def close(self) -> None:
        """End the recording after the agent has returned. Calls of tasks that the agent left behind are cancelled and
        counted. So are episodes without any call."""
        self._is_closed = True
        abandoned = self._waiting - {asyncio.current_task()}
        for task in abandoned:
            task.cancel()
        if abandoned:
            self.count({"agent/abandoned_calls": float(len(abandoned))})
        if self._is_unused:
            self.count({"agent/silent": 1.0})

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("model.chat was called after the agent returned: await the tasks that the agent starts")

    def count(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.episode.metrics[name] = self.episode.metrics.get(name, 0.0) + value


class RecordedEnv(EnvWrapper):
    """An environment that records its turns in the episode and has a deadline for each call. Other methods (`actions`,
    `oracle`, `snapshot`, …) are passed on and not recorded."""

    def __init__(self, env: Env, name: str, limits: EpisodeLimits, episode: Episode):
        self.env, self.where = env, f"environment {name!r}"
        self.seconds = None if getattr(env, "has_own_deadline", False) else limits.step_seconds
        self.limits, self.episode = limits, episode
        self.key = ""
        self.is_reset = False

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode with the seed of the episode; the agent's `seed` is ignored."""
        self.is_reset = True
        env_seed = derive(self.episode.seed, "environment")
        observation = await call_with_deadline(self.where, self.seconds, self.env.reset, task, env_seed)
        self._check(observation_errors("reset()", observation))
        self.episode.opening = observation.messages
        self.key = observation.state_key
        return observation  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        """Take a step and record the turn. At the limit of turns the episode ends."""
        if inspect.iscoroutine(action):
            action.close()
            raise TypeError("env.step received a 'coroutine' object as action")
        if not self.is_reset:
            raise RuntimeError(
                "env.step before env.reset: an agent begins with `observation = await env.reset(task, task.seed)`"
            )
        step: Step = await call_with_deadline(self.where, self.seconds, self.env.step, action)
        self._check(step_errors(step))
        episode, observation = self.episode, step.observation
        episode.turns.append(Turn(action, observation.messages, float(step.reward), self.key, dict(step.info)))
        self.key = observation.state_key
        if step.over:
            episode.stop = StopReason.DONE if step.terminated else StopReason.TRUNCATED
        elif len(episode.turns) >= self.limits.max_turns:
            raise MaxTurns(f"{self.limits.max_turns} turns are used up")
        return step

    async def finish(self) -> None:
        metrics = await call_with_deadline(self.where, self.seconds, self.env.metrics)
        self._check(number_errors("metrics()", metrics, "metrics"))
        self.episode.metrics.update({name: float(value) for name, value in metrics.items()})

    async def close(self) -> None:
        await call_with_deadline(self.where, self.seconds, self.env.close)

    def _check(self, faults: Sequence[str]) -> None:
        if faults:
            raise EpisodeError(self.where, ValueError(" ".join(faults)))
