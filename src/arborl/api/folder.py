"""The folder of a run: which one it is, that it is this run's alone, and what is written at its start and its end."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from arborl.config.base import dump_yaml
from arborl.config.run import RunConfig
from arborl.config.trust import sign
from arborl.errors import ConfigError, writing
from arborl.registry import HANDED_IN

log = logging.getLogger(__name__)

RUNS = Path("runs")
LOCK = ".lock"
"""Held, by the system, for as long as the process lives that trains here. The file itself means nothing."""
NOT_ALONE = f"""# Names that begin with {HANDED_IN} are parts that Python code gave as objects.
# This run can be evaluated and resumed from Python, with those objects at hand, and not from this file alone.
"""


@contextmanager
def claimed(config: RunConfig, resuming: bool) -> Iterator[Path]:
    """The run's folder, made now and held against all other processes to the end.

    It is the one asked for, or the next free `runs/<name>-NNN`. Where nothing was written into a folder that was made
    here, it is taken away again.
    """
    made: list[Path] = []
    try:
        with _refusals(config.output_dir or RUNS):
            folder = _folder(config, resuming, made)
            lock = _lock(folder)
        try:
            if not resuming:
                _check_empty(folder)
            yield folder
        finally:
            if made and _inside(folder) == []:
                (folder / LOCK).unlink(missing_ok=True)
                made[-1].rmdir()
            lock.release()
    finally:
        for path in reversed(made):
            with suppress(OSError):  # it holds something, or is gone
                path.rmdir()


def _folder(config: RunConfig, resuming: bool, made: list[Path]) -> Path:
    """The folder, there; those that had to be made are added to `made`, outermost first."""
    if config.output_dir is not None:
        if config.output_dir.exists() and not config.output_dir.is_dir():
            raise ConfigError(f"output_dir: {str(config.output_dir)!r} is a file. Give a folder.")
        if resuming and not (config.output_dir / "config.yaml").is_file():
            raise ConfigError(f"output_dir: {str(config.output_dir)!r} holds no run to resume.")
        _make(config.output_dir, made)
        return config.output_dir
    _make(RUNS, made)
    pattern = re.compile(re.escape(config.name) + r"-(\d+)")
    taken = [int(found[1]) for path in RUNS.iterdir() if (found := pattern.fullmatch(path.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        path = RUNS / f"{config.name}-{number:03d}"
        with suppress(FileExistsError):  # another run took it in this moment
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
            f"output_dir: {str(folder)!r} is in use: another process trains there. Wait for it, or write another "
            "output_dir."
        ) from error
    except NotImplementedError:
        log.warning("%s: this file system has no locks; nothing keeps a second run out of the folder", folder)
    return lock


def _inside(folder: Path) -> list[str]:
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir() if path.name != LOCK)


def _check_empty(folder: Path) -> None:
    inside = _inside(folder)
    if "config.yaml" in inside:
        advice = "Write --resume latest to go on with it, or another output_dir."
        raise ConfigError(f"output_dir: {str(folder)!r} already holds a run. {advice}")
    if inside:
        some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        raise ConfigError(f"output_dir: {str(folder)!r} holds other things: {some}. Give a new or an empty folder.")


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """What the system will not do there, in one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        where = str(error.filename or folder)
        raise ConfigError(f"output_dir: cannot write {where!r}: {why}. Write output_dir=FOLDER.") from error


# ------------------------------------------------------------------------------------------------ what is in it


def write_config(folder: Path, config: RunConfig) -> None:
    """Write down what is run."""
    text = dump_yaml(config.model_copy(update={"output_dir": folder}))
    if f" {HANDED_IN}" in text:
        text = NOT_ALONE + text
    with writing(folder):
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        sign(folder / "config.yaml", config)


def change_config(folder: Path, before: RunConfig, now: RunConfig, step: int) -> None:
    """Write down what is run from this step on; what was run before stays beside it."""
    former = folder / f"config.before-step-{step:06}.yaml"
    if not former.exists():  # else this step was begun with other settings before, and nothing came of it
        with writing(folder):
            former.write_text(dump_yaml(before.model_copy(update={"output_dir": folder})), encoding="utf-8")
    write_config(folder, now)


def set_aside(path: Path, step: int) -> None:
    """Keep a file that is no longer true under a name that says until when it was."""
    if path.exists():
        path.replace(path.with_name(f"{path.stem}.before-step-{step:06}{path.suffix}"))


def write_execution(folder: Path, execution: dict[str, str]) -> None:
    """Device, precision and execution paths, from the start of a run on."""
    path = folder / "execution.json"
    with writing(path):
        path.write_text(json.dumps(execution, indent=2) + "\n")


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    path = folder / "summary.json"
    with writing(path):
        path.write_text(json.dumps(summary, indent=2) + "\n")
    return path
