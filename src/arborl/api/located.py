"""What a path or a name on a command line stands for: a run, a checkpoint, a file, a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from arborl import checkpoint
from arborl.config.load import load
from arborl.config.run import RunConfig
from arborl.config.trust import load_run
from arborl.errors import ConfigError
from arborl.models.model_files import is_model_folder


@dataclass(frozen=True, slots=True)
class Located:
    """A model, and the settings it is used with."""

    config: RunConfig
    model: str | Path
    run: Path | None = None
    """The run's folder, or its file, where there is one."""
    step: int = 0
    """Of the checkpoint."""


def located(path: str, overrides: Sequence[str] = (), trust: bool = False, only: Collection[str] = ()) -> Located:
    """A run's last checkpoint, a checkpoint, a model by name or folder, or the model that a YAML file begins with.

    Args:
        path: the folder, the file or the name.
        overrides: settings on top of the run's, as on the command line.
        trust: import what a run's folder names though this user did not write it.
        only: the actions that the caller can take at all; see `arborl.config.trust.load_run`.
    """
    place = Path(path)
    run = place if (place / "config.yaml").exists() else place.parent.parent
    if place.suffix == ".yaml":
        config = load(place, overrides)
        return Located(config, config.model.name, place)
    if run is place or (is_model_folder(place / "model") and (run / "config.yaml").exists()):
        config = load_run(run / "config.yaml", overrides, trust, only)
        folder = checkpoint.find(place / "checkpoints", "latest") if run is place else place
        step = re.fullmatch(r"step-(\d+)", folder.name)
        return Located(config, folder / "model", run, int(step[1]) if step else 0)
    if is_model_folder(place / "model"):
        place = place / "model"  # a checkpoint that was taken out of its run
    if place.exists() and not is_model_folder(place):
        raise ConfigError(f"{path!r} is neither a run folder, a checkpoint, a model folder nor a YAML file.")
    return Located(load(None, overrides), place)
