"""A trial: one setting, tried. And what a study asks of whoever tries it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from arborl.errors import ArborError, ConfigError, did_you_mean
from arborl.tune.space import Params, Space

Direction = Literal["maximize", "minimize"]
State = Literal["done", "pruned", "failed", "lost", "running"]
"""`lost`: its process ended in the middle of it. Such a trial does not count, and is tried again."""


class Report(Protocol):
    """What an objective is given to say how it goes. Called with how far it is and its number there, it answers whether
    to stop: then what it returns no longer matters."""

    @property
    def trial(self) -> int:
        """The trial's number."""
        ...

    @property
    def folder(self) -> Path:
        """A place of the trial's own; not made yet."""
        ...

    def __call__(self, step: int, value: float) -> bool: ...


Objective = Callable[[Params, Report], Awaitable[float]]
"""Try these parameters: what they were worth. None at all are the settings as they are."""


class EndsStudy(ConfigError):
    """Wrong in a way that every trial would be."""


def require_some(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number >= 1. Write {name}=1 or more.")


@dataclass(frozen=True, slots=True)
class Plan:
    """A study: what is searched, how often, and where it is kept."""

    space: Space
    trials: int
    """In all, that of the settings as they are included. Those of a study that goes on count too."""
    folder: Path
    direction: Direction = "maximize"
    pruning: bool = True
    """Stop a trial that is worse on its way than the median of the others was there."""
    seed: int = 0
    jobs: int = 1
    """Trials at once."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """What the settings as they are say of the parameters, as far as that is known."""

    def __post_init__(self) -> None:
        require_some("trials", self.trials)
        require_some("jobs", self.jobs)
        if self.direction not in ("maximize", "minimize"):
            near = did_you_mean(str(self.direction), ("maximize", "minimize"))
            raise ConfigError(f"direction={self.direction!r} must be maximize or minimize.{near}")

    def folder_of(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03}"

    def better(self, one: float, other: float) -> bool:
        return one > other if self.direction == "maximize" else one < other

    @property
    def known(self) -> Params:
        """Of the settings as they are, what lies in the space."""
        return {
            name: self.default[name] for name, domain in self.space.items() if domain.contains(self.default.get(name))
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one."""

    number: int
    params: Params
    state: State
    value: float | None = None
    """At its end; of a pruned one, where it was stopped."""
    reason: str = ""
    """Why it failed."""
    seconds: float = 0.0
    default: bool = False
    """Whether it is the settings as they are."""
    folder: str = ""
    """What it left, within the study's folder."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    state: State
    value: float | None
    reason: str
    seconds: float


async def attempt(objective: Objective, params: Params, report: Report, stopped: Callable[[], bool]) -> Outcome:
    """Try once. Whatever goes wrong costs this trial alone, unless it would be wrong in all of them.

    Args:
        objective: tries.
        params: what.
        report: on the way.
        stopped: whether the trial was told to stop.
    """
    began = time.monotonic()

    def ended(state: State, value: float | None = None, reason: str = "") -> Outcome:
        return Outcome(state, value, reason, round(time.monotonic() - began, 3))

    try:
        value = float(await objective(dict(params), report))
    except (EndsStudy, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if stopped():  # one way to stop is to raise
            return ended("pruned")
        return ended("failed", None, told(error))
    if stopped():
        return ended("pruned", value if math.isfinite(value) else None)
    return ended("done", value) if math.isfinite(value) else ended("failed", None, f"its value is {value}")


def told(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())
    said = words if isinstance(error, ArborError) else f"{type(error).__name__}: {words}".rstrip(": ")
    return said if len(said) <= 500 else said[:497] + "..."
