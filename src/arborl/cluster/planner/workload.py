"""Lengths, turns and tool latencies of episodes: from options of `arborl plan`, or from an earlier run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError

P99 = 2.3263
"""99th percentile of the standard normal distribution."""
STEPS_READ = 8
"""Last steps of an earlier run that are read."""
SAMPLE_SIZE = 1_024
"""Episodes that are drawn for an estimate."""


class TurnProfile(NamedTuple):
    """One model call and the environment's answer, as far as time is concerned."""

    prompt_tokens: int
    """Prompt tokens that earlier calls of the episode have not read."""
    sampled_tokens: int
    outside_seconds: float
    """Time of tools and environment after the call."""


EpisodeProfile = tuple[TurnProfile, ...]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution, by its median and 99th percentile."""

    median: float
    p99: float

    @classmethod
    def parse(cls, text: str, option: str) -> LogNormal:
        """From `MEDIAN` or `MEDIAN,P99`."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or any(not 0 <= one < math.inf for one in numbers) or numbers[-1] < numbers[0]:
            raise ConfigError(f"{option} {text}: must be MEDIAN or MEDIAN,P99, such as 0.5,8.")
        return cls(numbers[0], numbers[-1])

    def draw(self, rng: random.Random) -> float:
        if self.p99 <= self.median or not self.median:
            return self.median
        return self.median * math.exp(rng.gauss(0, math.log(self.p99 / self.median) / P99))

    def __str__(self) -> str:
        return f"{self.median:g}" if self.p99 <= self.median else f"{self.median:g} (p99 {self.p99:g})"


@dataclass(frozen=True, slots=True)
class EpisodeSample:
    """Episodes drawn from a workload."""

    sampled: NDArray[np.float64]
    """Sampled tokens of each episode."""
    outside: NDArray[np.float64]
    """Seconds that each episode spends in tools and environment."""
    prompt: float
    """Mean tokens of the first prompt, which a group shares."""
    observed: float
    """Mean prompt tokens of the later turns."""
    turns: float
    longest: float
    """Tokens of the longest episode."""

    @property
    def tokens(self) -> float:
        """Mean tokens of an episode."""
        return self.prompt + self.observed + float(self.sampled.mean())


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of episodes."""

    draw: Callable[[random.Random], EpisodeProfile]
    description: str
    measured: Mapping[str, float]
    """Seconds per step of an earlier run: `step`, `rollout`, `learn`; empty without one."""

    def sample(self, seed: int = 0, count: int = SAMPLE_SIZE) -> EpisodeSample:
        rng = random.Random(seed)
        episodes = [self.draw(rng) for _ in range(count)]
        return EpisodeSample(
            np.array([sum(turn.sampled_tokens for turn in one) for one in episodes], dtype=float),
            np.array([sum(turn.outside_seconds for turn in one) for one in episodes], dtype=float),
            prompt=fmean(one[0].prompt_tokens for one in episodes),
            observed=fmean(sum(turn.prompt_tokens for turn in one[1:]) for one in episodes),
            turns=fmean(len(one) for one in episodes),
            longest=max(sum(turn.prompt_tokens + turn.sampled_tokens for turn in one) for one in episodes),
        )


def workload_from_options(
    config: RunConfig,
    prompt: str | None = None,
    reply: str | None = None,
    observed: str | None = None,
    turns: int | None = None,
    tool: str | None = None,
) -> Workload:
    """From the options of `arborl plan`. Missing ones follow from the run's limits; the description names them."""
    context, max_tokens = config.sampling.max_context, config.sampling.max_tokens
    single_turn = config.env.name == "question" and config.agent.name == "chat"
    replies = LogNormal.parse(reply, "--reply-tokens") if reply else LogNormal(max_tokens, max_tokens)
    prompts = LogNormal.parse(prompt, "--prompt-tokens") if prompt else LogNormal(context // 4, context // 4)
    half = max_tokens // 2
    observations = LogNormal.parse(observed, "--observed-tokens") if observed else LogNormal(half, half)
    tools = LogNormal.parse(tool, "--tool-seconds") if tool else LogNormal(0, 0)
    if turns is None:
        per_turn = max(1, replies.median + observations.median)
        fitting = int((context - prompts.median + observations.median) // per_turn)
        turns = 1 if single_turn else max(1, min(config.rollout.max_turns, fitting))
    elif turns < 1:
        raise ConfigError(f"--turns {turns}: must be at least 1.")

    def draw(rng: random.Random) -> EpisodeProfile:
        episode: list[TurnProfile] = []
        left = float(context)
        for turn in range(turns):
            read = max(1, round((observations if turn else prompts).draw(rng)))
            sampled = max(1, min(max_tokens, round(replies.draw(rng))))
            if episode and read + sampled > left:
                break
            left -= read + sampled
            episode.append(TurnProfile(read, sampled, tools.draw(rng)))
        return tuple(episode)

    options = {"prompt": prompt, "reply": reply, "observed": observed, "tool": tool}
    assumed = [name for name, value in options.items() if value is None]
    text = f"{turns} turns of {replies} tokens, prompt {prompts}, {observations} observed per turn, tools {tools} s"
    if assumed:
        text += f" (assumed: {', '.join(assumed)}; set by options or --from RUN)"
    return Workload(draw, text, {})


def workload_from_run(folder: Path) -> Workload:
    """The episodes of an earlier run's last steps."""
    if not (folder / "episodes").is_dir():
        raise ConfigError(f"--from {folder}: not a run folder: it has no episodes/. Write runs/NAME.")
    episodes = []
    for path in sorted((folder / "episodes").glob("step-*.jsonl"))[-STEPS_READ:]:
        episodes += [profile for row in _rows(path) if (profile := _profile(row))]
    if not episodes:
        raise ConfigError(f"--from {folder}: it has no episode with sampled tokens. Write another run.")
    measured = _measured(folder / "metrics.jsonl")
    workload = Workload(lambda rng: rng.choice(episodes), "", measured)
    sample = workload.sample()
    text = (
        f"{len(episodes)} episodes of {folder}: {sample.turns:.1f} turns, {sample.tokens:.0f} tokens, "
        f"{sample.sampled.mean():.0f} of them sampled, {sample.outside.mean():.2f} s in tools and environment"
    )
    return Workload(workload.draw, text, measured)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # an incomplete last line
                continue
            if isinstance(row, Mapping):
                yield row


def _profile(row: Mapping[str, Any]) -> EpisodeProfile:
    """Of a row of `episodes/`; empty without times."""
    try:
        calls = [(len(call["prompt"][2]), len(call["tokens"]), float(call["seconds"])) for call in row["calls"]]
        calls = [call for call in calls if call[1]]
        outside = max(0.0, float(row["seconds"]) - sum(seconds for *_, seconds in calls))
    except (KeyError, TypeError, IndexError, ValueError):
        return ()
    return tuple(TurnProfile(max(1, read), sampled, outside / len(calls)) for read, sampled, _ in calls)


def _measured(path: Path) -> dict[str, float]:
    """Mean seconds per step, without the first step."""
    rows: Sequence[Mapping[str, Any]] = [row for row in _rows(path) if "time/step" in row] if path.is_file() else []
    names = ("step", "rollout", "learn")
    values = {name: [row[f"time/{name}"] for row in rows[1:] if f"time/{name}" in row] for name in names}
    return {name: fmean(times) for name, times in values.items() if times}
