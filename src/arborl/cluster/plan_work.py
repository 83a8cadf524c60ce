"""What is to be done a step: how long prompts, replies and observations are, how many turns, how long tools take.

Given in a few numbers, or drawn from the episodes of an earlier run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError

P99 = 2.3263
"""Deviations above the mean below which 99 of 100 normal numbers are."""
FILES = 8
"""Steps of an earlier run that are read: the last."""


class Turn(NamedTuple):
    """One model call and what comes after it."""

    read: int
    """Tokens of its prompt that the episode's earlier calls have not read."""
    reply: int
    outside: float
    """Seconds that tools and environment take then."""


Script = tuple[Turn, ...]
"""An episode, as far as time is concerned."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number that differs: log-normal, by its median and 99th percentile."""

    median: float
    p99: float

    @classmethod
    def read(cls, text: str, option: str) -> Spread:
        """From `MEDIAN` or `MEDIAN,P99`."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or any(not 0 <= one < math.inf for one in numbers) or numbers[-1] < numbers[0]:
            raise ConfigError(f"{option} {text}: must be MEDIAN or MEDIAN,P99, such as 0.5,8.")
        return cls(numbers[0], numbers[-1])

    def draw(self, chance: random.Random) -> float:
        if self.p99 <= self.median or not self.median:
            return self.median
        return self.median * math.exp(chance.gauss(0, math.log(self.p99 / self.median) / P99))

    def __str__(self) -> str:
        return f"{self.median:g}" if self.p99 <= self.median else f"{self.median:g} (p99 {self.p99:g})"


@dataclass(frozen=True, slots=True)
class Work:
    """Episodes to be played."""

    draw: Callable[[random.Random], Script]
    told: str
    """What it is, in a line."""
    measured: Mapping[str, float]
    """Seconds of an earlier run's steps by part: `step`, `rollout`, `learn`; empty where there was none."""

    def alone(self, seed: int = 0, count: int = 4_096) -> tuple[tuple[int, float], ...]:
        """Of some episodes, the tokens they sample and the seconds they spend outside."""
        chance = random.Random(seed)
        scripts = [self.draw(chance) for _ in range(count)]
        return tuple((sum(turn.reply for turn in one), sum(turn.outside for turn in one)) for one in scripts)

    def mean(self, seed: int = 0, count: int = 256) -> Mean:
        """What an episode comes to on average."""
        chance = random.Random(seed)
        scripts = [self.draw(chance) for _ in range(count)]
        return Mean(
            prompt=fmean(script[0].read for script in scripts),
            tokens=fmean(sum(turn.read + turn.reply for turn in script) for script in scripts),
            sampled=fmean(sum(turn.reply for turn in script) for script in scripts),
            turns=fmean(len(script) for script in scripts),
            outside=fmean(sum(turn.outside for turn in script) for script in scripts),
            longest=max(sum(turn.read + turn.reply for turn in script) for script in scripts),
        )


def slowest(times: Sequence[float], of: int) -> float:
    """How long the slowest of so many takes, on average, where each takes one of these times."""
    ordered, count, below, found = sorted(times), len(times), 0.0, 0.0
    for at, one in enumerate(ordered, 1):
        upto = (at / count) ** of
        found += one * (upto - below)
        below = upto
    return found


@dataclass(frozen=True, slots=True)
class Mean:
    """An episode on average."""

    prompt: float
    """Tokens of the first prompt, which a group has in common."""
    tokens: float
    """Tokens in all, the first prompt included."""
    sampled: float
    turns: float
    outside: float
    longest: float
    """Tokens of the longest that was seen."""


def given(
    config: RunConfig,
    prompt: str | None = None,
    reply: str | None = None,
    observed: str | None = None,
    turns: int | None = None,
    tool: str | None = None,
) -> Work:
    """From a few numbers. What is not said is assumed by the run's limits, and said to be."""
    context, most = config.sampling.max_context, config.sampling.max_tokens
    alone = config.env.name == "question" and config.agent.name == "chat"
    replies = Spread.read(reply, "--reply-tokens") if reply else Spread(most, most)
    prompts = Spread.read(prompt, "--prompt-tokens") if prompt else Spread(context // 4, context // 4)
    between = Spread.read(observed, "--observed-tokens") if observed else Spread(most // 2, most // 2)
    tools = Spread.read(tool, "--tool-seconds") if tool else Spread(0, 0)
    if turns is None:
        fit = int((context - prompts.median + between.median) // max(1, replies.median + between.median))
        turns = 1 if alone else max(1, min(config.rollout.max_turns, fit))
    elif turns < 1:
        raise ConfigError(f"--turns {turns}: an episode has at least 1.")

    def draw(chance: random.Random) -> Script:
        script: list[Turn] = []
        room = float(context)
        for at in range(turns):
            read = max(1, round((between if at else prompts).draw(chance)))
            said = max(1, min(most, round(replies.draw(chance))))
            if script and read + said > room:
                break
            room -= read + said
            script.append(Turn(read, said, tools.draw(chance)))
        return tuple(script)

    said = {"prompt": prompt, "reply": reply, "observed": observed, "tool": tool}
    assumed = [name for name, one in said.items() if one is None]
    told = f"{turns} turns of {replies} tokens, a prompt of {prompts}, {between} observed in between, tools {tools} s"
    if assumed:
        told += f" (assumed: {', '.join(assumed)}; --from RUN or options say better)"
    return Work(draw, told, {})


def of_run(folder: Path) -> Work:
    """What an earlier run played in its last steps, each episode as it was."""
    if not (folder / "episodes").is_dir():
        raise ConfigError(f"--from {folder}: is no run's folder: it has no episodes/. Write runs/NAME.")
    scripts = []
    for path in sorted((folder / "episodes").glob("step-*.jsonl"))[-FILES:]:
        scripts += [script for row in _rows(path) if (script := _script(row))]
    if not scripts:
        raise ConfigError(f"--from {folder}: no episode in it has sampled anything. Choose another run.")
    measured = _measured(folder / "metrics.jsonl")
    work = Work(lambda chance: chance.choice(scripts), "", measured)
    mean = work.mean()
    told = (
        f"as {folder} played {len(scripts)} episodes: {mean.turns:.1f} turns, {mean.tokens:.0f} tokens of which "
        f"{mean.sampled:.0f} sampled, {mean.outside:.2f} s in tools and environment"
    )
    return Work(work.draw, told, measured)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if isinstance(row, Mapping):
                yield row


def _script(row: Mapping[str, Any]) -> Script:
    """Of a row of `episodes/`; empty for one that says nothing about time."""
    try:
        calls = [(len(call["prompt"][2]), len(call["tokens"]), float(call["seconds"])) for call in row["calls"]]
        calls = [call for call in calls if call[1]]
        outside = max(0.0, float(row["seconds"]) - sum(seconds for *_, seconds in calls))
    except (KeyError, TypeError, IndexError, ValueError):
        return ()
    return tuple(Turn(max(1, read), reply, outside / len(calls)) for read, reply, _ in calls)


def _measured(path: Path) -> dict[str, float]:
    """Seconds of the steps after the first, which warms up."""
    rows: Sequence[Mapping[str, Any]] = [row for row in _rows(path) if "time/step" in row] if path.is_file() else []
    names = ("step", "rollout", "learn")
    found = {name: [row[f"time/{name}"] for row in rows[1:] if f"time/{name}" in row] for name in names}
    return {name: fmean(values) for name, values in found.items() if values}
