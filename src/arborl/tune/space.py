"""Search spaces: parameters by name with the values that each may take; named spaces of the library."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.config.load_config import parse_value
from arborl.errors import ConfigError, did_you_mean

Value = str | int | float | bool | None
Params = dict[str, Any]
KINDS = {"log": "loguniform", "loguniform": "loguniform", "uniform": "uniform", "int": "int"}
"""Kinds of ranges on the command line, and their full names."""
TYPES = ("uniform", "loguniform", "int", "categorical")


@dataclass(frozen=True, slots=True)
class RangeDomain:
    """Numbers in a closed interval."""

    low: float
    high: float
    log: bool = False
    """Uniform in the logarithm."""
    whole: bool = False

    def contains(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return bool(self.low <= value <= self.high)

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that are validated."""
        return self.low, self.high

    def as_dict(self) -> dict[str, Any]:
        kind = "int" if self.whole else "loguniform" if self.log else "uniform"
        return {"type": kind, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (", log" if self.log else ", whole" if self.whole else "")


@dataclass(frozen=True, slots=True)
class ChoiceDomain:
    """One of several values."""

    choices: tuple[Value, ...]

    def contains(self, value: Any) -> bool:
        return any(_same(value, choice) for choice in self.choices)

    def index(self, value: Any) -> int:
        return next(number for number, choice in enumerate(self.choices) if _same(value, choice))

    @property
    def ends(self) -> tuple[Value, ...]:
        return self.choices

    def as_dict(self) -> dict[str, Any]:
        return {"type": "categorical", "choices": list(self.choices)}

    def __str__(self) -> str:
        return ", ".join(map(str, self.choices))


Domain = RangeDomain | ChoiceDomain
Space = Mapping[str, Domain]


def read_space(given: Mapping[str, Any], where: str = "") -> dict[str, Domain]:
    """A search space from a mapping."""
    at = f"{where}: " if where else ""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{at}a search space is a mapping of names to values, not {type(given).__name__}.")
    if not given:
        raise ConfigError(f"{at}the search space is empty. Write --param NAME=log:LOW:HIGH, or NAME=A,B,C.")
    return {str(name): _read(f"{at}{name}", domain) for name, domain in given.items()}


def read_space_file(path: Path) -> dict[str, Domain]:
    """A search space from a YAML file."""
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        return read_space(OmegaConf.to_container(OmegaConf.load(path)), str(path))  # type: ignore[arg-type]
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error


def read_param(text: str) -> tuple[str, Domain]:
    """A parameter as written on the command line."""
    name, equals, values = text.partition("=")
    if not name.strip() or not equals:
        raise ConfigError(f"--param {text}: has no values. Write {name.strip() or 'NAME'}=log:LOW:HIGH, or =A,B,C.")
    return name.strip(), _from_text(name.strip(), values)


def _from_text(name: str, values: str) -> Domain:
    if found := re.fullmatch(r"\s*(\w+):([^:,]+):([^:,]+)", values):
        kind, low, high = found.groups()
        if kind not in KINDS:
            known = ", ".join(f"{word}:LOW:HIGH" for word in ("log", "uniform", "int"))
            raise ConfigError(f"{name}: {kind!r} is no kind of range.{did_you_mean(kind, KINDS)} Known: {known}.")
        return _range(name, {"type": KINDS[kind], "low": parse_value(low), "high": parse_value(high)})
    choices = parse_value(f"[{values}]")
    if len(choices) == 1:
        raise ConfigError(
            f"{name}: {values} is a single value. Write several, {name}=A,B,C, or a range, "
            f"{name}=log:LOW:HIGH; a setting for all trials is written without --param: {name}={values}."
        )
    return _choice(name, {"type": "categorical", "choices": choices})


def _read(name: str, given: Any) -> Domain:
    if isinstance(given, RangeDomain | ChoiceDomain):
        return given
    if isinstance(given, str):
        return _from_text(name, given)
    if isinstance(given, list | tuple):
        given = {"type": "categorical", "choices": list(given)}
    if not isinstance(given, Mapping) or "type" not in given:
        raise ConfigError(
            f"{name}: given {given!r}. Write a type: one of {', '.join(TYPES)}, with low and high, or with choices."
        )
    kind = given["type"]
    if kind not in TYPES:
        raise ConfigError(
            f"{name}: type {kind!r} is unknown.{did_you_mean(str(kind), TYPES)} Known: {', '.join(TYPES)}."
        )
    return _choice(name, given) if kind == "categorical" else _range(name, given)


def _keys(name: str, given: Mapping[str, Any], *wanted: str) -> list[Any]:
    for key in given:
        if key not in ("type", *wanted):
            near = did_you_mean(str(key), wanted)
            raise ConfigError(f"{name}: {key!r} is unknown.{near} A {given['type']} has {' and '.join(wanted)}.")
    for key in wanted:
        if key not in given:
            raise ConfigError(f"{name}: {key} is missing. A {given['type']} has {' and '.join(wanted)}.")
    return [given[key] for key in wanted]


def _range(name: str, given: Mapping[str, Any]) -> RangeDomain:
    kind = given["type"]
    low, high = _keys(name, given, "low", "high")
    for key, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name}: {key}={value!r} must be a number. Write {key}=0.1.")
        if kind == "int" and value != int(value):
            raise ConfigError(f"{name}: {key}={value:g} of an int must be a whole number. Write {key}={round(value)}.")
        if kind == "loguniform" and value <= 0:
            least = high / 1000 if key == "low" and isinstance(high, int | float) and high > 0 else 1e-6
            raise ConfigError(
                f"{name}: {key}={value:g} of a loguniform must be above 0, which has no logarithm. Write "
                f"{key}={least:g}, or the type uniform."
            )
    if low >= high:
        raise ConfigError(
            f"{name}: low={low:g} must be below high={high:g}. Write low={min(low, high):g}, high="
            f"{max(low, high) if low > high else (low + 1 if kind == 'int' else low * 2 or 1):g}."
        )
    if kind == "int":
        return RangeDomain(int(low), int(high), whole=True)
    return RangeDomain(float(low), float(high), log=kind == "loguniform")


def _choice(name: str, given: Mapping[str, Any]) -> ChoiceDomain:
    (choices,) = _keys(name, given, "choices")
    if not isinstance(choices, list | tuple):
        raise ConfigError(f"{name}: choices must be a list, given {choices!r}. Write choices=[{choices}, …].")
    if not choices:
        raise ConfigError(f"{name}: choices is empty. Write choices=[4, 8, 16], or leave {name} out.")
    for number, value in enumerate(choices):
        if value is not None and not isinstance(value, str | int | float):
            raise ConfigError(f"{name}: the choice {value!r} must be a number, text, true, false or null.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: the choice {value!r} is no number to compare with. Leave it out.")
        if any(_same(value, other) for other in choices[:number]):
            raise ConfigError(f"{name}: the choice {value!r} is there twice. Leave one out.")
    return ChoiceDomain(tuple(choices))


def _same(one: Any, other: Any) -> bool:
    """Equal and of the same kind: `True` is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


KEYS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("learner.lr",),
    "num_generations": ("rollout.group_size",),
    "temperature": ("sampling.temperature",),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "kl_penalty": ("algorithm.kl.coef",),
    "max_grad_norm": ("learner.max_grad_norm",),
    "warmup_ratio": ("learner.warmup",),
}
"""A parameter of the conversational API -> the settings that it sets."""


_TYPES = {"learning_rate": "loguniform", "num_generations": "categorical"}
"""Types of parameters in the named spaces; others are uniform."""
_GRPO: dict[str, tuple[float, ...]] = {
    "learning_rate": (1e-7, 1e-4), "num_generations": (4, 8, 16), "temperature": (0.5, 1.2), "clip_range": (0.1, 0.3),
}  # fmt: skip
_NAMED: dict[str, dict[str, tuple[float, ...]]] = {
    "grpo": _GRPO,
    "full": {**_GRPO, "kl_penalty": (0.0, 0.2), "max_grad_norm": (0.3, 2.0), "warmup_ratio": (0.0, 0.2)},
    # keep the tone of the base model: low temperature and a KL penalty
    "customer_service": {
        "learning_rate": (1e-6, 2e-5), "num_generations": (8, 16), "temperature": (0.6, 1.0),
        "kl_penalty": (0.01, 0.1),
    },
    # answers are right or wrong: low temperature and large groups
    "technical_support": {
        "learning_rate": (1e-6, 3e-5), "num_generations": (8, 16), "temperature": (0.4, 0.9),
        "clip_range": (0.1, 0.25),
    },
    # many solutions: high temperature for exploration
    "sales": {
        "learning_rate": (1e-6, 5e-5), "num_generations": (8, 16), "temperature": (0.7, 1.2),
        "kl_penalty": (0.0, 0.1),
    },
    "conservative": {
        "learning_rate": (5e-7, 5e-6), "num_generations": (8, 16), "temperature": (0.7, 1.0),
        "clip_range": (0.1, 0.2),
    },
    "aggressive": {
        "learning_rate": (1e-6, 1e-3), "num_generations": (4, 8, 16, 32), "temperature": (0.5, 1.5),
        "clip_range": (0.1, 0.4),
    },
}  # fmt: skip


def _domain(name: str, values: tuple[float, ...]) -> dict[str, Any]:
    kind = _TYPES.get(name, "uniform")
    ends = {"choices": list(values)} if kind == "categorical" else {"low": values[0], "high": values[1]}
    return {"type": kind, **ends}


SPACES = {space: {name: _domain(name, values) for name, values in params.items()} for space, params in _NAMED.items()}
"""Named search spaces."""


def get_search_space(name: str) -> dict[str, dict[str, Any]]:
    """A copy of a named search space.

    Example:
        space = get_search_space("grpo")
        space["learning_rate"]["high"] = 1e-3
    """
    if name not in SPACES:
        raise ConfigError(
            f"no search space is called {name!r}.{did_you_mean(name, SPACES)} Known: {', '.join(SPACES)}."
        )
    return copy.deepcopy(SPACES[name])
