"""Holds an environment to its contract: run it on yours before you train on it.

Two plays by one random, legal policy must be the same play; two openings of one task the same opening; and every field
must be of the type its record promises. Problems come back as sentences; the checker itself never raises.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, get_args

from arborl.envs.env import Env, Observation, Step
from arborl.errors import EpisodeError, boundary
from arborl.seeds import generator
from arborl.types import Message, Role, Task

SECONDS = 30.0
"""What one reset, step or close may take."""


def check_env(make: Callable[[], Env], task: Task, *, seed: int = 0, steps: int = 20) -> list[str]:
    """What is wrong with an environment; an empty list when nothing was found.

    Args:
        make: gives a fresh environment; it is called several times.
        task: one it can open.
        seed: of the episode's chance and of the policy that plays it.
        steps: length of a play, unless the environment ends it sooner.

    Example:
        assert check_env(FrozenLake, Task("t", seed=1)) == []
    """
    check = _Check(make, task, seed, steps)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(check.run())
    else:  # called from inside an event loop, as in a notebook
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, check.run()).result()
    return list(dict.fromkeys(check.problems))


def assert_env(make: Callable[[], Env], task: Task, *, seed: int = 0, steps: int = 20) -> None:
    """`check_env` as an assertion, for a test of your own."""
    problems = check_env(make, task, seed=seed, steps=steps)
    assert not problems, "the environment breaks its contract:\n" + "\n".join(f"- {problem}" for problem in problems)


@dataclass(slots=True)
class _Play:
    """What one play showed, for comparison with the next."""

    opening: Observation | None = None
    texts: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class _Check:
    make: Callable[[], Env]
    task: Task
    seed: int
    steps: int
    problems: list[str] = field(default_factory=list)

    async def run(self) -> None:
        try:
            first, second = await self._play(), await self._play()
            if not self.problems:  # a play that broke off says nothing about the other
                self._compare(first, second)
        except Exception as error:
            self.problems.append(f"the check stopped at {type(error).__name__}: {error}.")

    async def _play(self) -> _Play:
        """One episode from a fresh environment."""
        play = _Play()
        env: Env | None = None
        try:
            async with boundary("make()"):
                env = self.make()
            await self._moves(env, play)
            await self._reopen(env, play)
        except EpisodeError as error:
            self._raised(error)
        if env is not None:
            await self._close(env)
        return play

    async def _moves(self, env: Env, play: _Play) -> None:
        """Open the episode and play it with random, legal moves."""
        async with boundary("reset()", SECONDS):
            play.opening = await env.reset(self.task, self.seed)
        self.problems += faults_of_observation("reset()", play.opening)
        chance = generator(self.seed, "checker")
        for _ in range(self.steps):
            text = await self._choose(env, chance)
            async with boundary("step()", SECONDS):
                step = await env.step(Message("assistant", text))
            self.problems += faults_of_step(step)
            play.texts.append(text)
            play.steps.append(step)
            if getattr(step, "terminated", False) or getattr(step, "truncated", False):
                break
        async with boundary("metrics()"):
            self.problems += faults_of_numbers("metrics()", env.metrics(), "metrics")

    async def _choose(self, env: Env, chance: Any) -> str:
        async with boundary("actions()"):
            legal = env.actions()
        if not isinstance(legal, list) or not all(isinstance(text, str) for text in legal):
            self.problems.append(
                f"actions() returned {_show(legal)}: return a list of str, empty when any text is a move."
            )
            return "hello"
        return legal[int(chance.integers(len(legal)))] if legal else "hello"

    async def _reopen(self, env: Env, play: _Play) -> None:
        """The same object opens the same task again: nothing of the last episode, or of its chance, may show."""
        async with boundary("the second reset()", SECONDS):
            again = await env.reset(self.task, self.seed)
        if again != play.opening:
            what = "state_key" if _messages(again) == _messages(play.opening) else "messages"
            self.problems.append(
                f"reset() gave other {what} the second time, for the same task and seed: set every attribute of the "
                "episode anew in reset()."
            )
            return
        async with boundary("reset() with another seed", SECONDS):
            other = await env.reset(self.task, self.seed + 1)
        if _messages(other) != _messages(again):
            self.problems.append(
                "reset() gave other messages for another seed: draw the start state from task.seed and task.fields "
                "alone, so that all attempts of a group begin alike."
            )

    async def _close(self, env: Env) -> None:
        try:
            for call in ("close()", "the second close()"):
                async with boundary(call, SECONDS):
                    await env.close()
        except EpisodeError as error:
            self._raised(error)

    def _raised(self, error: EpisodeError) -> None:
        self.problems.append(f"{error.where} raised {type(error.cause).__name__}: {error.cause}.")

    def _compare(self, first: _Play, second: _Play) -> None:
        """The first difference between two plays that should be one."""
        if first.opening != second.opening:
            what = "state_key" if _messages(first.opening) == _messages(second.opening) else "messages"
            self.problems.append(
                f"reset() gave other {what} in a second environment, for the same task and seed: draw everything from "
                "task.seed, never from a shared or unseeded generator."
            )
            return
        for number, (one, other) in enumerate(zip(first.steps, second.steps, strict=False), 1):
            differs = _difference(one, other)
            if first.texts[number - 1] != second.texts[number - 1]:
                differs = "actions()"
            if differs == "state_key":
                self.problems.append(
                    f"step() gave another state_key on replay (step {number}), in an equal state: make it from the "
                    "state alone, with no counter, time or id()."
                )
            elif differs:
                self.problems.append(
                    f"step() gave another {differs} on replay (step {number}), for the same task, seed and messages: "
                    "draw chance from the seed given to reset()."
                )
            if differs:
                return


def faults_of_observation(where: str, observation: Any) -> list[str]:
    """What is wrong with the types of an observation."""
    if not isinstance(observation, Observation):
        return [f"{where} returned {_show(observation)} as observation: return an Observation."]
    found = []
    if not isinstance(observation.state_key, str):
        found.append(
            f"{where} returned state_key={_show(observation.state_key)}: return a str, equal for equal states."
        )
    if not isinstance(observation.messages, tuple):
        return [
            *found,
            f"{where} returned messages as {type(observation.messages).__name__}: return a tuple of Message.",
        ]
    for message in observation.messages:
        if not isinstance(message, Message):
            found.append(f"{where} returned {_show(message)} among messages: return Message(role, content).")
        elif not isinstance(message.content, str):
            found.append(f"{where} returned a message whose content is {_show(message.content)}: return a str.")
        elif message.role not in get_args(Role):
            found.append(
                f"{where} returned a message of role {message.role!r}: return one of {', '.join(get_args(Role))}."
            )
    return found


def faults_of_step(step: Any) -> list[str]:
    """What is wrong with the types of a step."""
    if not isinstance(step, Step):
        return [f"step() returned {_show(step)}: return a Step."]
    found = faults_of_observation("step()", step.observation)
    if not _finite(step.reward):
        found.append(f"step() returned reward={_show(step.reward)}: return a finite float.")
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(step, name), bool):
            found.append(f"step() returned {name}={_show(getattr(step, name))}: return True or False.")
    if step.terminated is True and step.truncated is True:
        found.append(
            "step() returned both terminated and truncated: return truncated only when the state was not final."
        )
    return found + faults_of_numbers("step()", step.info, "info")


def faults_of_numbers(where: str, given: Any, name: str) -> list[str]:
    """What is wrong with a mapping of names to numbers."""
    if not isinstance(given, Mapping):
        return [f"{where} returned {name}={_show(given)}: return a dict of numbers by name."]
    return [
        f"{where} returned {name}[{key!r}]={_show(value)}: return a finite number under a str."
        for key, value in given.items()
        if not isinstance(key, str) or not (isinstance(value, bool) or _finite(value))
    ]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _messages(observation: Any) -> Any:
    return getattr(observation, "messages", observation)


def _difference(one: Any, other: Any) -> str:
    """The name of the first field in which two steps differ; empty when they do not."""
    for name in ("reward", "terminated", "truncated", "info"):
        if repr(getattr(one, name, None)) != repr(getattr(other, name, None)):  # by repr: nan is nan
            return name
    left, right = getattr(one, "observation", None), getattr(other, "observation", None)
    if _messages(left) != _messages(right):
        return "observation"
    return "" if getattr(left, "state_key", "") == getattr(right, "state_key", "") else "state_key"


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"
