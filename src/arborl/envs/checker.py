"""Holds an environment to its contract: run it on yours before you train on it.

Two plays by one random, legal policy must be the same play; two openings of one task the same opening; looking must
change nothing; a snapshot must continue as the original did; nonsense must be answered; and every field must be of the
type its record promises (`validation.py`). Problems come back as sentences; the checker itself never raises.
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
    fault_of_policy,
    faults_of_looks,
    faults_of_metrics,
    faults_of_observation,
    faults_of_picture,
    faults_of_step,
    show,
)
from arborl.envs.wrapper import awaited
from arborl.errors import EpisodeError, boundary
from arborl.seeds import generator
from arborl.types import Message, Task

SECONDS = 30.0
"""What one call may take."""
LOOK, GRACE = 0.05, 1.0
"""Seconds between looks at a call; and what a call that is told to stop has to do so."""
PICTURES = 3
"""Pictures asked for in one play, besides the last: some take long to draw."""
NONSENSE = ("", "\n", "banana", "<answer></answer>", "<answer>banana</answer>", "</answer> <answer>", "é√\x00" * 500)
"""What models say when they have no idea."""


def check_env(
    make: Callable[[], Env], task: Task, *, seed: int = 0, steps: int = 20, seconds: float = SECONDS
) -> list[str]:
    """What is wrong with an environment; an empty list when nothing was found.

    The check runs in a thread and is watched from here: a call that blocks, async or not, ends it with a problem too.

    Args:
        make: gives a fresh environment; it is called several times.
        task: one it can open.
        seed: of the episode's chance and of the policy that plays it.
        steps: length of a play, unless the environment ends it sooner.
        seconds: what one call may take.

    Example:
        assert check_env(FrozenLake, Task("t", seed=1)) == []
    """
    check = _Check(make, task, seed, steps, seconds)
    thread = threading.Thread(target=check.work, name="arborl-check", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
        name, began = check.doing
        if thread.is_alive() and time.monotonic() - began > seconds + GRACE:
            hung = f"{name} did not come back within {seconds:g} s: it hangs, or blocks for longer."
            return list(dict.fromkeys([*check.problems, hung]))
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
    seconds: float
    problems: list[str] = field(default_factory=list)
    doing: tuple[str, float] = ("", math.inf)
    """The call that is being made, and since when."""

    @asynccontextmanager
    async def call(self, name: str) -> AsyncIterator[None]:
        """One call of the environment: what it raises is attributed to it, and it is known to be under way."""
        async with boundary(name, self.seconds):
            self.doing = name, time.monotonic()
            try:
                yield
            finally:
                self.doing = "", math.inf

    def work(self) -> None:
        """The whole check, in a thread of its own: there, whatever ends it is the environment's doing."""
        try:
            asyncio.run(self.run())
        except BaseException as error:
            self.problems.append(f"the check stopped at {type(error).__name__}: {error}.")

    async def run(self) -> None:
        first, second = await self._play(), await self._play()
        if not self.problems:  # a play that broke off says nothing about the other
            self._compare(first, second)
        for further in (self._watch, self._branch, self._babble):
            if not self.problems:
                await self._fresh(further, first)

    async def _play(self) -> _Play:
        """One episode from a fresh environment."""
        play = _Play()

        async def whole(env: Env, play: _Play) -> None:
            await self._moves(env, play)
            await self._reopen(env, play)

        await self._fresh(whole, play)
        return play

    async def _fresh(self, part: Callable[[Env, _Play], Awaitable[None]], play: _Play) -> None:
        """Do this part of the check with an environment of its own; what it raises is a problem."""
        env: Env | None = None
        try:
            async with self.call("make()"):
                env = awaited(self.make())
            await part(env, play)
        except EpisodeError as error:
            self._raised(error)
        if env is not None:
            await self._close(env)

    async def _moves(self, env: Env, play: _Play) -> None:
        """Open the episode and play it with random, legal moves."""
        async with self.call("reset()"):
            play.opening = await env.reset(self.task, self.seed)
        self.problems += faults_of_observation("reset()", play.opening)
        chance = generator(self.seed, "checker")
        for _ in range(self.steps):
            text = await self._choose(env, chance)
            async with self.call("step()"):
                step = await env.step(Message("assistant", text))
            self.problems += faults_of_step(step)
            play.texts.append(text)
            play.steps.append(step)
            if getattr(step, "terminated", False) or getattr(step, "truncated", False):
                break
        async with self.call("metrics()"):
            self.problems += faults_of_metrics(env.metrics())

    async def _choose(self, env: Env, chance: Any) -> str:
        async with self.call("actions()"):
            legal = env.actions()
        if not isinstance(legal, list) or not all(isinstance(text, str) for text in legal):
            self.problems.append(
                f"actions() returned {show(legal)}: return a list of str, empty when any text is a move."
            )
            return "hello"
        if legal:
            return legal[int(chance.integers(len(legal)))]
        async with self.call("random()"):
            text = env.random(chance)
        self.problems += fault_of_policy("random()", text)
        return text if isinstance(text, str) else "hello"

    async def _reopen(self, env: Env, play: _Play) -> None:
        """The same object opens the same task again: nothing of the last episode, or of its chance, may show."""
        async with self.call("the second reset()"):
            again = await env.reset(self.task, self.seed)
        if again != play.opening:
            what = "state_key" if _messages(again) == _messages(play.opening) else "messages"
            self.problems.append(
                f"reset() gave other {what} the second time, for the same task and seed: set every attribute of the "
                "episode anew in reset()."
            )
            return
        async with self.call("reset() with another seed"):
            other = await env.reset(self.task, self.seed + 1)
        if _messages(other) != _messages(again):
            self.problems.append(
                "reset() gave other messages for another seed: draw the start state from task.seed and task.fields "
                "alone, so that all attempts of a group begin alike."
            )

    async def _watch(self, env: Env, first: _Play) -> None:
        """The first play again, looked at from all sides before every step: looking must not change anything."""
        async with self.call("reset()"):
            seen = await env.reset(self.task, self.seed)
        for number, (text, expected) in enumerate(zip(first.texts, first.steps, strict=True), 1):
            await self._look(env, seen, picture=number <= PICTURES)
            async with self.call("step()"):
                step = await env.step(Message("assistant", text))
            seen = step.observation
            if differs := _difference(expected, step):
                self.problems.append(
                    f"step() gave another {differs} (step {number}) after render(), picture(), state_key(), metrics(), "
                    "oracle(), random() and snapshot() had been called: looking must not change the state, or draw "
                    "from its chance."
                )
                return
        await self._look(env, seen)

    async def _look(self, env: Env, seen: Observation, picture: bool = True) -> None:
        async with self.call("render() or state_key()"):
            self.problems += faults_of_looks(env)
            key = env.state_key()
        if picture:
            async with self.call("picture()"):
                self.problems += faults_of_picture(env.picture())
        if key and key != seen.state_key:
            self.problems.append(
                f"state_key() returned {show(key)} where the observation says {show(seen.state_key)}: give "
                "Observation(…, state_key=self.state_key())."
            )
        for name, ask in (("oracle()", env.oracle), ("random()", lambda: env.random(generator(self.seed, "look")))):
            async with self.call(name):
                self.problems += fault_of_policy(name, ask())
        async with self.call("metrics()"):
            self.problems += faults_of_metrics(env.metrics())
        async with self.call("snapshot()"):
            env.snapshot()

    async def _branch(self, env: Env, first: _Play) -> None:
        """From the middle of the first play: the rest, then the rest again from a snapshot, here and elsewhere."""
        half = len(first.texts) // 2
        async with self.call("reset()"):
            await env.reset(self.task, self.seed)
        await self._steps(env, first.texts[:half])
        async with self.call("snapshot()"):
            kept = env.snapshot()
        if kept is None:
            return
        await self._steps(env, first.texts[half:])
        async with self.call("make()"):
            other = awaited(self.make())
        for place, place_name in ((env, "the same environment"), (other, "a fresh environment")):
            async with self.call("restore()"):
                place.restore(kept)
            again = await self._steps(place, first.texts[half:])
            differs = next(filter(None, map(_difference, first.steps[half:], again)), "")
            if differs:
                self.problems.append(
                    f"step() gave another {differs} after restore() in {place_name}: snapshot() must keep all that the "
                    "rest of the episode depends on, chance included, and later steps must not change it."
                )
                break
        await self._close(other)

    async def _steps(self, env: Env, texts: Sequence[str]) -> list[Step]:
        steps = []
        for text in texts:
            async with self.call("step()"):
                steps.append(await env.step(Message("assistant", text)))
        return steps

    async def _babble(self, env: Env, first: _Play) -> None:
        """Each piece of nonsense at the opening: it is answered, and counts as no move where moves can be listed."""
        for text in NONSENSE:
            async with self.call("reset()"):
                await env.reset(self.task, self.seed)
            async with self.call("actions()"):
                listed = env.actions()
            async with self.call(f"step() on the message {show(text)}"):
                step = await env.step(Message("assistant", text))
            self.problems += faults_of_step(step)
            if listed and text not in listed and isinstance(step, Step) and step.info.get("valid"):
                self.problems.append(
                    f"step() returned info['valid']={show(step.info['valid'])} for {show(text)}, which is not among "
                    "actions(): return 0 for a message that is no move."
                )
        async with self.call("metrics()"):
            self.problems += faults_of_metrics(env.metrics())

    async def _close(self, env: Env) -> None:
        try:
            for call in ("close()", "the second close()"):
                async with self.call(call):
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
