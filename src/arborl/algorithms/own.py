"""An advantage or a loss of one's own: a function whose parameters are filled by name.

A parameter with one of the names below is given that; every other is a setting, from `algorithm.args` or its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from arborl.algorithms.advantages import Credit, Memory, arrays_of, over_branches
from arborl.algorithms.losses import anchor, known
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig, is_custom
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import load
from arborl.types import Floats, Group, Terms

Find = Callable[[str, str], Any]
"""From a name and what it is wanted as to the object."""


def finder(objects: Mapping[str, Any]) -> Find:
    """Finds what was handed in by Python code first, then what can be imported."""
    return lambda name, kind: objects[name] if name in objects else load(name, kind)


ADVANTAGE = {
    "rewards": "a list of arrays, one a group: what each of its episodes earned",
    "groups": "the groups themselves, `arborl.types.Group`; failed episodes are not among their `valid_episodes`",
    "terms": "one row per sampled token, `arborl.types.Terms`",
    "value": "the critic's estimate where each token was sampled; then return two arrays, advantage and target",
    "memory": "a dict that lasts from step to step and is saved; only what JSON has goes in",
}
LOSS = {
    "new": "log-probability of each sampled token now; the gradient goes through it",
    "old": "the log-probability that ratios are taken against, as `algorithm.anchor` says",
    "advantage": "of each token, weighed and guarded as the configuration says",
    "entropy": "of the distribution each token was drawn from, with its gradient",
    "reference": "log-probability under the reference policy",
    "episode": "number of each token's episode",
    "call": "number of its call",
    "turn": "its turn within the episode",
    "group": "number of its group",
    "version": "version of the policy that sampled it",
}
EXPECTED = {
    "advantage": (
        "def advantage(rewards, *, my_setting=1.0) -> one array a group, a number an episode; or\n"
        "def advantage(groups, terms, *, my_setting=1.0) -> one array, a number a row of `terms`",
        ADVANTAGE,
    ),
    "loss": (
        "def loss(new, old, advantage, *, my_setting=1.0) -> one tensor, a number a token; or it and a dict of others",
        LOSS,
    ),
}


class Own:
    """A function of the user's own, and which of its parameters are given and which are settings.

    Args:
        kind: `advantage` or `loss`.
        name: what the configuration calls it.
        function: it.
        args: settings, of which it takes its own.
    """

    def __init__(self, kind: str, name: str, function: Any, args: Mapping[str, Any]):
        self.kind, self.name, self.function = kind, name, function
        if inspect.isclass(function) or not callable(function):
            what = "a class" if inspect.isclass(function) else f"an object of {type(function).__name__}"
            raise self.wrong(f"is {what}. Give a function")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise self.wrong("has a signature that nobody can read") from error
        gives = EXPECTED[kind][1]
        for one in parameters:
            if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL):
                raise self.wrong(f"has a parameter {str(one)!r}, which cannot be filled by name")
        self.open = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        self.takes = [one.name for one in named if one.name in gives]
        self.settings = [one.name for one in named if one.name not in gives]
        self.args = {key: value for key, value in args.items() if key in self.settings or self.open}
        for one in named:
            if one.name in self.settings and one.default is one.empty and one.name not in args:
                near = did_you_mean(one.name, gives)
                raise self.wrong(f"wants {one.name!r}, which is not given.{near} Write algorithm.args.{one.name}=VALUE")

    def wrong(self, what: str) -> ConfigError:
        """The error that says so, and what is expected."""
        form, gives = EXPECTED[self.kind]
        listed = "\n".join(f"  {name:<10} {meaning}" for name, meaning in gives.items())
        return ConfigError(
            f"algorithm.{self.kind}={self.name}: {what}. Expected:\n{form}\nGiven by name, all or some of:\n{listed}"
        )

    def call(self, given: Mapping[str, Callable[[], Any]]) -> Any:
        """What the function returns; only what it takes is made."""
        return self.function(**{name: given[name]() for name in self.takes}, **self.args)


class OwnAdvantage(Own):
    """An advantage of the user's own behind the signature of all others."""

    def __call__(self, groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        if not len(terms):
            return np.zeros(0), None
        arrays = arrays_of(groups, terms, config, memory)
        mine = memory.setdefault("own", {}) if "memory" in self.takes else {}
        found = self.call(
            {
                "rewards": lambda: arrays.by_group(arrays.reward_E.copy()),
                "groups": lambda: groups,
                "terms": lambda: read_only(terms),
                "value": terms.value.copy,
                "memory": lambda: mine,
            }
        )
        if "value" in self.takes:
            if not isinstance(found, tuple) or len(found) != 2:
                raise self.wrong(f"takes `value` and returns {_shape(found)}, not two arrays (advantage, target)")
            return self._column(found[0], len(terms)), self._column(found[1], len(terms))
        if isinstance(found, list | tuple):
            by_group = [self._column(one, size) for one, size in zip(found, arrays.sizes, strict=False)]
            if len(found) != len(arrays.sizes):
                raise self.wrong(f"returns {len(found)} arrays for {len(arrays.sizes)} groups")
            return over_branches(arrays, np.concatenate(by_group), config), None
        return self._column(found, len(terms)), None

    def _column(self, found: Any, size: int) -> Floats:
        if isinstance(found, Tensor):
            found = found.detach().cpu().numpy()
        try:
            column = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self.wrong(f"returns {_shape(found)}, which are no numbers") from error
        if column.shape != (size,):
            raise self.wrong(f"returns {_shape(found)} where {size} numbers are due")
        return column


class OwnLoss(Own):
    """A loss of the user's own behind the signature of all others."""

    def __call__(self, said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
        found = self.call(
            {
                "new": lambda: said.logprob_M,
                "old": lambda: anchor(terms, config),
                "advantage": lambda: terms.advantage_M,
                "entropy": lambda: said.entropy_M,
                "reference": lambda: known(terms.reference_M, "reference"),
                "episode": lambda: terms.episode_M,
                "call": lambda: terms.call_M,
                "turn": lambda: terms.turn_M,
                "group": lambda: terms.group_M,
                "version": lambda: terms.version_M,
            }
        )
        loss_M, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        size = said.logprob_M.shape
        if not isinstance(loss_M, Tensor) or loss_M.shape != size or not isinstance(parts, Mapping):
            raise self.wrong(f"returns {_shape(found)} where a tensor of {len(said.logprob_M)} numbers is due")
        for name, vector in parts.items():
            if not isinstance(vector, Tensor) or vector.shape != size:
                raise self.wrong(f"returns {_shape(vector)} as {name!r} where a tensor of {size[0]} numbers is due")
        return loss_M, {name if "/" in name else f"policy/{name}": vector for name, vector in parts.items()}


def read_only(terms: Terms) -> Terms:
    """The same numbers, which nobody can change by accident: they are learned from afterwards."""
    columns = [getattr(terms, name) for name in Terms.__slots__]
    views: list[Any] = [column if column is None else column.view() for column in columns]
    for view in views:
        if view is not None:
            view.flags.writeable = False
    return Terms(*views)


def own_parts(config: AlgorithmConfig, find: Find = load) -> tuple[OwnAdvantage | None, OwnLoss | None]:
    """The advantage and the loss that are the user's own; every setting is taken by one of them."""
    advantage = loss = None
    if is_custom(config.advantage):
        advantage = OwnAdvantage("advantage", config.advantage, find(config.advantage, "advantage"), config.args)
    if is_custom(config.loss):
        loss = OwnLoss("loss", config.loss, find(config.loss, "loss"), config.args)
    both = [one for one in (advantage, loss) if one is not None]
    settings = [name for one in both for name in one.settings]
    for key in config.args:
        if key not in settings and not any(one.open for one in both):
            takes = f"They take: {', '.join(settings)}." if settings else "They take none."
            raise ConfigError(f"algorithm.args.{key}: unknown setting.{did_you_mean(key, settings)} {takes}")
    return advantage, loss


def _shape(found: Any) -> str:
    if isinstance(found, Tensor | np.ndarray):
        return f"an array of shape {tuple(found.shape)}"
    if isinstance(found, list | tuple):
        return f"{len(found)} things"
    return f"an object of {type(found).__name__}"
