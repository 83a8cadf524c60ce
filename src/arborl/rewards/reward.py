"""The interface of rewards, `@reward` for functions, and `Rewards`, which scores groups.

An episode fails if one of its rewards raises, exceeds its timeout or returns anything but finite numbers. The failure
names the reward; the other episodes of the group are not affected.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, overload, runtime_checkable

from arborl.busy_time import BusyTime
from arborl.errors import EpisodeError, boundary
from arborl.failures import FirstFailureLogger
from arborl.rewards.threaded_calls import call, call_in_thread, is_async
from arborl.spans import end_scored_spans
from arborl.tools.core.background_threads import abandoned_calls
from arborl.types import Episode, Group, Metrics

log = logging.getLogger(__name__)


class Reward(Protocol):
    """Computes the reward of a finished episode."""

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        """A finite number, or several by name, which are summed."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that also compares the episodes of a group, after each has its own value. `across` runs in a thread."""

    async def __call__(self, episode: Episode) -> float:
        """The value of one episode."""
        ...

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Sequence[float]:
        """The final values, given those of all surviving episodes."""
        ...


@runtime_checkable
class CombinedReward(Protocol):
    """A reward made of others. `Rewards` computes the parts; `combine` computes the total."""

    parts: Sequence[Any]
    """Each with `name` and `reward`."""

    def combine(self, scores: Mapping[str, float]) -> float:
        """The total of the parts' values, by name, before weights."""
        ...


class MetricsSource(Protocol):
    """Has metrics of a step."""

    def metrics(self) -> Metrics: ...


class FunctionReward(Reward):
    """A function as a reward. Made by `@reward`.

    The argument `episode` is the episode; all others are fields of the task, by name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        weight: float = 1.0,
        blocking: bool = True,
        graded: bool = False,
    ):
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.weight = weight
        self.graded = graded
        self.by_turn = False
        """Whether its value is the sum of the rewards of the turns."""
        self.runs_in_thread = blocking and not is_async(function)
        self.inline = not blocking and not is_async(function)
        """Whether it is a sync function that runs in the event loop."""
        self._parameters = inspect.signature(function).parameters
        if "episode" not in self._parameters:
            raise TypeError(f"reward {self.name!r} has no argument `episode`; write def {self.name}(episode, …)")
        for parameter in self._parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise TypeError(f"reward {self.name!r}: {str(parameter)!r} cannot be filled by name; drop the * or /")
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in self._parameters.values())
        self.required_fields = tuple(
            name
            for name, one in self._parameters.items()
            if name != "episode" and one.default is one.empty and one.kind is not one.VAR_KEYWORD
        )
        """Fields of the task without which it fails."""
        functools.update_wrapper(self, function, updated=())

    def begin(self, episode: Episode) -> Any:
        """The result of the function: a value or an awaitable."""
        return self.function(episode=episode, **self._fields(episode))

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        if self.runs_in_thread:
            return await call_in_thread(self.function, episode=episode, **self._fields(episode))  # type: ignore[no-any-return]
        value = self.begin(episode)
        return await value if inspect.isawaitable(value) else value  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"FunctionReward({self.name!r})"

    def _fields(self, episode: Episode) -> dict[str, Any]:
        fields = {name: value for name, value in episode.task.fields.items() if name != "episode"}
        for name in self.required_fields:
            if name not in fields:
                known = ", ".join(fields) or "no fields"
                raise LookupError(
                    f"reward {self.name!r} needs the field {name!r}; task {episode.task.id!r} has: {known}"
                )
        if self._takes_all:
            return fields
        return {name: value for name, value in fields.items() if name in self._parameters}


@overload
def reward(function: Callable[..., Any], /) -> FunctionReward: ...
@overload
def reward(
    *, name: str | None = None, weight: float = 1.0, blocking: bool = True, graded: bool = False
) -> Callable[[Callable[..., Any]], FunctionReward]: ...
def reward(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> FunctionReward | Callable[[Callable[..., Any]], FunctionReward]:
    """Make a reward of a sync or async function. It is not added to the registry.

    A sync function runs in threads and may block. It runs for several episodes at once, so shared state needs a lock.
    With `blocking=False` it runs in the event loop, one call at a time, and must be fast. An async function always runs
    in the event loop.

    A reward of 1 or more is a success. With `graded=True` the values are degrees, and none of them means success.

    Example:
        @reward
        def exact(episode, answer: str) -> float:      # `answer` is a field of the task
            return float(episode.answer == answer)

        @reward(name="brevity", weight=0.1, graded=True)
        def short(episode) -> float:
            return 1.0 - min(episode.sampled / 100, 1.0)
    """
    return FunctionReward(function, **options) if function is not None else functools.partial(FunctionReward, **options)


class Rewards:
    """The weighted sum of several rewards."""

    def __init__(self, rewards: Sequence[tuple[str, Reward, float]], seconds: float):
        self.rewards = [(name, as_reward(one), weight) for name, one, weight in rewards]
        self.called = [leaf for name, one, weight in self.rewards for leaf in _leaves(name, one, weight)]
        """Rewards that are called: of combined rewards their parts."""
        self.combined = [found for name, one, weight in self.rewards for found in _combined(name, one, weight)]
        """Combined rewards, inner ones first."""
        self.unweighted = [name for name, _, weight in self.rewards if weight == 0]
        by_turn = [weight for _, one, weight in self.rewards if getattr(one, "by_turn", False)]
        self.turn_weight = sum(by_turn)
        parts = [part for _, one, weight in self.rewards if weight != 0 for part in reward_parts(one)]
        self.uses_env = any(getattr(part, "by_turn", False) for part in parts)
        self.has_rule = any(not is_graded(part) and not getattr(part, "by_turn", False) for part in parts)
        """Whether a value of a reward other than the environment's means success."""
        self.seconds = seconds
        self.firsts = FirstFailureLogger(log)
        self.busy_time = BusyTime()
        self.stuck_before = abandoned_calls.hanging()
        """Calls of other components of this process that hung before."""
        self.remote: MetricsSource | None = None
        """Workers on a cluster that compute the rewards."""

    @property
    def inline(self) -> bool:
        """Whether all are fast functions in the event loop, so that concurrency gains nothing."""
        return all(isinstance(one, FunctionReward) and one.inline for _, one, _ in self.called)

    def metrics(self) -> Metrics:
        """Time in which a reward was running since the last call, and calls that hang in threads."""
        stuck = sum(
            count for name, count in (abandoned_calls.hanging() - self.stuck_before).items() if is_reward_call(name)
        )
        metrics = {"time/rewards": self.busy_time.busy(), "rewards/calls_stuck": float(stuck)}
        return metrics | (self.remote.metrics() if self.remote is not None else {})

    def required_fields(self, source: str) -> dict[str, str]:
        """Fields without which rewards of a data source fail, and the name of the first such reward."""
        needs = [(field, name) for name, one, _ in self.called for field in getattr(one, "required_fields", ())]
        return dict(reversed(needs))

    async def score(self, groups: Sequence[Group]) -> None:
        """Set `rewards` and `metrics["success"]` of every surviving episode, concurrently.

        `success` of the environment is kept. Else an episode succeeds if its weighted reward reaches 1. There is no
        `success` if all rewards are degrees (`graded`); the environment's own are if it reports `judged: 0`.
        """
        await asyncio.gather(*(self._score_group(group) for group in groups))

    async def judge(self, episode: Episode) -> None:
        """Compute the rewards of one finished episode while others still run; `score` does not repeat it."""
        if episode.failure is None and not episode.judged:
            with self.busy_time:
                await self._score(episode)
            episode.judged = True

    async def _score_group(self, group: Group) -> None:
        if self.inline:
            for episode in group.valid_episodes:
                await self.judge(episode)
        else:
            await asyncio.gather(*(self.judge(episode) for episode in group.valid_episodes))
        for name, one, weight in self.called:
            if _is_group_reward(one):
                with self.busy_time:
                    await self._compare(name, one, weight, group.valid_episodes)
        for name, whole, weight in self.combined:
            await asyncio.gather(*(self._combine(name, whole, weight, episode) for episode in group.valid_episodes))
        has_success = any("success" in episode.metrics for episode in group.valid_episodes)
        for episode in group.valid_episodes:
            for name in self.unweighted:
                episode.metrics[f"reward/{name}"] = _pop_sum(name, episode.rewards)
            if has_success or self._defines_success(episode):
                episode.metrics.setdefault("success", float(episode.reward >= 1))
        end_scored_spans(group.episodes)

    def _defines_success(self, episode: Episode) -> bool:
        return self.has_rule or (self.uses_env and episode.metrics.get("judged", 1.0) != 0)

    async def _compare(self, name: str, one: Any, weight: float, episodes: Sequence[Episode]) -> None:
        """Let a reward compare the episodes of a group. If it raises, all of them fail."""
        try:
            async with boundary(f"reward {name!r}", self.seconds):
                values = await call(one.across, episodes, [episode.rewards[name] for episode in episodes])
                scaled = [(weight or 1.0) * as_finite_numbers(name, value)[name] for value in values]
                for episode, value in zip(episodes, scaled, strict=True):
                    episode.rewards[name] = value
        except EpisodeError as error:
            self._fail(error, *episodes)

    async def _combine(self, name: str, whole: CombinedReward, weight: float, episode: Episode) -> None:
        """Replace the values of the parts by their total; the parts become metrics."""
        try:
            async with boundary(f"reward {name!r}", self.seconds):
                scores = {part.name: _pop_sum(f"{name}/{part.name}", episode.rewards) for part in whole.parts}
                episode.metrics |= {f"reward/{name}/{part}": score for part, score in scores.items()}
                episode.rewards[name] = (weight or 1.0) * as_finite_numbers(name, whole.combine(scores))[name]
        except EpisodeError as error:
            self._fail(error, episode)

    def _fail(self, error: EpisodeError, *episodes: Episode) -> None:
        for episode in episodes:
            episode.fail(error)
            self.firsts.tell(episode)

    async def _score(self, episode: Episode) -> None:
        calls = [self._compute(name, one, weight, episode) for name, one, weight in self.called]
        is_sequential = len(calls) == 1 or self.inline
        results = [await call for call in calls] if is_sequential else await asyncio.gather(*calls)
        for result in results:
            if isinstance(result, EpisodeError):  # the first in the order of the rewards, not of time
                self._fail(result, episode)
                return
            episode.rewards.update(result)
        episode.turn_weight = self.turn_weight

    async def _compute(self, name: str, one: Any, weight: float, episode: Episode) -> dict[str, float] | EpisodeError:
        where = f"reward {name!r}"  # the event loop watchdog reads this variable
        try:
            if isinstance(one, FunctionReward) and one.inline:
                async with boundary(where):  # without a timeout: it blocks the event loop
                    value = one.begin(episode)
            else:
                value = one(episode) if isinstance(one, FunctionReward) else call(one, episode)
            if inspect.isawaitable(value):
                async with boundary(where, self.seconds):
                    value = await value
            async with boundary(where):
                # The weight of a group reward is applied after `across`.
                scale = 1.0 if _is_group_reward(one) else weight or 1.0
                return {key: scale * number for key, number in as_finite_numbers(name, value).items()}
        except EpisodeError as error:
            return error


@functools.cache
def _is_group_type(kind: type) -> bool:
    return issubclass(kind, GroupReward)


def _is_group_reward(one: object) -> bool:
    kind: Any = type(one)
    return _is_group_type(kind)  # cached: `isinstance` with a protocol takes 30 us


def is_reward_call(name: str) -> bool:
    """Whether a call in a thread (`arborl.tools.core.background_threads`) belongs to a reward."""
    return name.startswith("reward ")


def reward_parts(one: Any) -> list[Any]:
    """The reward itself, or the parts of a combined reward."""
    return [part for _, part, _ in _leaves("", one, 1.0)]


def is_graded(one: Any) -> bool:
    """Whether the values of a reward are degrees, none of which means success; of a combined one, of all its parts."""
    return all(getattr(part, "graded", False) for part in reward_parts(one))


def _leaves(name: str, one: Any, weight: float) -> list[tuple[str, Reward, float]]:
    """The reward itself, or the parts of a combined reward as `name/part`, without weights."""
    if not isinstance(one, CombinedReward):
        return [(name, one, weight)]
    return [leaf for part in one.parts for leaf in _leaves(f"{name}/{part.name}", part.reward, 1.0)]


def _combined(name: str, one: Any, weight: float) -> list[tuple[str, CombinedReward, float]]:
    if not isinstance(one, CombinedReward):
        return []
    inner = [found for part in one.parts for found in _combined(f"{name}/{part.name}", part.reward, 1.0)]
    return [*inner, (name, one, weight)]


def _pop_sum(name: str, rewards: dict[str, float]) -> float:
    """Remove the values of a part from `rewards` and return their sum."""
    keys = [key for key in rewards if key == name or key.startswith(f"{name}/")]
    return sum(rewards.pop(key) for key in keys)


def as_reward(candidate: Any) -> Reward:
    """A function wrapped as by `@reward`; a reward unchanged."""
    return reward(candidate) if inspect.isfunction(candidate) else candidate


def as_finite_numbers(name: str, value: Any) -> dict[str, float]:
    """The result of a reward as finite numbers by name."""
    named = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    named = {key: part.item() if getattr(part, "shape", None) == () else part for key, part in named.items()}
    for key, part in named.items():
        if not isinstance(part, Real):
            raise TypeError(f"{key} is {part!r} ({type(part).__name__}); return a number, or a dict of numbers by name")
        if not math.isfinite(part):
            raise ValueError(f"{key} is {part!r}; return a finite number")
    return {key: float(part) for key, part in named.items()}


class RewardsBySource(Rewards):
    """Scores each group with the rewards of its data source, or with those of the run."""

    def __init__(self, run: Rewards, sources: Mapping[str, Rewards]):
        super().__init__(run.rewards, run.seconds)
        self.sources = dict(sources)
        for rewards in self.sources.values():
            rewards.busy_time = self.busy_time

    def required_fields(self, source: str) -> dict[str, str]:
        rewards = self.sources.get(source)
        return rewards.required_fields(source) if rewards is not None else super().required_fields(source)

    async def judge(self, episode: Episode) -> None:
        rewards = self.sources.get(episode.task.source)
        await (rewards.judge(episode) if rewards is not None else super().judge(episode))

    async def score(self, groups: Sequence[Group]) -> None:
        others = [group for group in groups if group.task.source not in self.sources]
        by_source = {name: [group for group in groups if group.task.source == name] for name in self.sources}
        jobs = (self.sources[name].score(some) for name, some in by_source.items() if some)
        await asyncio.gather(super().score(others), *jobs)
