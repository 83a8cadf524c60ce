"""Rewards made of rewards: a weighted sum, the least, a product.

In a run `Rewards` asks the parts one by one, lets those look across the group that do, and then has them combined: a
part that raises, overruns its time or gives no finite number costs the episode under its own name, and each part's
number is in the metrics as `reward/<name>/<part>`, as it scored, before weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from arborl.errors import boundary, did_you_mean
from arborl.rewards.by_name import find_reward
from arborl.rewards.plain_calls import call
from arborl.rewards.reward import Reward, as_reward, numbers
from arborl.rewards.text.base import Context, RewardFunction, RewardResult, Turns, finite
from arborl.rewards.text.turns import as_turns, episode_of
from arborl.types import Episode

AGGREGATIONS = ("weighted_sum", "min", "product")
KEYS = ("name", "reward", "weight", "range")


class Part(NamedTuple):
    """One of the rewards that another is made of."""

    name: str
    reward: Any
    weight: float
    low: float = 0.0
    high: float = 1.0
    """Between these are its scores; only asked for where they are brought to 0..1."""


class Combined(RewardFunction):
    """A reward made of others. Inherit, and say how their numbers become one."""

    def __init__(self, parts: Sequence[Part], weight: float, name: str | None):
        super().__init__(weight, name)
        if not parts:
            raise ValueError(f"{self.name}: no rewards are given; give at least one, as [HelpfulnessReward()]")
        names = [part.name for part in parts]
        for one in names:
            if names.count(one) > 1:
                raise ValueError(f"{self.name}: two are called {one!r}; give one of them name='…'")
        if not any(part.weight for part in parts):
            raise ValueError(f"{self.name}: all weights are 0; give at least one that is more")
        self.parts = tuple(parts)

    def combine(self, scores: Mapping[str, float]) -> float:
        """The number that is learned from, of the parts' numbers by name."""
        raise NotImplementedError

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        """The score of one conversation alone: parts that compare the episodes of a group have none to compare with."""
        turns, context = as_turns(turns), context or {}

        async def ask(part: Part) -> Any:
            if isinstance(part.reward, RewardFunction):
                found = await part.reward.compute_reward(turns, context)
                return found.score if isinstance(found, RewardResult) else found
            return await call(part.reward, episode_of(turns, context))

        scores = {part.name: await self._asked(part, ask) for part in self.parts}
        return RewardResult(self.combine(scores), scores)

    async def __call__(self, episode: Episode) -> float:
        async def ask(part: Part) -> Any:
            return await call(part.reward, episode)

        scores = {part.name: await self._asked(part, ask) for part in self.parts}
        episode.metrics |= numbers(f"reward/{self.name}", scores)
        return self.combine(scores)

    async def _asked(self, part: Part, ask: Any) -> float:
        async with boundary(f"reward {f'{self.name}/{part.name}'!r}"):
            return sum(numbers(part.name, await ask(part)).values())


class CompositeReward(Combined):
    """The sum of rewards, each times its weight. Weights are taken as they are: they need not add up to 1.

    Args:
        rewards: with `weight`s of their own: rewards that read turns, any other reward of Arbor, or a name, or
            `{"name": …, "weight": …, "args": {…}}` as in a file.
        weight: of the whole among others.
        name: what it is called in metrics.

    Example:
        CompositeReward([HelpfulnessReward(weight=0.7), SafetyReward(weight=0.3)])
    """

    def __init__(self, rewards: Sequence[Any], weight: float = 1.0, name: str | None = None):
        called = name or "composite"
        if isinstance(rewards, str | Mapping) or not isinstance(rewards, Sequence):
            raise ValueError(f"{called}.rewards={rewards!r}: give a list of rewards")
        parts = []
        for i, given in enumerate(rewards):
            extra = given.get("weight", 1.0) if isinstance(given, Mapping) else 1.0
            parts.append(_part(given, extra, None, f"{called}.rewards.{i}"))
        super().__init__(parts, weight, name)

    def combine(self, scores: Mapping[str, float]) -> float:
        return sum(part.weight * scores[part.name] for part in self.parts)


class MultiObjectiveReward(Combined):
    """Several objectives as one number.

    `weighted_sum` adds up scores times weights; `min` is the least score, whatever the weights; `product` multiplies
    scores, each to the power of its weight, and takes none below 0. An objective with weight 0 is measured and shown
    only.

    With `normalize`, weights are divided by their sum, and every score is brought to 0..1 by the objective's `range`
    ([0, 1] by default, which all rewards of the library keep), so the whole is between 0 and 1. A score outside its
    range costs the episode. Nothing is remembered from one episode to the next: equal episodes have equal rewards, in a
    resumed run too. To normalise by what a group got, take `algorithm.advantage=gdpo` and several rewards.

    Args:
        objectives: each `{"name", "reward", "weight", "range"}`; the name is the reward's own by default, the weight 1
            (times the reward's own).
        aggregation: `weighted_sum`, `min` or `product`.
        normalize: weights and scores, as above.
        weight: of the whole among others.
        name: what it is called in metrics.

    Example:
        MultiObjectiveReward(objectives=[{"name": "helpfulness", "reward": HelpfulnessReward(), "weight": 0.4},
                                         {"name": "safety", "reward": SafetyReward(), "weight": 0.6}])
    """

    def __init__(
        self,
        objectives: Sequence[Mapping[str, Any]],
        aggregation: Literal["weighted_sum", "min", "product"] = "weighted_sum",
        normalize: bool = True,
        weight: float = 1.0,
        name: str | None = None,
    ):
        called = name or "multi_objective"
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"{called}.aggregation={aggregation!r}: give one of {', '.join(AGGREGATIONS)}")
        if not isinstance(normalize, bool):
            raise ValueError(f"{called}.normalize={normalize!r}: give true or false")
        if isinstance(objectives, str | Mapping) or not isinstance(objectives, Sequence):
            raise ValueError(f"{called}.objectives={objectives!r}: give a list of {{{', '.join(KEYS)}}}")
        super().__init__(
            [_objective(one, f"{called}.objectives.{i}") for i, one in enumerate(objectives)], weight, name
        )
        self.aggregation, self.normalize = aggregation, normalize

    def combine(self, scores: Mapping[str, float]) -> float:
        counted = [(part, self._scaled(part, scores[part.name])) for part in self.parts if part.weight]
        total = sum(part.weight for part, _ in counted) if self.normalize else 1.0
        if self.aggregation == "min":
            return min(score for _, score in counted)
        if self.aggregation == "weighted_sum":
            return sum(part.weight / total * score for part, score in counted)
        return math.prod(_power(part, score, part.weight / total) for part, score in counted)

    def _scaled(self, part: Part, score: float) -> float:
        if not self.normalize:
            return score
        if not part.low - 1e-9 <= score <= part.high + 1e-9:
            raise ValueError(
                f"objective {part.name!r} gave {score:g}, outside of {part.low:g} to {part.high:g}; give it its "
                "'range': [LOW, HIGH], or normalize=False"
            )
        return min(max((score - part.low) / (part.high - part.low), 0.0), 1.0)


def _power(part: Part, score: float, weight: float) -> float:
    if score < 0:
        raise ValueError(f"objective {part.name!r} gave {score:g}; a product takes no number below 0")
    return float(score**weight)


def _objective(given: Any, where: str) -> Part:
    if not isinstance(given, Mapping) or "reward" not in given:
        raise ValueError(f"{where}={given!r}: give a mapping with {', '.join(KEYS)}")
    for key in given:
        if key not in KEYS:
            raise ValueError(
                f"{where}.{key}: unknown key.{did_you_mean(key, KEYS)} An objective has: {', '.join(KEYS)}"
            )
    part = _part(given["reward"], given.get("weight", 1.0), given.get("name"), where)
    span = given.get("range", (0.0, 1.0))
    if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
        raise ValueError(f"{where}.range={span!r}: give [LOW, HIGH]")
    low, high = (finite(end, f"{where}.range") for end in span)
    if low >= high:
        raise ValueError(f"{where}.range={list(span)!r}: give the lower end first")
    return part._replace(low=low, high=high)


def _part(given: Any, weight: Any, name: str | None, where: str) -> Part:
    """A reward, its name and its weight, of what was given."""
    extra = finite(weight, f"{where}.weight", 0)
    made = _made(given, where)
    own = finite(getattr(made, "weight", 1.0), f"{where}.weight", 0)
    called = str(name or getattr(made, "name", None) or type(made).__name__)
    if "/" in called:
        raise ValueError(f"{where}.name={called!r}: give a name without /")
    return Part(called, made, extra * own)


def _made(given: Any, where: str) -> Reward:
    if isinstance(given, str):
        return find_reward(given, {}, where)
    if isinstance(given, Mapping):
        for key in given:
            if key not in ("name", "weight", "args"):
                raise ValueError(f"{where}.{key}: unknown key. A reward has: name, weight, args")
        return find_reward(str(given.get("name")), given.get("args") or {}, f"{where}.args")
    if inspect.isclass(given):
        raise ValueError(f"{where}: {given.__name__} is a class; give {given.__name__}()")
    if not callable(given):
        raise ValueError(f"{where}={given!r}: give a reward, its name, or a mapping with name, weight, args")
    if inspect.isfunction(given) and "episode" not in inspect.signature(given).parameters:
        raise ValueError(f"{where}: {given.__name__} takes no `episode`; put @reward_function() above it to read turns")
    return as_reward(given)
