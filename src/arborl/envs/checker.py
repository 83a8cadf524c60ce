"""The environment checker: tests an environment against the protocol. Run it on yours before training.

It checks that: two episodes of one random legal policy are equal; two resets with one task are equal; reading methods
change nothing; a restored snapshot continues as the original did; illegal messages get an observation; all fields have
the declared types (`validation.py`). Problems are returned as sentences; the checker itself never raises.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from arborl.envs.env import Env, Observation, Step
from arborl.envs.validation import (
    metrics_errors,
    observation_errors,
    picture_errors,
    policy_errors,
    short_repr,
    step_errors,
    view_errors,
)
from arborl.envs.wrapper import as_async_env
from arborl.errors import EpisodeError, boundary
from arborl.seeds import generator
from arborl.types import Message, Task

CALL_SECONDS = 30.0
POLL_SECONDS, GRACE_SECONDS = 0.05, 1.0
"""Interval between checks for a hanging call, and extra time for a cancelled call to end."""
MAX_PICTURES = 3
"""Pictures drawn per episode, besides the last."""
TAGGED = ("<answer></answer>", "<answer>banana</answer>", "</answer> <answer>")
ILLEGAL_MESSAGES = ("", "\n", "banana", *TAGGED, "é√\x00" * 500)


def check_env(
    make: Callable[[], Env], task: Task, *, seed: int = 0, steps: int = 20, seconds: float = CALL_SECONDS
) -> list[str]:
    """Problems of an environment; an empty list when it follows the protocol.

    The check runs in a thread, so a call that blocks is reported as a problem too.

    Args:
        make: returns a new environment; called several times.
        task: a task for `reset`.
        seed: seed of the episode and of the random policy.
        steps: maximum length of an episode.
        seconds: timeout of one call.

    Example:
        assert check_env(FrozenLake, Task("t", seed=1)) == []
    """
    check = _EnvCheck(make, task, seed, steps, seconds)
    thread = threading.Thread(target=check.run_in_thread, name="arborl-check", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        name, start = check.current_call
        if thread.is_alive() and time.monotonic() - start > seconds + GRACE_SECONDS:
            hung = f"{name} did not return within {seconds:g} s: it hangs or blocks."
            return list(dict.fromkeys([*check.problems, hung]))
    return list(dict.fromkeys(check.problems))


def assert_env(make: Callable[[], Env], task: Task, *, seed: int = 0, steps: int = 20) -> None:
    problems = check_env(make, task, seed=seed, steps=steps)
    assert not problems, "the environment violates the protocol:\n" + "\n".join(f"- {problem}" for problem in problems)


@dataclass(slots=True)
class _RecordedEpisode:
    """Observations of one episode, for comparison."""

    opening: Observation | None = None
    texts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class _EnvCheck:
    make: Callable[[], Env]
    task: Task
    seed: int
    steps: int
    seconds: float
    problems: list[str] = field(default_factory=list)
    current_call: tuple[str, float] = ("", math.inf)
    """Name and start time of the running call."""

    @asynccontextmanager
    async def call(self, name: str) -> AsyncIterator[None]:
        """Run one call of the environment: record its name, and convert its exception to EpisodeError."""
        async with boundary(name, self.seconds):
            self.current_call = name, time.monotonic()
            try:
                yield
            finally:
                self.current_call = "", math.inf

    def run_in_thread(self) -> None:
        try:
            asyncio.run(self.run())
        except BaseException as error:
            self.problems.append(f"the check stopped at {type(error).__name__}: {error}.")

    async def run(self) -> None:
        first, second = await self._record_episode(), await self._record_episode()
        if not self.problems:  # an incomplete episode cannot be compared
            self._compare(first, second)
        for check in (self._check_reading_methods, self._check_snapshots, self._check_illegal_messages):
            if not self.problems:
                await self._with_new_env(check, first)

    async def _record_episode(self) -> _RecordedEpisode:
        episode = _RecordedEpisode()
        await self._with_new_env(self._play_randomly, episode)
        return episode

    async def _with_new_env(
        self, check: Callable[[Env, _RecordedEpisode], Awaitable[None]], episode: _RecordedEpisode
    ) -> None:
        env: Env | None = None
        try:
            async with self.call("make()"):
                env = as_async_env(self.make())
            await check(env, episode)
        except EpisodeError as error:
            self._add_exception(error)
        if env is not None:
            await self._close(env)

    async def _reset(self, env: Env, name: str = "reset()", seed: int | None = None) -> Observation:
        async with self.call(name):
            return await env.reset(self.task, self.seed if seed is None else seed)

    async def _act(self, env: Env, text: str, name: str = "step()") -> Step:
        async with self.call(name):
            return await env.step(Message("assistant", text))

    async def _play_randomly(self, env: Env, episode: _RecordedEpisode) -> None:
        episode.opening = await self._reset(env)
        self.problems += observation_errors("reset()", episode.opening)
        rng = generator(self.seed, "checker")
        for _ in range(self.steps):
            text = await self._choose(env, rng)
            step = await self._act(env, text)
            self.problems += step_errors(step)
            episode.texts.append(text)
            episode.steps.append(step)
            if getattr(step, "terminated", False) or getattr(step, "truncated", False):
                break
        async with self.call("metrics()"):
            self.problems += metrics_errors(env.metrics())
        await self._check_second_reset(env, episode)

    async def _choose(self, env: Env, rng: Any) -> str:
        async with self.call("actions()"):
            legal = env.actions()
        if not isinstance(legal, list) or not all(isinstance(text, str) for text in legal):
            self.problems.append(
                f"actions() returned {short_repr(legal)}: return a list of str, empty when any text is legal."
            )
            return "hello"
        if legal:
            return legal[int(rng.integers(len(legal)))]
        async with self.call("random()"):
            text = env.random(rng)
        self.problems += policy_errors("random()", text)
        return text if isinstance(text, str) else "hello"

    async def _check_second_reset(self, env: Env, episode: _RecordedEpisode) -> None:
        """A second reset of the same object must not depend on the last episode."""
        again = await self._reset(env, "the second reset()")
        if again != episode.opening:
            what = "state_key" if _messages(again) == _messages(episode.opening) else "messages"
            self.problems.append(
                f"reset() returned other {what} the second time, for the same task and seed: set every attribute of "
                "the episode in reset()."
            )
            return
        other = await self._reset(env, "reset() with another seed", self.seed + 1)
        if _messages(other) != _messages(again):
            self.problems.append(
                "reset() returned other messages for another seed: derive the start state from task.seed and "
                "task.fields alone, so that all episodes of a group start equal."
            )

    async def _check_reading_methods(self, env: Env, first: _RecordedEpisode) -> None:
        """Replay the first episode with all reading methods called before every step."""
        observation = await self._reset(env)
        for number, (text, expected) in enumerate(zip(first.texts, first.steps, strict=True), 1):
            await self._read_all(env, observation, picture=number <= MAX_PICTURES)
            step = await self._act(env, text)
            observation = step.observation
            if differs := _difference(expected, step):
                self.problems.append(
                    f"step() returned another {differs} (step {number}) after render(), picture(), state_key(), "
                    "metrics(), oracle(), random() and snapshot(): these must not change the state or its generator."
                )
                return
        await self._read_all(env, observation)

    async def _read_all(self, env: Env, observation: Observation, picture: bool = True) -> None:
        async with self.call("render() or state_key()"):
            self.problems += view_errors(env)
            key = env.state_key()
        if picture:
            async with self.call("picture()"):
                self.problems += picture_errors(env.picture())
        if key and key != observation.state_key:
            self.problems.append(
                f"state_key() returned {short_repr(key)}, the observation has {short_repr(observation.state_key)}: "
                "return Observation(…, state_key=self.state_key())."
            )
        for name, ask in (("oracle()", env.oracle), ("random()", lambda: env.random(generator(self.seed, "look")))):
            async with self.call(name):
                self.problems += policy_errors(name, ask())
        async with self.call("metrics()"):
            self.problems += metrics_errors(env.metrics())
        async with self.call("snapshot()"):
            env.snapshot()

    async def _check_snapshots(self, env: Env, first: _RecordedEpisode) -> None:
        """Replay the second half of the first episode from a snapshot, in the same and in a new environment."""
        half = len(first.texts) // 2
        await self._reset(env)
        await self._steps(env, first.texts[:half])
        async with self.call("snapshot()"):
            snapshot = env.snapshot()
        if snapshot is None:
            return
        await self._steps(env, first.texts[half:])
        async with self.call("make()"):
            other = as_async_env(self.make())
        for target, target_name in ((env, "the same environment"), (other, "a new environment")):
            async with self.call("restore()"):
                target.restore(snapshot)
            again = await self._steps(target, first.texts[half:])
            differs = next(filter(None, map(_difference, first.steps[half:], again)), "")
            if differs:
                self.problems.append(
                    f"step() returned another {differs} after restore() in {target_name}: snapshot() must copy "
                    "everything that the rest of the episode depends on, random state included."
                )
                break
        await self._close(other)

    async def _steps(self, env: Env, texts: Sequence[str]) -> list[Step]:
        return [await self._act(env, text) for text in texts]

    async def _check_illegal_messages(self, env: Env, first: _RecordedEpisode) -> None:
        """Every illegal message gets an observation, with `valid` 0 where the legal actions are listed."""
        for text in ILLEGAL_MESSAGES:
            await self._reset(env)
            async with self.call("actions()"):
                listed = env.actions()
            step = await self._act(env, text, f"step() on the message {short_repr(text)}")
            self.problems += step_errors(step)
            if listed and text not in listed and isinstance(step, Step) and step.info.get("valid"):
                self.problems.append(
                    f"step() returned info['valid']={short_repr(step.info['valid'])} for {short_repr(text)}, which is "
                    "not among actions(): return 0 for an illegal message."
                )
        async with self.call("metrics()"):
            self.problems += metrics_errors(env.metrics())

    async def _close(self, env: Env) -> None:
        try:
            for call in ("close()", "the second close()"):
                async with self.call(call):
                    await env.close()
        except EpisodeError as error:
            self._add_exception(error)

    def _add_exception(self, error: EpisodeError) -> None:
        self.problems.append(f"{error.where} raised {type(error.cause).__name__}: {error.cause}.")

    def _compare(self, first: _RecordedEpisode, second: _RecordedEpisode) -> None:
        if first.opening != second.opening:
            what = "state_key" if _messages(first.opening) == _messages(second.opening) else "messages"
            self.problems.append(
                f"reset() returned other {what} in a second environment, for the same task and seed: derive the start "
                "state from task.seed, never from a shared or unseeded generator."
            )
            return
        for number, (one, other) in enumerate(zip(first.steps, second.steps, strict=False), 1):
            differs = _difference(one, other)
            if first.texts[number - 1] != second.texts[number - 1]:
                differs = "actions()"
            if differs == "state_key":
                self.problems.append(
                    f"step() returned another state_key on replay (step {number}), in an equal state: compute it "
                    "from the state alone, without counters, time or id()."
                )
            elif differs:
                self.problems.append(
                    f"step() returned another {differs} on replay (step {number}), for the same task, seed and "
                    "messages: seed all randomness with the seed of reset()."
                )
            if differs:
                return


def _messages(observation: Any) -> Any:
    return getattr(observation, "messages", observation)


def _difference(one: Any, other: Any) -> str:
    """Name of the first field in which two steps differ; empty when they are equal."""
    for name in ("reward", "terminated", "truncated", "info"):
        if repr(getattr(one, name, None)) != repr(getattr(other, name, None)):  # by repr: nan is nan
            return name
    left, right = getattr(one, "observation", None), getattr(other, "observation", None)
    if _messages(left) != _messages(right):
        return "observation"
    return "" if getattr(left, "state_key", "") == getattr(right, "state_key", "") else "state_key"
