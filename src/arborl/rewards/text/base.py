"""Rewards that read turns. Each is a reward of `arborl.rewards` too, and may be used wherever one may."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, overload

from arborl.rewards.plain_calls import call
from arborl.rewards.reward import numbers
from arborl.rewards.text.turns import ConversationTurn, turns_of
from arborl.types import Episode

Turns = Sequence[ConversationTurn]
Context = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score, and what it is made of."""

    score: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Parts, by name, for people to read; only the score is learned from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class RewardFunction(ABC):
    """A reward as a class. Inherit, and say what a conversation is worth.

    Args:
        weight: of this reward among others.
        name: what it is called in metrics; by default after the class.

    Example:
        class Short(RewardFunction):
            async def compute_reward(self, turns, context=None):
                return RewardResult(1.0 if len(turns[-1].content) < 200 else 0.0)
    """

    def __init__(self, weight: float = 1.0, name: str | None = None):
        self.name = name or _snake(type(self).__name__.removesuffix("Reward"))
        self.weight = finite(weight, f"{self.name}.weight")

    @abstractmethod
    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult | float:
        """What these turns are worth. `context` holds the fields of the task, that is the scenario; in a run also
        `metrics`, what the environment measured."""

    async def __call__(self, episode: Episode) -> float:
        """The score. Its parts go into the episode's metrics, as `reward/<name>/<part>`."""
        context = {"metrics": dict(episode.metrics), **episode.task.fields}
        found = await self.compute_reward(turns_of(episode), context)
        if not isinstance(found, RewardResult):
            return found
        episode.metrics |= numbers(f"reward/{self.name}", dict(found.breakdown))
        return found.score


class _OfFunction(RewardFunction):
    def __init__(self, function: Callable[..., Any], weight: float, name: str | None):
        super().__init__(weight, name or function.__name__)
        self.function = function
        functools.update_wrapper(self, function, updated=())

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult | float:
        return await call(self.function, turns, context)  # type: ignore[no-any-return]


@overload
def reward_function(weight: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(weight: float = 1.0, name: str | None = None) -> Callable[[Callable[..., Any]], RewardFunction]: ...
def reward_function(
    weight: float | Callable[..., Any] = 1.0, name: str | None = None
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Make a reward of a function of turns and context, plain or async. A plain one is called in a thread.

    Example:
        @reward_function(weight=0.5)
        async def polite(turns, context=None):
            return float(any("thank" in turn.content.lower() for turn in turns if turn.role == "assistant"))
    """
    if callable(weight):
        return _OfFunction(weight, 1.0, name)
    return functools.partial(_OfFunction, weight=weight, name=name)


def finite(value: Any, where: str, least: float = -math.inf) -> float:
    """A number that is one, and at least this."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
        kind = "a finite number" if least == -math.inf else f"a finite number, {least:g} or more"
        raise ValueError(f"{where}={value!r}: give {kind}")
    return float(value)


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")
