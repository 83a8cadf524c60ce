"""The run folder: its path and lock, its configuration and summary files; and the model that a path stands for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from arborl import checkpoint
from arborl.config.config_base import dump_yaml
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.config.trust import load_run_config, sign
from arborl.errors import ConfigError, disk_errors
from arborl.models.model_files import is_model_folder
from arborl.registry import OBJECT_PREFIX

log = logging.getLogger(__name__)

RUNS = Path("runs")
LOCK = ".lock"
OBJECTS_NOTE = f"""# Names that begin with {OBJECT_PREFIX} are parts that were given as Python objects.
# This run can be evaluated and resumed from Python with those objects, not from this file alone.
"""


@contextmanager
def claimed(config: RunConfig, resuming: bool) -> Iterator[Path]:
    """Create and lock the run folder: `output_dir`, or the next free `runs/<name>-NNN`. A folder that was created here
    and stayed empty is removed."""
    made: list[Path] = []
    try:
        with _output_errors(config.output_dir or RUNS):
            folder = _folder(config, resuming, made)
            lock = _lock(folder)
        try:
            if not resuming:
                _check_empty(folder)
            yield folder
        finally:
            if made and _contents(folder) == []:
                (folder / LOCK).unlink(missing_ok=True)
                made[-1].rmdir()
            lock.release()
    finally:
        for path in reversed(made):
            with suppress(OSError):  # it holds something, or is gone
                path.rmdir()


def _folder(config: RunConfig, resuming: bool, made: list[Path]) -> Path:
    if config.output_dir is not None:
        if config.output_dir.exists() and not config.output_dir.is_dir():
            raise ConfigError(f"output_dir: {str(config.output_dir)!r} is a file. Write a folder.")
        if resuming and not (config.output_dir / "config.yaml").is_file():
            raise ConfigError(f"output_dir: {str(config.output_dir)!r} has no run to resume.")
        _make(config.output_dir, made)
        return config.output_dir
    _make(RUNS, made)
    pattern = re.compile(re.escape(config.name) + r"-(\d+)")
    taken = [int(found[1]) for path in RUNS.iterdir() if (found := pattern.fullmatch(path.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        path = RUNS / f"{config.name}-{number:03d}"
        with suppress(FileExistsError):  # another run created it concurrently
            path.mkdir()
            made.append(path)
            return path


def _make(folder: Path, made: list[Path]) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with suppress(FileExistsError):
            path.mkdir()
            made.append(path)


def _lock(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ConfigError(
            f"output_dir: {str(folder)!r} is locked: another process trains there. Wait for it, or write another "
            "output_dir."
        ) from error
    except NotImplementedError:
        log.warning("%s: this file system has no locks; a second run in this folder is not detected", folder)
    return lock


def _contents(folder: Path) -> list[str]:
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir() if path.name != LOCK)


def _check_empty(folder: Path) -> None:
    inside = _contents(folder)
    if "config.yaml" in inside:
        advice = "Write --resume latest to continue it, or another output_dir."
        raise ConfigError(f"output_dir: {str(folder)!r} already has a run. {advice}")
    if inside:
        some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        raise ConfigError(f"output_dir: {str(folder)!r} is not empty: {some}. Write a new or empty folder.")


@contextmanager
def _output_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        where = str(error.filename or folder)
        raise ConfigError(f"output_dir: cannot write {where!r}: {why}. Write output_dir=FOLDER.") from error


# ------------------------------------------------------------------------------------------------ files


def write_config(folder: Path, config: RunConfig) -> None:
    text = dump_yaml(config.model_copy(update={"output_dir": folder}))
    if f" {OBJECT_PREFIX}" in text:
        text = OBJECTS_NOTE + text
    with disk_errors(folder):
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        sign(folder / "config.yaml", config)


def link_checkpoints(folder: Path, checkpoint_dir: Path | None) -> None:
    """With `trainer.checkpoint_dir`, `checkpoints` of the run folder is a link to a folder there."""
    if checkpoint_dir is None:
        return
    place, link = (checkpoint_dir.expanduser() / folder.absolute().name).absolute(), folder / "checkpoints"
    if link.is_symlink() and link.readlink() == place:  # a rank was lost before the first checkpoint
        return
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(f"trainer.checkpoint_dir: {str(place)!r} is not empty. Write another folder or output_dir.")
    try:
        place.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place, target_is_directory=True)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(
            f"trainer.checkpoint_dir: cannot write {str(place)!r}: {why}. Write trainer.checkpoint_dir=FOLDER, or null "
            "for the run folder."
        ) from error


def change_config(folder: Path, before: RunConfig, now: RunConfig, step: int) -> None:
    """Write `config.yaml` with the settings from this step on; keep the former beside it."""
    former = folder / f"config.before-step-{step:06}.yaml"
    if not former.exists():  # else the run was resumed here before and did not finish a step
        with disk_errors(folder):
            former.write_text(dump_yaml(before.model_copy(update={"output_dir": folder})), encoding="utf-8")
    write_config(folder, now)


def remove_later_configs(folder: Path, step: int) -> None:
    """Delete the former settings of steps that will be run again: they no longer belong to these steps."""
    for path in folder.glob("config.before-step-*.yaml"):
        number = path.stem.removeprefix("config.before-step-")
        if number.isdecimal() and int(number) > step:
            path.unlink(missing_ok=True)


def rewind_episodes(folder: Path, step: int) -> None:
    """Delete the episodes and loss terms of all steps after this one: a run that resumes here repeats them."""
    for place in ("episodes", "episodes/evaluation", "episodes/demonstrations", "terms"):
        for path in (folder / place).glob("step-*"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > step and not path.is_dir():
                path.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> Path:
    with disk_errors(path):
        path.write_text(json.dumps(content, indent=2) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ models by path


@dataclass(frozen=True, slots=True)
class LocatedModel:
    config: RunConfig
    model: str | Path
    run: Path | None = None
    """The run folder or the YAML file, if any."""
    step: int = 0


def locate_model(
    path: str, overrides: Sequence[str] = (), trust: bool = False, only: Collection[str] = ()
) -> LocatedModel:
    """The last checkpoint of a run, a checkpoint, a model by name or folder, or the initial model of a YAML file.

    Args:
        overrides: settings as on the command line.
        trust: import parts that an unsigned run folder names.
        only: actions that the caller may cause; see `arborl.config.trust.load_run_config`.
    """
    place = checkpoint.resolve_path(Path(path))
    run = place if (place / "config.yaml").exists() else place.parent.parent
    if place.suffix == ".yaml":
        config = load(place, overrides)
        return LocatedModel(config, config.model.name, place)
    if run is place or (is_model_folder(place / "model") and (run / "config.yaml").exists()):
        config = load_run_config(run / "config.yaml", overrides, trust, only)
        folder = checkpoint.find(place / "checkpoints", "latest") if run is place else place
        step = re.fullmatch(r"step-(\d+)", folder.name)
        return LocatedModel(config, folder / "model", run, int(step[1]) if step else 0)
    if is_model_folder(place / "model"):
        place = place / "model"  # a checkpoint outside of its run folder
    if place.exists() and not is_model_folder(place):
        raise ConfigError(f"{path!r} is neither a run folder, a checkpoint, a model folder nor a YAML file.")
    return LocatedModel(load(None, overrides), place)
