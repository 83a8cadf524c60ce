"""From their keys to a configuration that validates here."""

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
from arborl.convert.reading.collect import Collected, collect
from arborl.convert.roll import pipelines as roll
from arborl.convert.verl import keys as verl
from arborl.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class System:
    """How one system's files are read, and what becomes of their keys."""

    table: Mapping[str, Rule]
    """Rules by key."""
    prefixes: Mapping[str, Rule]
    """Rules by how a key begins; the longest counts."""
    whole: Callable[[Draft], None] | None = None
    """Read before the tables: settings that only make sense together."""
    after: Callable[[Draft], None] | None = None
    """Read behind the tables."""
    variables: Callable[[Draft, Mapping[str, Any]], None] | None = None
    """What is read off a script's variables, where its overrides are made elsewhere."""
    plain_keys: bool = False
    """Keys at the top have no dot, so an assignment in a list of overrides is one."""
    absent: Rule | None = None
    """What is said of a file that a `defaults` list names and that is not there; none: that is an error."""


def _agentfly(draft: Draft) -> None:
    agentfly.after(draft)
    if not draft.problems:
        verl.complete(draft, own_parts=True)


SYSTEMS: dict[str, System] = {
    "verl": System(
        verl.TABLE, verl.PREFIXES, after=verl.complete, variables=verl.variables_too, absent=verl.configuration
    ),
    "agentfly": System(verl.TABLE | agentfly.TABLE, verl.PREFIXES, after=_agentfly, absent=verl.configuration),
    "roll": System(roll.TABLE, roll.PREFIXES, whole=roll.convert_all, plain_keys=True),
}


def convert(system: str, files: Sequence[Path], uses: Mapping[str, str] | None = None) -> Draft:
    """Read their files, later ones over earlier ones, and say what becomes of every key.

    An environment, agent, tool or reward that is not here is an error that says what to do; nothing stands in for it.

    Args:
        system: `verl`, `agentfly` or `roll`.
        files: YAML (with what its `defaults` name), scripts or lists of overrides.
        uses: what a name of theirs stands for here: `{"ifeval": "my_package.rewards:ifeval"}`.

    Example:
        draft = convert("agentfly", [Path("train_example.sh")])
        draft.tree(), draft.report()
    """
    if system not in SYSTEMS:
        raise ConfigError(
            f"no system is called {system!r}.{did_you_mean(system, SYSTEMS)} Known: {', '.join(SYSTEMS)}."
        )
    chosen = SYSTEMS[system]
    found = collect(files, chosen.plain_keys, chosen.absent is not None)
    draft = Draft(given=found.keys, uses=dict(uses or {}))
    with _kinds(str(files[-1])):
        if chosen.whole is not None:
            chosen.whole(draft)
    for key, value in draft.given.items():
        if key not in draft.accounted():
            with _kinds(f"{key}={value!r}"):
                _rule(key, chosen, found)(draft, key, value)
    if chosen.variables is not None:
        chosen.variables(draft, found.variables)
    for _, name in found.absent:
        assert chosen.absent is not None
        chosen.absent(draft, "defaults", name)
    if draft.problems:
        raise ConfigError("\n".join(draft.problems))
    if not draft.settings:
        raise ConfigError(f"{files[0]}: no settings of {system} in it. Give its script, override list or YAML.")
    if chosen.after is not None:
        chosen.after(draft)
        if draft.problems:
            raise ConfigError("\n".join(draft.problems))
    _finish(draft)
    _explain_environment(draft, found)
    return draft


@contextmanager
def _kinds(where: str) -> Iterator[None]:
    """What a value of the wrong kind does to a rule, as one line."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: a value is not of the kind its key takes: {error}.") from error


def _rule(key: str, system: System, found: Collected) -> Rule:
    if key in system.table:
        return system.table[key]
    longest = max((prefix for prefix in system.prefixes if key.startswith(prefix)), key=len, default=None)
    if longest is not None:
        return system.prefixes[longest]
    return _definition if key.partition(".")[0] in found.referred else _unknown


def _definition(draft: Draft, key: str, value: Any) -> None:
    draft.skip(key, value, "a definition: read wherever ${…} names it")


def _unknown(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, value, "not a key this converter knows")


def _finish(draft: Draft) -> None:
    """Take out what the chosen algorithm would not read, and check the rest."""
    settings = draft.settings
    base = AlgorithmConfig(name=_known_preset(settings.get("algorithm.name", "grpo")))
    own = {key.removeprefix("algorithm."): value for key, value in settings.items() if key.startswith("algorithm.")}
    loss, advantage = own.get("loss", base.loss), own.get("advantage", base.advantage)
    filled = {name: getattr(base, name) for name in type(base).model_fields}
    reads = settings_read(filled | {"loss": loss, "advantage": advantage} | own | {"importance_weights": _guard(own)})
    for key in own:
        if key.partition(".")[0] not in reads and key.partition(".")[0] in type(base).model_fields:
            draft.undo(f"algorithm.{key}", f"algorithm={base.name} does not read it")
    validate(RunConfig, draft.tree())


def _known_preset(name: Any) -> Any:
    """The preset; one that is not there is left for the validation to name."""
    try:
        AlgorithmConfig(name=name)
    except ValidationError:
        return "grpo"
    return name


def _guard(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix("importance_weights."): value
        for key, value in own.items()
        if key.startswith("importance_weights.")
    }


def _explain_environment(draft: Draft, found: Collected) -> None:
    """What is left to a variable of the environment is so in the converted file as well."""
    for key, name in found.environment.items():
        why = f"${{oc.env:{name}}} is filled in when training starts: set {name}"
        draft.lines = [
            dataclasses.replace(line, kind="changed", why=why) if line.key == key and line in draft.mapped else line
            for line in draft.lines
        ]
