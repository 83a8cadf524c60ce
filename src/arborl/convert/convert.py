"""From their keys to a configuration that validates here."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.config.algorithm import AlgorithmConfig, reads_of
from arborl.config.base import validate
from arborl.config.run import RunConfig
from arborl.convert import agentfly, roll, verl
from arborl.convert.draft import Draft, Rule
from arborl.convert.reading import read
from arborl.errors import ConfigError, did_you_mean

SYSTEMS: dict[str, tuple[dict[str, Rule], dict[str, Rule]]] = {
    "verl": (verl.TABLE, verl.PREFIXES),
    "agentfly": (verl.TABLE | agentfly.TABLE, verl.PREFIXES),
    "roll": (roll.TABLE, roll.PREFIXES),
}
"""Rules by key, and by how a key begins."""
DEFAULTS: dict[str, dict[str, Any]] = {"verl": verl.DEFAULTS, "agentfly": verl.DEFAULTS}
"""What PPO's loss does there where nothing is said, and would not do here."""


def convert(system: str, files: Sequence[Path]) -> Draft:
    """Read their files, later ones over earlier ones, and say what becomes of every key.

    Example:
        draft = convert("agentfly", [Path("train_example.sh")])
        draft.tree(), draft.report()
    """
    if system not in SYSTEMS:
        raise ConfigError(
            f"no system is called {system!r}.{did_you_mean(system, SYSTEMS)} Known: {', '.join(SYSTEMS)}."
        )
    given: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    for file in files:
        keys, named = read(file)
        given |= keys
        variables |= named
    draft = Draft(given=given)
    table, prefixes = SYSTEMS[system]
    for key, value in given.items():
        _rule(key, table, prefixes)(draft, key, value)
    if system == "verl":
        _variables(draft, variables)
    if not draft.settings:
        raise ConfigError(f"{files[0]}: no settings of {system} in it. Give its script, override list or YAML.")
    _finish(draft, DEFAULTS.get(system, {}))
    return draft


def _rule(key: str, table: Mapping[str, Rule], prefixes: Mapping[str, Rule]) -> Rule:
    if key in table:
        return table[key]
    longest = max((prefix for prefix in prefixes if key.startswith(prefix)), key=len, default=None)
    return prefixes[longest] if longest is not None else _unknown


def _unknown(draft: Draft, key: str, value: Any) -> None:
    draft.drop(key, value, "not a key this converter knows")


def _variables(draft: Draft, variables: Mapping[str, Any]) -> None:
    """Variables with a known meaning, where no override said the same."""
    for name, value in variables.items():
        rule = verl.variable_ratio if name.endswith("_RATIO") else verl.VARIABLES.get(name)
        if rule is None or value in (None, ""):
            continue
        trial = Draft(given=draft.given)
        rule(trial, name, value)
        if not trial.settings.keys() <= draft.settings.keys():
            rule(draft, name, value)
        draft.dropped += trial.dropped if trial.dropped else []


def _finish(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """What their defaults mean here, and what the chosen algorithm would not read."""
    settings = draft.settings
    rows = any(key.startswith(("data.path", "data.sources")) for key in settings) and "env.name" not in settings
    if rows and not any(key.endswith(".env.name") for key in settings):
        settings.setdefault("rewards", ["equal"])
    wants_tools = "tools" in settings or "agent.args.max_tool_rounds" in settings
    if wants_tools and settings.get("agent.name", "chat") == "chat":
        settings["agent.name"] = "tool"
    if settings.get("data.by") and "data.path" not in settings:
        settings["data.path"] = "train.parquet"
        draft.drop("data.train_files", None, "not given: data.path says train.parquet until you change it")
    if settings.get("data.by") and "data.evaluation_path" in settings:
        draft.drop(
            "data.val_files", settings.pop("data.evaluation_path"), "rows told apart by a column hold out their own"
        )
    own = {
        key.removeprefix("algorithm."): value for key, value in draft.settings.items() if key.startswith("algorithm.")
    }
    base = AlgorithmConfig(name=own.get("name", "grpo"))
    loss = own.get("loss", base.loss)
    reads = reads_of({field: getattr(base, field) for field in type(base).model_fields} | {"loss": loss})
    if base.advantage == "gae":
        reads.add("gamma")
    _leave_out_unread(draft, own, base, reads)
    if loss == "ppo":
        highest = 1 + settings.get("algorithm.clip_high", base.clip_high)
        fit = {key: value for key, value in defaults.items() if key != "algorithm.dual_clip" or value > highest}
        draft.settings = fit | settings
    validate(RunConfig, draft.tree())


def _leave_out_unread(draft: Draft, own: Mapping[str, Any], base: AlgorithmConfig, reads: Container[str]) -> None:
    for key in own:
        if key.partition(".")[0] not in reads:
            why = f"algorithm={base.name} does not read it"
            value = draft.settings.pop(f"algorithm.{key}")
            theirs = next((line.key for line in draft.mapped if line.what.startswith(f"algorithm.{key}=")), key)
            draft.mapped = [line for line in draft.mapped if not line.what.startswith(f"algorithm.{key}=")]
            draft.drop(theirs, value, why)
