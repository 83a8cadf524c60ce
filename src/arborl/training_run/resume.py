"""Resuming from a checkpoint, with changed settings.

A setting that differs from the checkpoint's is applied and listed, or refused. Refused are settings that determine the
weights and optimizer state (model, adapters, critic), the seed, and those that would turn training rows into held-out
rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.config_base import changed_settings, to_plain, validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.config.trust import imported_parts, is_signed
from arborl.errors import ConfigError

FIXED = {
    r"seed": "all steps so far depend on it",
    r"model\.(name|dtype|quantize)": "its weights are of that model",
    r"model\.lora\.(rank|alpha|target)": "its adapters are of that shape",
    r"learner\.critic_from": "its critic has been trained further",
    r"data\.offline|demonstrations\.(path|rows|steps)": "all steps so far were trained on it",
    r"trainer\.checkpoint_dir": "its other checkpoints are there",
    r"learner\.master": "its optimizer state is for such weights",
    r"data\.(sources\.[^.]+\.)?(evaluation_share|split)": "training rows would become held-out rows",
}
"""Patterns of keys that cannot be changed, and why."""
EVALUATION_KEYS = (
    "env", "agent", "tools", "rewards", "data", "evaluation", "sampling", "rollout.max_turns",
    "model.chat_args", "context",
)  # fmt: skip
"""Keys on which evaluation metrics depend."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = format_value(self.before), format_value(self.now)
        if before == now:  # parts with the same name
            before, now = str(self.before), str(self.now)
        return f"{self.key}: {before} -> {now}"

    @property
    def affects_evaluation(self) -> bool:
        """Whether evaluations before and after the change cannot be compared."""
        return any(self.key == name or self.key.startswith(f"{name}.") for name in EVALUATION_KEYS)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    folder: Path
    state: dict[str, Any]
    before: RunConfig
    changes: tuple[SettingChange, ...] = ()

    @property
    def step(self) -> int:
        return int(self.state["step"])


def find_resume_point(home: Path, which: str, config: RunConfig) -> ResumePoint | None:
    """The checkpoint `which` of a run and the changed settings; None (start again) if `latest` is wanted and there is
    none, or `auto` and none can be used."""
    root = home / "checkpoints"
    folder = checkpoint.newest_usable(root) if which == "auto" else None
    if folder is None and (which == "auto" or (which == "latest" and not checkpoint.has_checkpoints(root))):
        return None
    folder = folder or checkpoint.find(root, which)
    state = checkpoint.load_state(folder)
    for key, kind in {"step": int, "before": dict, "algorithm": dict, "train_seconds": int | float}.items():
        if not isinstance(state.get(key), kind):
            raise checkpoint.DamagedCheckpoint(
                f"{folder / 'state.json'}: {key!r} is {state.get(key)!r}, which is not a value of a run."
            )
    before = _checkpoint_config(state, home)
    return ResumePoint(folder, state, before, tuple(changes(before, keep_dtype(before, config))))


def keep_dtype(before: RunConfig, config: RunConfig) -> RunConfig:
    """With the precision of the checkpoint if `model.dtype=auto`."""
    if config.model.dtype != "auto":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": before.model.dtype})})


def check_changes(start: ResumePoint, config: RunConfig, steps: int, objects: Mapping[str, Any] | None = None) -> None:
    lines = list(_refused_changes(start, config, steps, objects or {}))
    if lines:
        advice = "Leave it out, or start a new run: without --resume, in another output_dir."
        raise ConfigError("\n".join(f"{line} {advice}" for line in lines))


def finished_summary(home: Path, start: ResumePoint, steps: int) -> dict[str, Any] | None:
    if start.step != steps:
        return None
    try:
        summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_finished = isinstance(summary, dict) and summary.get("steps") == start.step and not summary.get("stopped")
    return summary if is_finished else None


def changes(before: RunConfig, now: RunConfig) -> Iterator[SettingChange]:
    return starmap(SettingChange, changed_settings(to_plain(before), to_plain(now)))


def format_value(value: Any) -> str:
    """A value as on the command line, approximately."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checkpoint_config(state: Mapping[str, Any], home: Path) -> RunConfig:
    """The configuration in the checkpoint; in older checkpoints without it, that of the run folder."""
    if "config" not in state:
        return load(home / "config.yaml")
    try:
        return validate(RunConfig, state["config"])
    except ConfigError as error:
        raise ConfigError(f"the checkpoint has settings that this version of Arbor cannot read: {error}") from error


def _refused_changes(start: ResumePoint, config: RunConfig, steps: int, objects: Mapping[str, Any]) -> Iterator[str]:
    if start.step > steps:
        epochs = config.trainer.epochs
        length = f"trainer.epochs={epochs}, {steps} steps" if epochs else f"trainer.steps={steps}"
        yield f"{length}: {start.step} steps are done."
    for change in start.changes:
        why = next((why for pattern, why in FIXED.items() if re.fullmatch(pattern, change.key)), None)
        if change.key.endswith("evaluation_path") and change.now is None:
            why = "training rows would become held-out rows"
        if why is not None:
            yield (
                f"{change.key}={format_value(change.now)}: the checkpoint was made with "
                f"{format_value(change.before)}, and {why}."
            )
    keys = [change.key for change in start.changes]
    if any(key.startswith("algorithm.") or key == "learner.critic" for key in keys):
        yield from _missing_models(start.folder.parent.parent, start.before, config, objects)
        yield from _coefficients(start.before.algorithm, config.algorithm)


def _missing_models(home: Path, before: RunConfig, now: RunConfig, objects: Mapping[str, Any]) -> Iterator[str]:
    """Critic and reference model that the algorithm needs and the checkpoint lacks, or has in another form."""
    from arborl.algorithms import AlgorithmNeeds, make_algorithm, object_finder

    unknown = [name for name in imported_parts(before) if name not in imported_parts(now) and name not in objects]
    if unknown and not is_signed(home / "config.yaml"):
        yield f"algorithm: the checkpoint was made with {', '.join(unknown)}, not imported from an unsigned folder."
        return

    def needs(config: RunConfig) -> AlgorithmNeeds:
        return make_algorithm(config.algorithm, object_finder(objects)).needs

    def critic(config: RunConfig) -> str:
        kind = "separate" if config.learner.has_separate_critic else "shared"
        return kind if needs(config).value else "none"

    if critic(before) != critic(now):
        yield (
            f"algorithm={now.algorithm.name} with learner.critic={now.learner.critic}: needs a critic of the kind "
            f"{critic(now)}, and the checkpoint's is {critic(before)}."
        )
    if needs(now).reference and not needs(before).reference:
        yield f"algorithm={now.algorithm.name}: needs the initial policy as reference model, which was not kept."


def _coefficients(before: AlgorithmConfig, now: AlgorithmConfig, where: str = "algorithm") -> Iterator[str]:
    if before.kl.target is not None and (now.kl.coef != before.kl.coef or now.kl.target is None):
        yield f"{where}.kl: with a target its coef has been adapted since the start; it cannot be set again."
    for name in before.by_source.keys() & now.by_source.keys():
        yield from _coefficients(before.by_source[name], now.by_source[name], f"{where}.by_source.{name}")


def resume_messages(start: ResumePoint) -> Sequence[str]:
    lines = [f"Resumes from step {start.step} ({start.folder})."]
    if start.changes:
        lines += ["Changed from here on:", *(f"  {change}" for change in start.changes)]
    if start.state["before"] and any(change.affects_evaluation for change in start.changes):
        lines.append("The evaluation before training has the former settings.")
    return lines
