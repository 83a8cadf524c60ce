"""From the keys of another system to a valid configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arborl.config.algorithm_config import AlgorithmConfig, settings_read
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import agentfly
from arborl.convert.common_rules import Rule, idle, no
from arborl.convert.draft import Draft
from arborl.convert.reading.source_files import SourceKeys, collect
from arborl.convert.roll import roll_pipelines as roll
from arborl.convert.verl import verl_keys as verl
from arborl.convert.verl.verl_rules import configuration
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults by key."""
    absent: Rule | None = None
    """Rule for a missing file of a `defaults` list; None: a missing file is an error."""


def _agentfly(draft: Draft) -> None:
    agentfly.after(draft)
    if not draft.problems:
        verl.complete(draft, has_parts=True)


_VERL = SourceSystem(
    verl.TABLE,
    verl.PREFIXES,
    after=verl.complete,
    variables=verl.variables_too,
    defaults=verl.DEFAULTS,
    absent=configuration,
)
SYSTEMS: dict[str, SourceSystem] = {
    "verl": _VERL,
    "agentfly": dataclasses.replace(_VERL, table=verl.TABLE | agentfly.TABLE, after=_agentfly, variables=None),
    "roll": SourceSystem(roll.TABLE, roll.PREFIXES, whole=roll.convert_all, plain_keys=True),
}


def convert(system: str, files: Sequence[Path], uses: Mapping[str, str] | None = None) -> Draft:
    """Read files of another system, later ones over earlier ones, and convert every key.

    An environment, agent, tool or reward without counterpart is a ConfigError; nothing is substituted.

    Args:
        system: `verl`, `agentfly` or `roll`.
        files: YAML (with the files of its `defaults`), scripts or override lists.
        uses: counterparts of their names: `{"ifeval": "my_package.rewards:ifeval"}`.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}.{did_you_mean(system, SYSTEMS)} Known: {', '.join(SYSTEMS)}.")
    chosen = SYSTEMS[system]
    collected = collect(files, chosen.plain_keys, chosen.absent is not None)
    draft = Draft(source=collected.keys, uses=dict(uses or {}), defaults=chosen.defaults)
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
    return idle("a definition, used by ${…}") if key.partition(".")[0] in collected.referred else no("unknown key")


def _finish(draft: Draft) -> None:
    """Remove settings that the algorithm does not read, and validate the rest."""
    section = draft.tree().get("algorithm", {})
    try:
        base = AlgorithmConfig(name=section.get("name", "grpo"))
    except ValidationError:  # an unknown preset is reported by the validation below
        base = AlgorithmConfig(name="grpo")
    reads = settings_read({name: getattr(base, name) for name in type(base).model_fields} | section)
    for path in [path for path in draft.settings if path.startswith("algorithm.")]:
        name = path.split(".")[1]
        if name not in reads and name in type(base).model_fields:
            draft.undo(path, f"algorithm={base.name} does not read it")
    validate(RunConfig, draft.tree())


def _explain_environment(draft: Draft, collected: SourceKeys) -> None:
    """Note keys that depend on environment variables."""
    for key, name in collected.environment.items():
        why = f"${{oc.env:{name}}} is read when training starts: set {name}"
        draft.lines = [
            dataclasses.replace(line, kind="changed", why=why) if line.key == key and line in draft.mapped else line
            for line in draft.lines
        ]
