"""What an agent holds in its hands: a model and an environment that write down everything that passes.

`Recorder` is the model; `RecordedEnv` wraps the environment. Both fill one `Episode`. Limits (turns, context) are kept
here, so no agent can forget them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from arborl.chat.conversation import Conversations
from arborl.chat.renderer import Renderer
from arborl.engines.engine import Engine
from arborl.envs.env import Env, Observation, Step
from arborl.errors import ContextFull, MaxTurns, boundary
from arborl.seeds import derive
from arborl.types import Call, Episode, Message, Metrics, Sampling, Stop, Task, ToolSpec, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may take."""

    max_turns: int = 32
    max_context: int = 1024
    """Prompt and completion together, in tokens."""
    episode_seconds: float = 120.0
    step_seconds: float = 30.0


class Recorder:
    """The model as the agent sees it. Each call's ids and log-probabilities go into `episode.calls` as they were."""

    def __init__(self, engine: Engine, renderer: Renderer, sampling: Sampling, limits: Limits, episode: Episode):
        self.engine, self.renderer, self.sampling = engine, renderer, sampling
        self.limits, self.episode = limits, episode
        self.conversations = Conversations(renderer)

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Sample the next message; see `arborl.agents.Model`."""
        prompt = self.conversations.prompt(messages, tools)
        room = self.limits.max_context - len(prompt.tokens)
        if room < 1:
            raise ContextFull(f"the prompt has {len(prompt.tokens)} tokens, the context {self.limits.max_context}")
        sampling = dataclasses.replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, room),
            seed=derive(self.episode.seed, "sampling", len(self.episode.calls)),
            stop=self.sampling.stop or self.renderer.stop,
        )
        async with boundary("engine"):
            completion = await self.engine.generate(prompt.tokens, sampling, session=self.episode.id)
        self.episode.calls.append(Call(tuple(prompt.tokens), completion, turn=len(self.episode.turns)))
        self.conversations.sampled(prompt, completion)
        return self.renderer.read(completion)

    def count(self, metrics: Metrics) -> None:
        """Add numbers to the episode's metrics."""
        for name, value in metrics.items():
            self.episode.metrics[name] = self.episode.metrics.get(name, 0.0) + value


class RecordedEnv(Env):
    """An environment that writes its turns into the episode and answers within its deadline."""

    def __init__(self, env: Env, name: str, limits: Limits, episode: Episode):
        self.env, self.where = env, f"environment {name!r}"
        self.limits, self.episode = limits, episode
        self.state_key = ""

    async def reset(self, task: Task, seed: int) -> Observation:
        """Open the episode with its own seed, whatever the agent passes."""
        async with boundary(self.where, self.limits.step_seconds):
            observation = await self.env.reset(task, derive(self.episode.seed, "environment"))
            _check_messages(observation.messages)
        self.episode.opening = observation.messages
        self.state_key = observation.state_key
        return observation

    async def step(self, action: Message) -> Step:
        """Answer, record the turn, and end the episode when it is over or at its last turn."""
        async with boundary(self.where, self.limits.step_seconds):
            step = await self.env.step(action)
            _check_step(step)
        turn = Turn(action, step.observation.messages, float(step.reward), self.state_key, dict(step.info))
        self.episode.turns.append(turn)
        self.state_key = step.observation.state_key
        if step.over:
            self.episode.stop = Stop.DONE if step.terminated else Stop.TRUNCATED
        elif len(self.episode.turns) >= self.limits.max_turns:
            raise MaxTurns(f"{self.limits.max_turns} turns are used up")
        return step

    async def finish(self) -> None:
        """Take the environment's own numbers."""
        async with boundary(self.where, self.limits.step_seconds):
            metrics = self.env.metrics()
            for name, value in metrics.items():
                if not _is_number(value):
                    raise ValueError(f"metrics()[{name!r}] is {value!r}; return a finite number")
        self.episode.metrics.update({name: float(value) for name, value in metrics.items()})

    async def close(self) -> None:
        async with boundary(self.where, self.limits.step_seconds):
            await self.env.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, tuple) or not all(isinstance(m, Message) for m in messages):
        raise TypeError(f"observation.messages is {type(messages).__name__}; return a tuple of Message")
    for message in messages:
        if not isinstance(message.content, str):
            raise TypeError(f"a message's content is {type(message.content).__name__}; return text")


def _check_step(step: object) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"step() returned {type(step).__name__}; return arborl.Step(observation, reward, …)")
    _check_messages(step.observation.messages)
    if not _is_number(step.reward):
        raise ValueError(f"reward is {step.reward!r}; return a finite number")
    for name, value in step.info.items():
        if not _is_number(value):
            raise ValueError(f"info[{name!r}] is {value!r}; return a finite number")
