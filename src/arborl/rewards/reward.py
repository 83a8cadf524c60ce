"""What a reward is, `@reward` for plain functions, and `Rewards`, which scores groups.

A reward that raises, overruns its time, or returns something other than finite numbers costs the episode it was
scoring: that episode is a failure with the reward's name on it, and its siblings go on.
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
from arborl.rewards.plain_calls import call, is_async, threaded
from arborl.spans import end_scored_spans
from arborl.tools.threads import left_behind
from arborl.types import Episode, Group, Metrics

log = logging.getLogger(__name__)


class Reward(Protocol):
    """Reads a finished episode and says what it was worth."""

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        """A finite number; or several by name, which are added up."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that also looks across the episodes of a task, once each of them has its own number.

    `across` is called in a thread.
    """

    async def __call__(self, episode: Episode) -> float:
        """The episode's own number."""
        ...

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> Sequence[float]:
        """What each episode gets in the end, given the numbers of all that survived."""
        ...


@runtime_checkable
class CombinedReward(Protocol):
    """A reward made of others. `Rewards` asks the parts; it is told their numbers, and says what they make."""

    parts: Sequence[Any]
    """Each with `name` and `reward`."""

    def combine(self, scores: Mapping[str, float]) -> float:
        """The number that is learned from, of the parts' numbers by name, before weights."""
        ...


class Counting(Protocol):
    """Has numbers of its own for a step's metrics."""

    def metrics(self) -> Metrics: ...


class RewardFunction(Reward):
    """A function as a reward. Made by `@reward`.

    Its parameter `episode` is the episode; every other one is filled from the fields of the task, by name.

    Args:
        function: plain or async.
        name: what it is called in metrics; the function's name by default.
        weight: of this reward among others.
        blocking: False for a plain function that is called in the event loop, and not in a thread.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, weight: float = 1.0, blocking: bool = True
    ):
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.weight = weight
        self.by_turn = False
        """Whether its number is the sum of what the turns were given, so that credit may go to them."""
        self.threaded = blocking and not is_async(function)
        """Whether it is a plain function that is called in a thread."""
        self.inline = not blocking and not is_async(function)
        """Whether it is a plain function that is called in the event loop."""
        self._parameters = inspect.signature(function).parameters
        if "episode" not in self._parameters:
            raise TypeError(f"reward {self.name!r} takes no `episode`; write def {self.name}(episode, …)")
        for parameter in self._parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise TypeError(f"reward {self.name!r}: {str(parameter)!r} cannot be filled by name; drop the * or /")
        kinds = [parameter.kind for parameter in self._parameters.values()]
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        functools.update_wrapper(self, function, updated=())

    def begin(self, episode: Episode) -> Any:
        """What the function returns: a number, or something to await."""
        return self.function(episode=episode, **self._fields(episode))

    async def __call__(self, episode: Episode) -> float | dict[str, float]:
        if self.threaded:
            return await threaded(self.function, episode=episode, **self._fields(episode))  # type: ignore[no-any-return]
        value = self.begin(episode)
        return await value if inspect.isawaitable(value) else value  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"RewardFunction({self.name!r})"

    def _fields(self, episode: Episode) -> dict[str, Any]:
        if not self._takes_all:
            return self._named(episode.task.fields, episode)
        has = {name: value for name, value in episode.task.fields.items() if name != "episode"}
        return has | self._named(has, episode)

    def _named(self, has: Mapping[str, Any], episode: Episode) -> dict[str, Any]:
        filled = {}
        for name, parameter in self._parameters.items():
            if name == "episode" or parameter.kind is parameter.VAR_KEYWORD:
                continue
            if name in has:
                filled[name] = has[name]
            elif parameter.default is parameter.empty:
                fields = ", ".join(name for name in has if name != "episode") or "no fields"
                raise LookupError(
                    f"reward {self.name!r} wants the field {name!r}; task {episode.task.id!r} has: {fields}"
                )
        return filled


@overload
def reward(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward(
    *, name: str | None = None, weight: float = 1.0, blocking: bool = True
) -> Callable[[Callable[..., Any]], RewardFunction]: ...
def reward(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Make a reward of a function, plain or async. Registers nothing.

    A plain function is called in a thread and may block. It is called for several episodes at the same time, so what
    it shares between calls needs a lock. With `blocking=False` it is called in the event loop, one call at a time: it
    must be quick, since nothing else runs meanwhile. An async function always runs in the event loop.

    Example:
        @reward
        def exact(episode, answer: str) -> float:      # `answer` is a field of the task
            return float(episode.answer == answer)

        @reward(name="brevity", weight=0.1)
        def short(episode) -> float:
            return 1.0 - min(episode.sampled / 100, 1.0)
    """
    return RewardFunction(function, **options) if function is not None else functools.partial(RewardFunction, **options)


class Rewards:
    """Several rewards, by name, each with its weight.

    Args:
        rewards: name, reward, weight. A plain function is taken as `@reward` would take it. One of weight 0 is measured
            and shown only: its number is the episode's metric `reward/<name>`.
        seconds: what one reward may take for one episode.
    """

    def __init__(self, rewards: Sequence[tuple[str, Reward, float]], seconds: float):
        self.rewards = [(name, as_reward(one), weight) for name, one, weight in rewards]
        self.asked = [asked for name, one, weight in self.rewards for asked in _opened(name, one, weight)]
        """All that are asked; of a reward made of others, its parts."""
        self.combined = [found for name, one, weight in self.rewards for found in _combined(name, one, weight)]
        """Those made of others, inner ones first."""
        self.shown = [name for name, _, weight in self.rewards if weight == 0]
        """Those of weight 0."""
        by_turn = [weight for _, one, weight in self.rewards if getattr(one, "by_turn", False)]
        self.turn_weight = sum(by_turn)
        self.seconds = seconds
        self.firsts = FirstFailureLogger(log)
        self.busy_time = BusyTime()
        self.hung = left_behind.stuck()
        """Calls of others in this process, which hang already."""
        self.elsewhere: Counting | None = None
        """Where they are computed, if not here."""

    @property
    def inline(self) -> bool:
        """Whether all answer at once, so that nothing is gained by asking them at the same time."""
        return all(isinstance(one, RewardFunction) and one.inline for _, one, _ in self.asked)

    def metrics(self) -> Metrics:
        """Since the last call: seconds in which a reward was under way; and how many calls hang in threads now."""
        stuck = sum(count for whose, count in (left_behind.stuck() - self.hung).items() if of_reward(whose))
        own = {"time/rewards": self.busy_time.busy(), "rewards/calls_stuck": float(stuck)}
        return own | (self.elsewhere.metrics() if self.elsewhere is not None else {})

    async def score(self, groups: Sequence[Group]) -> None:
        """Fill `rewards` and `metrics["success"]` of every surviving episode; all at once.

        An environment that knows what success is has set it; elsewhere an episode succeeded when its rewards, weighted
        and added up, reach 1. What nobody judged is neither: an environment that says `judged: 0` leaves that to the
        rewards, and where there are none but its own, there is no `success`.
        """
        await asyncio.gather(*(self._score_group(group) for group in groups))

    async def judge(self, episode: Episode) -> None:
        """Ask every reward about one finished episode, while its siblings still play; `score` does not ask again."""
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
        for name, one, weight in self.asked:
            if _compares(one):
                with self.busy_time:
                    await self._compare(name, one, weight, group.valid_episodes)
        for name, whole, weight in self.combined:
            await asyncio.gather(*(self._combine(name, whole, weight, episode) for episode in group.valid_episodes))
        judges = any(weight != 0 and not getattr(one, "by_turn", False) for _, one, weight in self.rewards)
        for episode in group.valid_episodes:
            for name in self.shown:
                episode.metrics[f"reward/{name}"] = _taken(name, episode.rewards)
            if judges or episode.metrics.get("judged", 1.0):
                episode.metrics.setdefault("success", float(episode.reward >= 1))
        end_scored_spans(group.episodes)

    async def _compare(self, name: str, one: Any, weight: float, episodes: Sequence[Episode]) -> None:
        """Let a reward look at all episodes of the task. One that raises there costs them all."""
        try:
            async with boundary(f"reward {name!r}", self.seconds):
                values = await call(one.across, episodes, [episode.rewards[name] for episode in episodes])
                scaled = [(weight or 1.0) * numbers(name, value)[name] for value in values]
                for episode, value in zip(episodes, scaled, strict=True):
                    episode.rewards[name] = value
        except EpisodeError as error:
            for episode in episodes:
                episode.fail(error)
                self.firsts.tell(episode)

    async def _combine(self, name: str, whole: CombinedReward, weight: float, episode: Episode) -> None:
        """Put one number in the place of its parts', which become metrics."""
        try:
            async with boundary(f"reward {name!r}", self.seconds):
                scores = {part.name: _taken(f"{name}/{part.name}", episode.rewards) for part in whole.parts}
                episode.metrics |= {f"reward/{name}/{part}": score for part, score in scores.items()}
                episode.rewards[name] = (weight or 1.0) * numbers(name, whole.combine(scores))[name]
        except EpisodeError as error:
            episode.fail(error)
            self.firsts.tell(episode)

    async def _score(self, episode: Episode) -> None:
        asked = [self._ask(name, one, weight, episode) for name, one, weight in self.asked]
        alone = len(asked) == 1 or self.inline
        answers = [await one for one in asked] if alone else await asyncio.gather(*asked)
        for answer in answers:
            if isinstance(answer, EpisodeError):  # the first by the order of the rewards, not of time
                episode.fail(answer)
                self.firsts.tell(episode)
                return
            episode.rewards.update(answer)
        episode.turn_weight = self.turn_weight

    async def _ask(self, name: str, one: Any, weight: float, episode: Episode) -> dict[str, float] | EpisodeError:
        where = f"reward {name!r}"  # the watchdog reads it
        try:
            if isinstance(one, RewardFunction) and one.inline:
                async with boundary(where):  # no deadline can strike while it holds the event loop
                    value = one.begin(episode)
            else:
                value = one(episode) if isinstance(one, RewardFunction) else call(one, episode)
            if inspect.isawaitable(value):
                async with boundary(where, self.seconds):
                    value = await value
            async with boundary(where):
                # The weight of one that compares episodes is applied when it has seen the group.
                scale = 1.0 if _compares(one) else weight or 1.0
                return {key: scale * number for key, number in numbers(name, value).items()}
        except EpisodeError as error:
            return error


_compare_kinds: dict[type, bool] = {}
"""Whether rewards of a class are group rewards; remembered, since asking a protocol takes 30 us."""


def _compares(one: object) -> bool:
    """Whether it is a group reward."""
    kind = type(one)
    if kind not in _compare_kinds:
        _compare_kinds[kind] = issubclass(kind, GroupReward)
    return _compare_kinds[kind]


def of_reward(whose: str) -> bool:
    """Whether a call that hangs (`arborl.tools.threads`) is a reward's, by its name."""
    return whose.startswith("reward ")


def opened(one: Any) -> list[Any]:
    """A reward; of one made of others, all of those."""
    return [part for _, part, _ in _opened("", one, 1.0)]


def _opened(name: str, one: Any, weight: float) -> list[tuple[str, Reward, float]]:
    """A reward as it is; of one made of others, all parts, by `name/part` and without weights."""
    if not isinstance(one, CombinedReward):
        return [(name, one, weight)]
    return [found for part in one.parts for found in _opened(f"{name}/{part.name}", part.reward, 1.0)]


def _combined(name: str, one: Any, weight: float) -> list[tuple[str, CombinedReward, float]]:
    if not isinstance(one, CombinedReward):
        return []
    inner = [found for part in one.parts for found in _combined(f"{name}/{part.name}", part.reward, 1.0)]
    return [*inner, (name, one, weight)]


def _taken(name: str, rewards: dict[str, float]) -> float:
    """A part's number, taken out; where it gave several by name, their sum."""
    keys = [key for key in rewards if key == name or key.startswith(f"{name}/")]
    return sum(rewards.pop(key) for key in keys)


def as_reward(given: Any) -> Reward:
    """A plain function as `@reward` would take it; a reward as it is."""
    return reward(given) if inspect.isfunction(given) else given


def numbers(name: str, value: Any) -> dict[str, float]:
    """What a reward returned, as finite numbers by name.

    Example:
        numbers("exact", True)               # {"exact": 1.0}
        numbers("judge", {"tone": 0.5})      # {"judge/tone": 0.5}
        numbers("exact", np.float32(1))      # {"exact": 1.0}, as of any array or tensor without dimensions
    """
    named = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    named = {key: part.item() if getattr(part, "shape", None) == () else part for key, part in named.items()}
    for key, part in named.items():
        if not isinstance(part, Real):
            raise TypeError(f"{key} is {part!r} ({type(part).__name__}); return a number, or a dict of numbers by name")
        if not math.isfinite(part):
            raise ValueError(f"{key} is {part!r}; return a finite number")
    return {key: float(part) for key, part in named.items()}
