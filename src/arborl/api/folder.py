"""The folder of a run: which one it is, and what is written into it at the start and at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arborl.config.base import dump_yaml
from arborl.config.run import RunConfig
from arborl.errors import ConfigError, writing


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


def open_folder(folder: Path, config: RunConfig) -> None:
    """Make it and write down what is run."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(
            dump_yaml(config.model_copy(update={"output_dir": folder})), encoding="utf-8"
        )


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    path = folder / "summary.json"
    with writing(path):
        path.write_text(json.dumps(summary, indent=2) + "\n")
    return path
