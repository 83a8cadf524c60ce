"""Going on from a checkpoint: from which, and with which settings.

A setting that differs from the checkpoint's is applied and listed, or refused: nothing is silently ignored. Refused is
what the checkpoint's weights and optimiser are of (the model, its adapters, a critic), what everything so far followed
from (the seed), and what would call rows held out that were trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.config.algorithm import AlgorithmConfig
from arborl.config.base import plain, validate
from arborl.config.capabilities import imported
from arborl.config.load import load
from arborl.config.run import RunConfig
from arborl.config.secrets import masked
from arborl.config.trust import is_signed
from arborl.errors import ConfigError

FIXED = {
    r"seed": "all that was drawn so far followed from it",
    r"model\.(name|dtype|quantize)": "its weights are of that model",
    r"model\.lora\.(rank|alpha|target)": "its adapters are of that shape",
    r"learner\.critic_from": "its critic has been trained since",
    r"data\.offline|demonstrations\.(path|rows|steps)": "what was learned so far came from there",
    r"learner\.master": "its optimiser's state is of such weights",
    r"data\.(sources\.[^.]+\.)?(evaluation_share|split)": "rows that were trained on would count as held out",
}
"""Keys, as patterns, that stay what they were, and why."""
MEASURED = (
    "env", "agent", "tools", "rewards", "data", "evaluation", "sampling", "rollout.max_turns", "rollout.val_envs",
    "model.chat_args", "context",
)  # fmt: skip
"""What the held-out numbers depend on."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key that is not what the checkpoint was made with."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = shown(self.before), shown(self.now)
        if before == now:  # they are called the same
            before, now = str(self.before), str(self.now)
        return f"{self.key}: {before} -> {now}"

    @property
    def measured(self) -> bool:
        """Whether held-out numbers from before and after it cannot be compared."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in MEASURED)


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint a run goes on from, and what is changed there."""

    folder: Path
    state: dict[str, Any]
    before: RunConfig
    """The configuration it was made with."""
    changes: tuple[Change, ...] = ()

    @property
    def step(self) -> int:
        return int(self.state["step"])


def find_start(home: Path, which: str, config: RunConfig) -> Start | None:
    """The checkpoint `which` of a run, with the settings that differ. A run that was killed before its first checkpoint
    goes on from its beginning."""
    if which == "latest" and not checkpoint.any_of(home / "checkpoints"):
        return None
    folder = checkpoint.find(home / "checkpoints", which)
    state = checkpoint.load_state(folder)
    for key, kind in {"step": int, "before": dict, "algorithm": dict, "train_seconds": int | float}.items():
        if not isinstance(state.get(key), kind):
            raise checkpoint.Damaged(f"{folder / 'state.json'}: {key!r} is {state.get(key)!r}, which no run wrote.")
    before = _made_with(state, home)
    return Start(folder, state, before, tuple(changes(before, keep_dtype(before, config))))


def keep_dtype(before: RunConfig, config: RunConfig) -> RunConfig:
    """With the precision of the checkpoint, where the settings leave it to be chosen."""
    if config.model.dtype != "auto":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": before.model.dtype})})


def refuse(start: Start, config: RunConfig, steps: int, objects: Mapping[str, Any] | None = None) -> None:
    """Raise where a change cannot be applied.

    Args:
        start: what is gone on from.
        config: and with which settings.
        steps: of the whole run.
        objects: parts handed in by Python code, by name.
    """
    lines = list(_refusals(start, config, steps, objects or {}))
    if lines:
        advice = "Leave it out, or start a run of its own: without --resume, in another output_dir."
        raise ConfigError("\n".join(f"{line} {advice}" for line in lines))


def finished(home: Path, start: Start, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do: its last step is done and measured."""
    if start.step != steps:
        return None
    try:
        summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == start.step else None


def changes(before: RunConfig, now: RunConfig) -> Iterator[Change]:
    """Every key that differs, but for the folder's own name."""
    old, new = flat(masked(plain(before))), flat(masked(plain(now)))  # what is masked is not told, and not compared
    for key in sorted(old.keys() | new.keys()):
        if key != "output_dir" and old.get(key) != new.get(key):
            yield Change(key, old.get(key), new.get(key))


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def shown(value: Any) -> str:
    """As it is written on a command line, or nearly."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(shown(item) for item in value)}]"
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _made_with(state: Mapping[str, Any], home: Path) -> RunConfig:
    """The checkpoint's own configuration; one from before checkpoints had any goes by the run's file."""
    if "config" not in state:
        return load(home / "config.yaml")
    try:
        return validate(RunConfig, state["config"])
    except ConfigError as error:
        raise ConfigError(f"the checkpoint was made with settings that this Arbor cannot read: {error}") from error


def _refusals(start: Start, config: RunConfig, steps: int, objects: Mapping[str, Any]) -> Iterator[str]:
    if start.step > steps:
        said = f"trainer.epochs={config.trainer.epochs}, {steps} steps" if config.trainer.epochs else ""
        yield f"{said or f'trainer.steps={steps}'}: {start.step} steps are done."
    for change in start.changes:
        why = next((why for pattern, why in FIXED.items() if re.fullmatch(pattern, change.key)), None)
        if change.key.endswith("evaluation_path") and change.now is None:
            why = "rows that were trained on would count as held out"
        if why is not None:
            yield (f"{change.key}={shown(change.now)}: the checkpoint was made with {shown(change.before)}, and {why}.")
    keys = [change.key for change in start.changes]
    if any(key.startswith("algorithm.") or key == "learner.critic" for key in keys):
        yield from _models(start.folder.parent.parent, start.before, config, objects)
        yield from _coefficients(start.before.algorithm, config.algorithm)


def _models(home: Path, before: RunConfig, now: RunConfig, objects: Mapping[str, Any]) -> Iterator[str]:
    """Models around the policy that an algorithm wants and a checkpoint has, or has not."""
    from arborl.algorithms import Needs, finder, make_algorithm

    unknown = [name for name in imported(before) if name not in imported(now) and name not in objects]
    if unknown and not is_signed(home / "config.yaml"):
        yield f"algorithm: the checkpoint was made with {', '.join(unknown)}, which is not imported from there."
        return

    def needs(config: RunConfig) -> Needs:
        return make_algorithm(config.algorithm, finder(objects)).needs

    def critic(config: RunConfig) -> str:
        kind = "separate" if config.learner.own_critic else "shared"
        return kind if needs(config).value else "none"

    if critic(before) != critic(now):
        yield (
            f"algorithm={now.algorithm.name} with learner.critic={now.learner.critic}: wants a critic of the kind "
            f"{critic(now)}, and the checkpoint's is {critic(before)}."
        )
    if needs(now).reference and not needs(before).reference:
        yield f"algorithm={now.algorithm.name}: wants the policy of the first step as a reference, which was not kept."


def _coefficients(before: AlgorithmConfig, now: AlgorithmConfig, where: str = "algorithm") -> Iterator[str]:
    """A coefficient that has moved towards its target since is the checkpoint's."""
    if before.kl.target is not None and (now.kl.coef != before.kl.coef or now.kl.target is None):
        yield f"{where}.kl: with a target its coef has moved by itself since the start; it cannot be set anew."
    for name in before.by_source.keys() & now.by_source.keys():
        yield from _coefficients(before.by_source[name], now.by_source[name], f"{where}.by_source.{name}")


def told(start: Start) -> Sequence[str]:
    """What is said when a run goes on."""
    lines = [f"Goes on from step {start.step} ({start.folder})."]
    if start.changes:
        lines += ["Changed from here on:", *(f"  {change}" for change in start.changes)]
    if start.state["before"] and any(change.measured for change in start.changes):
        lines.append("The held-out numbers from before training are of the former settings.")
    return lines
