"""From their keys to a configuration that validates here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arborl.config.algorithm import AlgorithmConfig, reads_of
from arborl.config.base import validate
from arborl.config.run import RunConfig
from arborl.convert import agentfly, verl
from arborl.convert.draft import Draft, Rule
from arborl.convert.hydra_files import Collected, collect
from arborl.convert.roll import pipelines as roll
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What PPO's loss does there where nothing is said, and would not do here."""
    plain_keys: bool = False
    """Keys at the top have no dot, so an assignment in a list of overrides is one."""
    absent: bool = False
    """Its own defaults need not lie beside a file."""


SYSTEMS: dict[str, System] = {
    "verl": System(verl.TABLE, verl.PREFIXES, defaults=verl.DEFAULTS, absent=True),
    "agentfly": System(
        verl.TABLE | agentfly.TABLE, verl.PREFIXES, after=agentfly.after, defaults=verl.DEFAULTS, absent=True
    ),
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
    found = collect(files, chosen.plain_keys, chosen.absent)
    draft = Draft(given=found.keys, uses=dict(uses or {}))
    with _kinds(str(files[-1])):
        if chosen.whole is not None:
            chosen.whole(draft)
    for key, value in draft.given.items():
        if key not in draft.accounted():
            with _kinds(f"{key}={value!r}"):
                _rule(key, chosen, found)(draft, key, value)
    if system == "verl":
        _variables(draft, found.variables)
    for _, name in found.absent:
        draft.drop("defaults", name, f"not beside the file: what it says is taken to be {system}'s own defaults")
    if draft.problems:
        raise ConfigError("\n".join(draft.problems))
    if not draft.settings:
        raise ConfigError(f"{files[0]}: no settings of {system} in it. Give its script, override list or YAML.")
    if chosen.after is not None:
        chosen.after(draft)
        if draft.problems:
            raise ConfigError("\n".join(draft.problems))
    _finish(draft, system, chosen.defaults)
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
        draft.lines += [line for line in trial.dropped if line not in draft.lines]


def _finish(draft: Draft, system: str, defaults: Mapping[str, Any]) -> None:
    """What their defaults mean here, and what the chosen algorithm would not read."""
    settings = draft.settings
    if system != "roll":
        _rows(draft)
    base = AlgorithmConfig(name=_known_preset(settings.get("algorithm.name", "grpo")))
    own = {key.removeprefix("algorithm."): value for key, value in settings.items() if key.startswith("algorithm.")}
    loss, advantage = own.get("loss", base.loss), own.get("advantage", base.advantage)
    filled = {name: getattr(base, name) for name in type(base).model_fields}
    reads = reads_of(filled | {"loss": loss, "advantage": advantage} | own | {"guard": _guard(own)})
    for key in own:
        if key.partition(".")[0] not in reads and key.partition(".")[0] in type(base).model_fields:
            draft.undo(f"algorithm.{key}", f"algorithm={base.name} does not read it")
    if loss == "ppo":
        highest = 1 + settings.get("algorithm.clip_high", base.clip_high)
        for key, value in defaults.items():
            if key != "algorithm.dual_clip" or value > highest:
                draft.default(f"{system}'s own", value, key, value)
    _leave_for_later(draft)
    try:
        validate(RunConfig, draft.tree())
    except ConfigError as error:
        if settings.get("algorithm.name") in GIVEN and "gives no reward of its own" in str(error):
            what = f"algorithm={settings['algorithm.name']} cannot learn from given rows in this version"
            raise ConfigError(
                f"{what}: it learns from the model's own episodes, and needs rewards to choose."
            ) from error
        raise


GIVEN = ("sft", "dpo", "ipo", "kto", "distill")


def _known_preset(name: Any) -> Any:
    """The preset; one that is not there is left for the validation to name."""
    try:
        AlgorithmConfig(name=name)
    except ValidationError:
        return "grpo"
    return name


def _guard(own: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("guard."): value for key, value in own.items() if key.startswith("guard.")}


def _rows(draft: Draft) -> None:
    """Settings that go together where rows are given."""
    settings = draft.settings
    rows = any(key.startswith(("data.path", "data.sources")) for key in settings) and "env.name" not in settings
    if rows and not any(key.endswith(".env.name") for key in settings):
        why = "by the rows' data_source there; here one rule for all, unless data.sources.NAME.rewards says another"
        draft.default("reward", "by data_source", "rewards", ["equal"], why)
    wants_tools = "tools" in settings or "agent.args.max_tool_rounds" in settings
    if wants_tools and settings.get("agent.name", "chat") == "chat":
        settings["agent.name"] = "tool"
    if settings.get("data.by") and "data.path" not in settings:
        settings["data.path"] = "train.parquet"
        draft.drop("data.train_files", None, "not given: data.path says train.parquet until you change it")
    if settings.get("data.by") and "data.evaluation_path" in settings:
        draft.undo("data.evaluation_path", "rows told apart by a column hold out their own")


def _leave_for_later(draft: Draft) -> None:
    """Take out, and say so, what this version does not have yet: a key, or one of the values of a choice."""
    for _ in range(20):
        try:
            RunConfig.model_validate(draft.tree())
            return
        except ValidationError as error:
            missing = [
                path
                for found in error.errors()
                if found["type"] in ("extra_forbidden", "literal_error")
                for path in _settings_at(draft, ".".join(map(str, found["loc"])))
                if not ESSENTIAL.search(path)
            ]
        if not missing:
            return
        for path in missing:
            draft.postpone(path, LATER.get(path.rpartition(".")[2], "the run goes on without it"))


ESSENTIAL = re.compile(r"(?:^|\.)(?:(?:env|agent|algorithm)\.name|env_type|rewards|tools|hub|path)$")
"""Without these it would be another run: that they do not fit is an error."""
LATER = {
    "max_lag": "ROLLOUT AND TRAINING TAKE TURNS here: the converted run is synchronous",
    "decay": "the rate falls linearly until this version has that schedule",
    "warmup_ratio": "no warm-up; write learner.warmup_steps",
    "agent_template": "the environment's own words are shown",
    "agent_system_template": "the environment's own system message is shown",
    "action_pattern": "the environment reads <answer>…</answer>",
    "critic_from": "the critic's weights begin as the policy's",
    "epochs": "trainer.steps decides how long the run is",
    "top_p": "held-out tasks are drawn from all tokens",
    "top_k": "held-out tasks are drawn from all tokens",
    "max_tokens": "a call is as long as in training",
    "advantage_clip": "advantages are not clipped",
    "whiten_over": "whitened over episodes, one vote each; there over tokens",
    "teacher": "there is no teacher but the reference",
}
"""What happens without it."""


def _settings_at(draft: Draft, path: str) -> list[str]:
    """Settings at a place of the configuration, or below it."""
    return [key for key in draft.settings if key == path or key.startswith(f"{path}.")]


def _explain_environment(draft: Draft, found: Collected) -> None:
    """What is left to a variable of the environment is so in the converted file as well."""
    for key, name in found.environment.items():
        why = f"${{oc.env:{name}}} is filled in when training starts: set {name}"
        draft.lines = [
            dataclasses.replace(line, kind="changed", why=why) if line.key == key and line in draft.mapped else line
            for line in draft.lines
        ]
