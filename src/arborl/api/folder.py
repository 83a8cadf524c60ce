"""The folder of a run: which one it is, and what is written into it at the start and at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arborl.config.base import dump_yaml
from arborl.config.run import RunConfig
from arborl.errors import ConfigError
from arborl.registry import HANDED_IN

NOT_ALONE = f"""# Names that begin with {HANDED_IN} are parts that Python code gave as objects.
# This run can be evaluated and resumed from Python, with those objects at hand, and not from this file alone.
"""


def choose(config: RunConfig, resuming: bool) -> Path:
    """The run's folder: the one asked for, or the next free `runs/<name>-NNN`. Nothing is written yet."""
    if config.output_dir is None:
        taken = [int(p.name[-3:]) for p in Path("runs").glob(f"{config.name}-[0-9][0-9][0-9]")]
        return Path("runs") / f"{config.name}-{max(taken, default=0) + 1:03d}"
    if not resuming and (config.output_dir / "config.yaml").exists():
        raise ConfigError(
            f"output_dir: {str(config.output_dir)!r} already holds a run. Write --resume latest to go on with it, or "
            "another output_dir."
        )
    if config.output_dir.exists() and not config.output_dir.is_dir():
        raise ConfigError(f"output_dir: {str(config.output_dir)!r} is a file. Give a folder.")
    return config.output_dir


def write_config(folder: Path, config: RunConfig) -> None:
    """Make the folder and write down what is run."""
    folder.mkdir(parents=True, exist_ok=True)
    text = dump_yaml(config.model_copy(update={"output_dir": folder}))
    if f" {HANDED_IN}" in text:
        text = NOT_ALONE + text
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def change_config(folder: Path, before: RunConfig, now: RunConfig, step: int) -> None:
    """Write down what is run from this step on; what was run before stays beside it."""
    former = folder / f"config.before-step-{step:06}.yaml"
    if not former.exists():  # else this step was begun with other settings before, and nothing came of it
        former.write_text(dump_yaml(before.model_copy(update={"output_dir": folder})), encoding="utf-8")
    write_config(folder, now)


def set_aside(path: Path, step: int) -> None:
    """Keep a file that is no longer true under a name that says until when it was."""
    if path.exists():
        path.replace(path.with_name(f"{path.stem}.before-step-{step:06}{path.suffix}"))


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    path = folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return path
