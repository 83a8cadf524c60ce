"""From the keys of another system to a valid configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arborl.config.algorithm_config import AlgorithmConfig, settings_read
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import agentfly
from arborl.convert.draft import Draft, Rule
from arborl.convert.reading.source_files import SourceKeys, collect
from arborl.convert.roll import roll_pipelines as roll
from arborl.convert.verl import verl_keys as verl
from arborl.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class SourceSystem:
    """Rules for one system's keys."""

    table: Mapping[str, Rule]
    """Rules by key."""
    prefixes: Mapping[str, Rule]
    """Rules by prefix; the longest prefix counts."""
    whole: Callable[[Draft], None] | None = None
    """Runs before the tables, for settings that depend on each other."""
    after: Callable[[Draft], None] | None = None
    """Runs after the tables."""
    variables: Callable[[Draft, Mapping[str, Any]], None] | None = None
    """Reads variables of a script whose overrides are built elsewhere."""
    plain_keys: bool = False
    """Whether top-level keys have no dot, so that `a=1` in an override list is a key."""
    absent: Rule | None = None
    """Rule for a missing file of a `defaults` list; None: a missing file is an error."""


def _agentfly(draft: Draft) -> None:
    agentfly.after(draft)
    if not draft.problems:
        verl.complete(draft, has_parts=True)


SYSTEMS: dict[str, SourceSystem] = {
    "verl": SourceSystem(
        verl.TABLE, verl.PREFIXES, after=verl.complete, variables=verl.variables_too, absent=verl.configuration
    ),
    "agentfly": SourceSystem(verl.TABLE | agentfly.TABLE, verl.PREFIXES, after=_agentfly, absent=verl.configuration),
    "roll": SourceSystem(roll.TABLE, roll.PREFIXES, whole=roll.convert_all, plain_keys=True),
}


def convert(system: str, files: Sequence[Path], uses: Mapping[str, str] | None = None) -> Draft:
    """Read files of another system, later ones over earlier ones, and convert every key.

    An environment, agent, tool or reward without counterpart is a ConfigError; nothing is substituted.

    Args:
        system: `verl`, `agentfly` or `roll`.
        files: YAML (with the files of its `defaults`), scripts or override lists.
        uses: counterparts of their names: `{"ifeval": "my_package.rewards:ifeval"}`.

    Example:
        draft = convert("agentfly", [Path("train_example.sh")])
        draft.tree(), draft.report()
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}.{did_you_mean(system, SYSTEMS)} Known: {', '.join(SYSTEMS)}.")
    chosen = SYSTEMS[system]
    collected = collect(files, chosen.plain_keys, chosen.absent is not None)
    draft = Draft(source=collected.keys, uses=dict(uses or {}))
    with _value_errors(str(files[-1])):
        if chosen.whole is not None:
            chosen.whole(draft)
    for key, value in draft.source.items():
        if key not in draft.accounted():
            with _value_errors(f"{key}={value!r}"):
                _rule(key, chosen, collected)(draft, key, value)
    if chosen.variables is not None:
        chosen.variables(draft, collected.variables)
    for _, name in collected.absent:
        assert chosen.absent is not None
        chosen.absent(draft, "defaults", name)
    if draft.problems:
        raise ConfigError("\n".join(draft.problems))
    if not draft.settings:
        raise ConfigError(f"{files[0]}: it has no settings of {system}. Write its script, override list or YAML.")
    if chosen.after is not None:
        chosen.after(draft)
        if draft.problems:
            raise ConfigError("\n".join(draft.problems))
    _finish(draft)
    _explain_environment(draft, collected)
    return draft


@contextmanager
def _value_errors(where: str) -> Iterator[None]:
    """Report a value of the wrong type as one line."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: wrong type of value: {error}.") from error


def _rule(key: str, system: SourceSystem, collected: SourceKeys) -> Rule:
    if key in system.table:
        return system.table[key]
    longest = max((prefix for prefix in system.prefixes if key.startswith(prefix)), key=len, default=None)
    if longest is not None:
        return system.prefixes[longest]
    return _definition if key.partition(".")[0] in collected.referred else _unknown


def _definition(draft: Draft, key: str, value: Any) -> None:
    draft.skip(key, value, "a definition, used by ${…}")


def _unknown(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, value, "unknown key")


def _finish(draft: Draft) -> None:
    """Remove settings that the algorithm does not read, and validate the rest."""
    settings = draft.settings
    base = AlgorithmConfig(name=_known_preset(settings.get("algorithm.name", "grpo")))
    algorithm = {
        key.removeprefix("algorithm."): value for key, value in settings.items() if key.startswith("algorithm.")
    }
    loss, advantage = algorithm.get("loss", base.loss), algorithm.get("advantage", base.advantage)
    filled = {name: getattr(base, name) for name in type(base).model_fields}
    reads = settings_read(
        filled | {"loss": loss, "advantage": advantage} | algorithm | {"importance_weights": _guard(algorithm)}
    )
    for key in algorithm:
        if key.partition(".")[0] not in reads and key.partition(".")[0] in type(base).model_fields:
            draft.undo(f"algorithm.{key}", f"algorithm={base.name} does not read it")
    validate(RunConfig, draft.tree())


def _known_preset(name: Any) -> Any:
    """The preset; an unknown one is reported by the validation."""
    try:
        AlgorithmConfig(name=name)
    except ValidationError:
        return "grpo"
    return name


def _guard(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix("importance_weights."): value
        for key, value in algorithm.items()
        if key.startswith("importance_weights.")
    }


def _explain_environment(draft: Draft, collected: SourceKeys) -> None:
    """Note keys that depend on environment variables."""
    for key, name in collected.environment.items():
        why = f"${{oc.env:{name}}} is read when training starts: set {name}"
        draft.lines = [
            dataclasses.replace(line, kind="changed", why=why) if line.key == key and line in draft.mapped else line
            for line in draft.lines
        ]
