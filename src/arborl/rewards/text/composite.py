"""Combinations of rewards: weighted sum, minimum, product."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from arborl.errors import boundary, did_you_mean
from arborl.rewards import find_reward
from arborl.rewards.reward import Reward, as_finite_numbers, as_reward
from arborl.rewards.text.text_measures import as_turns, episode_of
from arborl.rewards.text.text_reward import Context, RewardFunction, RewardResult, Turns, finite
from arborl.rewards.threaded_calls import call
from arborl.types import Episode

AGGREGATIONS = ("weighted_sum", "min", "product")
OBJECTIVE_KEYS = ("name", "reward", "weight", "range")


class RewardPart(NamedTuple):
    """One reward of a combination."""

    name: str
    reward: Any
    weight: float
    low: float = 0.0
    high: float = 1.0
    """Range of its scores, for normalization."""


class RewardCombination(RewardFunction):
    """A reward made of others. Subclasses define `combine`.

    In a run `Rewards` computes the parts: if a part raises, exceeds its timeout or gives no finite number, the episode
    fails with the name of the part. The unweighted value of each part is the metric `reward/<name>/<part>`.
    """

    def __init__(self, parts: Sequence[RewardPart], weight: float, name: str | None):
        super().__init__(weight, name or "")
        if not parts:
            raise ValueError(f"{self.name}: there are no rewards; give at least one, as [HelpfulnessReward()]")
        for one, count in Counter(part.name for part in parts).items():
            if count > 1:
                raise ValueError(f"{self.name}: two rewards have the name {one!r}; give one of them name='…'")
        if not any(part.weight for part in parts):
            raise ValueError(f"{self.name}: all weights are 0; give at least one positive weight")
        self.parts = tuple(parts)

    def combine(self, scores: Mapping[str, float]) -> float:
        """The total of the parts' values, by name."""
        raise NotImplementedError

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        """The score of one conversation; group rewards have no other episodes to compare with."""
        turns, context = as_turns(turns), context or {}

        async def compute(reward: Any) -> Any:
            if isinstance(reward, RewardFunction):
                result = await reward.compute_reward(turns, context)
                return result.score if isinstance(result, RewardResult) else result
            return await call(reward, episode_of(turns, context))

        scores = await self._scores(compute)
        return RewardResult(self.combine(scores), scores)

    async def __call__(self, episode: Episode) -> float:
        scores = await self._scores(lambda reward: call(reward, episode))
        episode.metrics |= as_finite_numbers(f"reward/{self.name}", scores)
        return self.combine(scores)

    async def _scores(self, compute: Callable[[Any], Awaitable[Any]]) -> dict[str, float]:
        scores = {}
        for part in self.parts:
            async with boundary(f"reward {f'{self.name}/{part.name}'!r}"):
                scores[part.name] = sum(as_finite_numbers(part.name, await compute(part.reward)).values())
        return scores


class CompositeReward(RewardCombination):
    """The weighted sum of rewards. The weights need not add up to 1.

    Args:
        rewards: reward objects with their `weight`, names, or `{"name": …, "weight": …, "args": {…}}`.
        weight: of the whole.
        name: in metrics.

    Example:
        CompositeReward([HelpfulnessReward(weight=0.7), SafetyReward(weight=0.3)])
    """

    def __init__(self, rewards: Sequence[Any], weight: float = 1.0, name: str | None = None):
        label = name or "composite"
        if isinstance(rewards, str | Mapping) or not isinstance(rewards, Sequence):
            raise ValueError(f"{label}.rewards={rewards!r}: give a list of rewards")
        factors = [one.get("weight", 1.0) if isinstance(one, Mapping) else 1.0 for one in rewards]
        parts = [_part(one, factors[i], None, f"{label}.rewards.{i}") for i, one in enumerate(rewards)]
        super().__init__(parts, weight, name)

    def combine(self, scores: Mapping[str, float]) -> float:
        return sum(part.weight * scores[part.name] for part in self.parts)


class MultiObjectiveReward(RewardCombination):
    """Several objectives as one number.

    `weighted_sum` is the sum of weight * score; `min` the smallest score; `product` the product of score ** weight, for
    scores of at least 0. An objective of weight 0 is only a metric.

    With `normalize`, weights are divided by their sum and scores are scaled from the objective's `range` ([0, 1] by
    default) to 0..1. With a score outside its range the episode fails. There is no state: equal episodes have equal
    rewards. To normalize within groups, use `algorithm.advantage=gdpo` and several rewards.

    Args:
        objectives: each `{"name", "reward", "weight", "range"}`; by default the name of the reward and weight 1, times
            the weight of the reward.
        aggregation: `weighted_sum`, `min` or `product`.
        normalize: scale weights and scores.
        weight: of the whole.
        name: in metrics.

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
        label = name or "multi_objective"
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"{label}.aggregation={aggregation!r}: give one of {', '.join(AGGREGATIONS)}")
        if not isinstance(normalize, bool):
            raise ValueError(f"{label}.normalize={normalize!r}: give true or false")
        if isinstance(objectives, str | Mapping) or not isinstance(objectives, Sequence):
            raise ValueError(f"{label}.objectives={objectives!r}: give a list of {{{', '.join(OBJECTIVE_KEYS)}}}")
        super().__init__([_objective(one, f"{label}.objectives.{i}") for i, one in enumerate(objectives)], weight, name)
        self.aggregation, self.normalize = aggregation, normalize

    def combine(self, scores: Mapping[str, float]) -> float:
        scaled = [(part, self._scaled(part, scores[part.name])) for part in self.parts if part.weight]
        total = sum(part.weight for part, _ in scaled) if self.normalize else 1.0
        if self.aggregation == "min":
            return min(score for _, score in scaled)
        if self.aggregation == "weighted_sum":
            return sum(part.weight / total * score for part, score in scaled)
        for part, score in scaled:
            if score < 0:
                raise ValueError(f"objective {part.name!r} gave {score:g}; a product needs scores of at least 0")
        return math.prod(score ** (part.weight / total) for part, score in scaled)

    def _scaled(self, part: RewardPart, score: float) -> float:
        if not self.normalize:
            return score
        if not part.low - 1e-9 <= score <= part.high + 1e-9:
            raise ValueError(
                f"objective {part.name!r} gave {score:g}, outside of {part.low:g} to {part.high:g}; give it its "
                "'range': [LOW, HIGH], or normalize=False"
            )
        return min(max((score - part.low) / (part.high - part.low), 0.0), 1.0)


def _objective(objective: Any, where: str) -> RewardPart:
    if not isinstance(objective, Mapping) or "reward" not in objective:
        raise ValueError(f"{where}={objective!r}: give a mapping with {', '.join(OBJECTIVE_KEYS)}")
    _check_keys(objective, OBJECTIVE_KEYS, where)
    part = _part(objective["reward"], objective.get("weight", 1.0), objective.get("name"), where)
    span = objective.get("range", (0.0, 1.0))
    if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
        raise ValueError(f"{where}.range={span!r}: give [LOW, HIGH]")
    low, high = (finite(end, f"{where}.range") for end in span)
    if low >= high:
        raise ValueError(f"{where}.range={list(span)!r}: give the lower bound first")
    return part._replace(low=low, high=high)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key.{did_you_mean(key, known)} Known: {', '.join(known)}")


def _part(spec: Any, weight: Any, name: str | None, where: str) -> RewardPart:
    factor = finite(weight, f"{where}.weight", 0)
    reward = _make_reward(spec, where)
    reward_weight = finite(getattr(reward, "weight", 1.0), f"{where}.weight", 0)
    label = str(name or getattr(reward, "name", None) or type(reward).__name__)
    if "/" in label:
        raise ValueError(f"{where}.name={label!r}: give a name without /")
    return RewardPart(label, reward, factor * reward_weight)


def _make_reward(spec: Any, where: str) -> Reward:
    if isinstance(spec, str):
        return find_reward(spec, {}, where)
    if isinstance(spec, Mapping):
        _check_keys(spec, ("name", "weight", "args"), where)
        return find_reward(str(spec.get("name")), spec.get("args") or {}, f"{where}.args")
    if inspect.isclass(spec):
        raise ValueError(f"{where}: {spec.__name__} is a class; give {spec.__name__}()")
    if not callable(spec):
        raise ValueError(f"{where}={spec!r}: give a reward, its name, or a mapping with name, weight, args")
    if inspect.isfunction(spec) and "episode" not in inspect.signature(spec).parameters:
        raise ValueError(
            f"{where}: {spec.__name__} has no argument `episode`; put @reward_function() above it to read turns"
        )
    return as_reward(spec)
