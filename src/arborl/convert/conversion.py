"""From the keys of another system to a valid configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arborl.config.algorithm_config import AlgorithmConfig, settings_read
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert import agentfly, trl_keys
from arborl.convert.common_rules import Rule, idle, no
from arborl.convert.devices import DeviceRequest, place
from arborl.convert.draft import Draft
from arborl.convert.reading.source_files import SourceKeys, collect, system_of
from arborl.convert.roll import roll_pipelines as roll
from arborl.convert.roll.roll_learner import devices as roll_devices
from arborl.convert.trl_rules import devices as trl_devices
from arborl.convert.trl_scripts import read_training
from arborl.convert.verl import verl_keys as verl
from arborl.convert.verl import verl_supervised as supervised
from arborl.convert.verl.verl_rules import configuration
from arborl.convert.verl.verl_rules import devices as verl_devices
from arborl.errors import ConfigError, did_you_mean

BASES = {"agentfly": ("verl",), "statelm": ("verl",)}
"""Systems whose files a fork reads too."""
BESIDE = re.compile(r"(?!.*\.\.).*")
"""Names without `..`."""


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
    added: Callable[[Draft, Mapping[str, Any]], dict[str, str]] | None = None
    """Adds variables of a script whose overrides are built elsewhere to the keys; returns their names by key."""
    variables: Callable[[Draft, Mapping[str, Any]], None] | None = None
    """Reads variables of a script after the tables."""
    check: Callable[[SourceKeys, str], None] | None = None
    """Raises ConfigError for files that are of no training."""
    variant: Callable[[SourceKeys], SourceSystem | None] | None = None
    """Other rules for files of another trainer of the system."""
    plain_keys: bool = False
    """Whether top-level keys have no dot, so that `a=1` in an override list is a key."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Their defaults by key."""
    absent: Rule | None = None
    """Rule for a missing file of a `defaults` list; None: a missing file is an error."""
    absent_names: re.Pattern[str] = BESIDE
    """Names of files that may be missing."""
    devices: Callable[[Draft], DeviceRequest] | None = None
    """Reads GPUs, strategies and engines."""
    read: Callable[[Sequence[Path]], SourceKeys] | None = None
    """Reads the files; None: shell scripts, override lists and YAML."""

    @property
    def sections(self) -> frozenset[str]:
        """Their sections and top-level keys; others may be definitions for references."""
        return frozenset(key.partition(".")[0] for key in (*self.table, *self.prefixes))


def _agentfly(draft: Draft) -> None:
    agentfly.after(draft)
    if not draft.problems:
        verl.complete(draft, has_parts=True)


_SUPERVISED = SourceSystem(
    supervised.TABLE,
    supervised.PREFIXES,
    after=supervised.complete,
    defaults=supervised.DEFAULTS,
    absent=configuration,
    devices=supervised.devices,
)
_VERL = SourceSystem(
    verl.TABLE,
    verl.PREFIXES,
    after=verl.complete,
    added=verl.variables_too,
    check=verl.check_training,
    variant=lambda collected: _SUPERVISED if supervised.is_supervised(collected) else None,
    defaults=verl.DEFAULTS,
    absent=configuration,
    devices=verl_devices,
)
SYSTEMS: dict[str, SourceSystem] = {
    "verl": _VERL,
    "statelm": _VERL,
    "agentfly": dataclasses.replace(_VERL, table=verl.TABLE | agentfly.TABLE, after=_agentfly, added=None),
    "roll": SourceSystem(
        roll.TABLE, roll.PREFIXES, whole=roll.convert_all, plain_keys=True, absent=roll.absent_fragment,
        absent_names=re.compile(r"(?:.*/)?deepspeed_\w+"), devices=roll_devices,
    ),
    "trl": SourceSystem(
        trl_keys.TABLE, trl_keys.PREFIXES, whole=trl_keys.begin, after=trl_keys.complete, variables=trl_keys.parts,
        read=read_training, devices=trl_devices,
    ),
}  # fmt: skip


def convert(
    system: str, files: Sequence[Path], uses: Mapping[str, str] | None = None, gpus: int | None = None
) -> Draft:
    """Read files of another system, later ones over earlier ones, and convert every key.

    An environment, agent, tool or reward without counterpart is a ConfigError; nothing is substituted.

    Args:
        system: `verl`, `statelm` (a fork of verl), `agentfly`, `roll` or `trl`.
        files: YAML (with the files of its `defaults`), scripts or override lists; of TRL a Python script, and
            optionally files of its command line.
        uses: counterparts of their names: `{"chess": "my_package.envs:Chess"}`.
        gpus: GPUs of the user's machine; None: as their files say.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}.{did_you_mean(system, SYSTEMS)} Known: {', '.join(SYSTEMS)}.")
    try:
        return _convert(system, files, uses, gpus)
    except ConfigError as error:
        raise ConfigError(_with_files(str(error), files)) from error


def _with_files(message: str, files: Sequence[Path]) -> str:
    """Each line of an error with the files before it, unless it names one."""
    given = ", ".join(map(str, files))
    named = [str(file) for file in files]
    return "\n".join(
        line if any(name in line for name in named) else f"{given}: {line}" for line in message.splitlines()
    )


def _convert(system: str, files: Sequence[Path], uses: Mapping[str, str] | None, gpus: int | None) -> Draft:
    for file in files:
        written_for = system_of(file)
        if written_for not in (None, system, *BASES.get(system, ())):
            raise ConfigError(conversion_advice(file))
    chosen = SYSTEMS[system]
    absent = chosen.absent_names if chosen.absent is not None else None
    collected = chosen.read(files) if chosen.read else collect(files, chosen.plain_keys, absent)
    chosen = (chosen.variant(collected) if chosen.variant is not None else None) or chosen
    if chosen.check is not None:
        chosen.check(collected, str(files[0]))
    draft = Draft(source=collected.keys, uses=dict(uses or {}), defaults=chosen.defaults)
    added = chosen.added(draft, collected.variables) if chosen.added is not None else {}
    with _value_errors("a value of the file"):
        if chosen.whole is not None:
            chosen.whole(draft)
        request = chosen.devices(draft) if chosen.devices is not None else DeviceRequest()
    of_devices = frozenset(key for keys in request.keys.values() for key in keys)
    for key, value in draft.source.items():
        if key not in draft.accounted() and key not in of_devices:
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
    place(draft, request, gpus)
    for key in [key for key in draft.source if key not in draft.accounted()]:
        draft.lose(key, draft.source[key], "no rule reads it")
    _finish(draft)
    _explain_environment(draft, collected)
    draft.lines = [dataclasses.replace(line, key=added.get(line.key, line.key)) for line in draft.lines]
    draft.source = {added.get(key, key): value for key, value in draft.source.items()}
    return draft


TITLES = {"roll": "ROLL", "verl": "verl", "agentfly": "AgentFly", "trl": "TRL", "stateset": "StateSet"}


def conversion_advice(file: Path) -> str:
    """How to convert a file of another system; empty where it is none."""
    system = system_of(file) if file.is_file() else None
    kind = {".py": "script", ".sh": "script", ".bash": "script"}.get(file.suffix, "file")
    out = "run.py" if system == "stateset" else "run.yaml"
    if system is not None:
        return f"{file}: this is a {kind} of {TITLES[system]}. Convert it: arborl convert {system} {file} --out {out}"
    if kind != "script" or not file.is_file():
        return ""
    systems = "trl|stateset" if file.suffix == ".py" else "verl|agentfly|roll"
    return (
        f"{file}: a script is not a configuration. One of another system is converted: arborl convert {systems} "
        f"{file} --out {out}"
    )


@contextmanager
def _value_errors(where: str) -> Iterator[None]:
    """Report a value of the wrong type as one line."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError) as error:
        raise ConfigError(f"{where}: wrong type of value: {error}.") from error


def _rule(key: str, system: SourceSystem, collected: SourceKeys) -> Rule:
    if key in system.table:
        return system.table[key]
    longest = max((prefix for prefix in system.prefixes if key.startswith(prefix)), key=len, default=None)
    if longest is not None:
        return system.prefixes[longest]
    head = key.partition(".")[0]
    if head in collected.referred and head not in system.sections:
        return idle("a definition, used by ${…}")
    return no("unknown key")


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
    try:
        validate(RunConfig, draft.tree())
    except ConfigError as error:
        raise ConfigError("\n".join(_with_origin(line, draft) for line in str(error).splitlines())) from error


def _with_origin(line: str, draft: Draft) -> str:
    """An error about settings of ours with the keys of theirs that they come from."""
    found = [
        report for report in draft.mapped if report.path and re.search(rf"(?<![\w.]){re.escape(report.path)}\b", line)
    ]
    named = dict.fromkeys(f"{report.key}={report.value!r}" for report in found if report.explicit)
    return f"{', '.join(named)}: {line}" if named else line


def _explain_environment(draft: Draft, collected: SourceKeys) -> None:
    """Note keys that depend on environment variables."""
    for key, name in collected.environment.items():
        why = f"${{oc.env:{name}}} is read when training starts: set {name}"
        draft.lines = [
            dataclasses.replace(line, kind="changed", why=why) if line.key == key and line in draft.mapped else line
            for line in draft.lines
        ]
