"""What an agent holds in its hands: a model and an environment that write down everything that passes.

`Recorder` is the model; `RecordedEnv` wraps the environment. Both fill one `Episode`. Limits (turns, context) are kept
here, so no agent can forget them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborl.busy_time import BusyTime
from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.fit import cannot_fit
from arborl.chat.messages import read_messages, read_tools
from arborl.chat.renderer import Renderer
from arborl.chat.tokenizer import TextTokenizer
from arborl.engines.engine import Engine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.validation import faults_of_numbers, faults_of_observation, faults_of_step
from arborl.envs.wrapper import PassingEnv
from arborl.errors import ContextFull, EpisodeError, MaxTurns
from arborl.rollout.call_order import Asking, Place
from arborl.rollout.deadlines import ENGINE, across, untimed
from arborl.rollout.processes import ProcessEnv
from arborl.rollout.rivals import Rivals
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
class Limits:
    """What one episode may take."""

    max_turns: int = 32
    max_context: int = 1024
    """Prompt and completion together, in tokens."""
    episode_seconds: float = 120.0
    step_seconds: float = 30.0


SAME_FOR_ALL_CALLS = frozenset(field.name for field in dataclasses.fields(Sampling)) - {
    "max_tokens",
    "seed",
    "stop_texts",
}


class Recorder:
    """The model as the agent sees it. Each call's ids and log-probabilities go into `episode.calls` as they were.

    Calls may overlap. A call's chance and its place among the others follow from what was asked, and never from what
    finished first; see `call_order.py`.

    Args:
        engine, renderer: the model.
        sampling: how tokens are drawn.
        limits: of the episode.
        episode: what is filled.
        drawn: is noted beside every call, where this episode draws otherwise than the run.
        asked: counts the seconds in which the engine is.
        rivals: of each token, to be noted beside every call; the engine must stream.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        limits: Limits,
        episode: Episode,
        drawn: SamplingDistribution | None = None,
        asked: BusyTime | None = None,
        rivals: int = 0,
    ):
        self.asked, self.rivals = BusyTime() if asked is None else asked, rivals
        self.tokenizer = TextTokenizer(renderer.tokenizer)
        """The model's, for text: limits on what tools answer are counted in its tokens."""
        self.engine, self.renderer, self.sampling, self.drawn = engine, renderer, sampling, drawn
        self.limits, self.episode = limits, episode
        self.conversations = Conversations(renderer)
        self._always: dict[str, Any] = {name: getattr(sampling, name) for name in SAME_FOR_ALL_CALLS}
        self._always["stop"] = sampling.stop or renderer.stop
        self._asking = Asking(episode.seed)
        self._places: list[Place] = []
        """Of the calls, which are kept in this order."""
        self._waiting: set[asyncio.Task[Any]] = set()
        self._silent, self._over = True, False

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        *,
        stop: str | Sequence[str] = (),
    ) -> Message:
        """Sample the next message; see `arborl.agents.Model`."""
        reply = (await self.call(messages, tools, stop=stop)).reply
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
    ) -> Call:
        """The same with its tokens, for who answers a program that is not in this process.

        Args:
            messages, tools, stop: as in `chat`.
            most: tokens to sample, where fewer are wanted than the run allows.
            begins: what the reply begins with; it is given to the model, and not sampled.
        """
        self._check_open()
        self._silent = False
        shown = read_messages(messages, where="model.chat, messages")
        if cannot_fit(shown, self.tokenizer, self.limits.max_context):
            size = sum(len(message.content) for message in shown)
            raise ContextFull(f"the messages have {size:,} characters, the context {self.limits.max_context} tokens")
        specs = read_tools(tools, where="model.chat, tools") if tools else ()
        prompt = self.conversations.prompt(shown, specs, begins)
        room = self.limits.max_context - len(prompt.tokens)
        if room < 1:
            raise ContextFull(f"the prompt has {len(prompt.tokens)} tokens, the context {self.limits.max_context}")
        turn = len(self.episode.turns)
        seed, place = self._asking.next(prompt.tokens, turn)
        sampling = Sampling(
            **self._always,
            max_tokens=min(self.sampling.max_tokens, room, room if most is None else most),
            seed=seed,
            stop_texts=(*self.sampling.stop_texts, *((stop,) if isinstance(stop, str) else stop)),
        )
        others: tuple[tuple[tuple[int, float], ...], ...] = ()
        if (chat := getattr(self.engine, "chat", None)) is not None:
            completion, reply = await self._chatted(chat, shown, specs, sampling)
            written = self.renderer.written(completion)
        else:
            completion, others = await self._generate(prompt, sampling)
            written = self.renderer.written(completion)
            reply = self.renderer.message(begins + written[0])
        call = Call(prompt.tokens, completion, turn, True, shown, reply, self.drawn, others)
        self._record(prompt, call, place, written)
        return call

    async def _generate(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[Completion, tuple[tuple[tuple[int, float], ...], ...]]:
        """What was sampled, and the rivals of each token where the run asks for them."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        heard = Rivals(self.rivals) if self.rivals else None
        more = {} if heard is None else {"heard": heard}
        try:
            with span("chat", gen_ai__operation__name="chat", gen_ai__usage__input_tokens=len(prompt.tokens)) as told:
                with self.asked:
                    said: Completion = await untimed(
                        ENGINE, self.engine.generate, prompt.tokens, sampling, session=self.episode.id, **more
                    )
                told.note(
                    gen_ai__usage__output_tokens=len(said.tokens), gen_ai__response__finish_reasons=[said.finish.value]
                )
        finally:
            self._waiting.discard(task)
        return said, () if heard is None else tuple(heard.heard[: len(said.tokens)])

    async def _chatted(
        self, chat: Callable[..., Any], messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling
    ) -> tuple[Completion, Message]:
        """From an engine that takes messages: what was said is on record, and nobody knows how likely it was."""
        reply, finish = await untimed(ENGINE, chat, messages, tools, sampling, session=self.episode.id)
        ids = self.renderer.encode(self.renderer.said(reply.content))
        tokens = (*ids, *(self.renderer.stop[:1] if finish is FinishReason.STOP else ()))
        return Completion(tokens, (math.nan,) * len(tokens), finish, NOT_SAMPLED), reply

    def _record(self, prompt: Prompt, call: Call, place: Place, written: tuple[str, str]) -> None:
        self._check_open()
        at = bisect(self._places, place)
        self._places.insert(at, place)
        self.episode.calls.insert(at, call)
        self.conversations.sampled(prompt, call.completion, at, call.reply, written)

    def leave_out(self, message: Message) -> None:
        """What the model said here is on record, and not trained on."""
        at = next(index for index, call in enumerate(self.episode.calls) if call.reply is message)
        self.episode.calls[at] = dataclasses.replace(self.episode.calls[at], trained=False)

    def close(self) -> None:
        """The agent has returned. Tasks it left behind are cancelled where they wait for the model: the episode is as
        it is now. That there were any, or that the model was never asked, is counted."""
        self._over = True
        left = self._waiting - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            self.count({"agent/abandoned_calls": float(len(left))})
        if self._silent:
            self.count({"agent/silent": 1.0})

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError("model.chat after the agent has returned: await the tasks that it starts")

    def count(self, metrics: Metrics) -> None:
        """Add numbers to the episode's metrics."""
        for name, value in metrics.items():
            self.episode.metrics[name] = self.episode.metrics.get(name, 0.0) + value


class RecordedEnv(PassingEnv):
    """An environment that writes its turns into the episode and answers within its deadline.

    What else an agent may ask of it (`actions`, `oracle`, `snapshot`, …) is passed on, and not recorded.

    Args:
        env: plays.
        name: what failures call it.
        limits: of the episode.
        episode: what is filled.
    """

    def __init__(self, env: Env, name: str, limits: Limits, episode: Episode):
        self.env, self.where = env, f"environment {name!r}"
        self.seconds = None if isinstance(env, ProcessEnv) else limits.step_seconds  # that one keeps time itself
        self.limits, self.episode = limits, episode
        self.key = ""
        self.opened = False

    async def reset(self, task: Task, seed: int) -> Observation:
        """Open the episode with its own seed, whatever the agent passes."""
        self.opened = True
        own = derive(self.episode.seed, "environment")
        observation = await across(self.where, self.seconds, self.env.reset, task, own)
        self._check(faults_of_observation("reset()", observation))
        self.episode.opening = observation.messages
        self.key = observation.state_key
        return observation  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        """Answer, record the turn, and end the episode when it is over or at its last turn."""
        if not self.opened:
            raise RuntimeError(
                "env.step before env.reset: an agent begins with `observation = await env.reset(task, task.seed)`"
            )
        step: Step = await across(self.where, self.seconds, self.env.step, action)
        self._check(faults_of_step(step))
        episode, observation = self.episode, step.observation
        episode.turns.append(Turn(action, observation.messages, float(step.reward), self.key, dict(step.info)))
        self.key = observation.state_key
        if step.over:
            episode.stop = StopReason.DONE if step.terminated else StopReason.TRUNCATED
        elif len(episode.turns) >= self.limits.max_turns:
            raise MaxTurns(f"{self.limits.max_turns} turns are used up")
        return step

    async def finish(self) -> None:
        """Take the environment's own numbers."""
        metrics = await across(self.where, self.seconds, self.env.metrics)
        self._check(faults_of_numbers("metrics()", metrics, "metrics"))
        self.episode.metrics.update({name: float(value) for name, value in metrics.items()})

    async def close(self) -> None:
        await across(self.where, self.seconds, self.env.close)

    def _check(self, faults: Sequence[str]) -> None:
        """What the environment returned is what its record promises, or the episode is over."""
        if faults:
            raise EpisodeError(self.where, ValueError(" ".join(faults)))
