"""Saving and finding checkpoints, so that a kill at any moment leaves a good one to resume from.

    checkpoints/step-000012/{model/…, optimizer.pt, state.json, MANIFEST}

`step-000012` is the run after 12 steps: the next step is number 12. A folder is filled under a hidden name and renamed
once it is whole and on disk. One process writes to a root at a time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arborl.checkpoint.manifest import NAME, DamagedCheckpoint, check, write_manifest
from arborl.errors import ConfigError, disk_errors

log = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{6,})")
REPLACED = re.compile(r"\.old-(step-\d{6,})-\w+")
STATE = "state.json"


def save(root: Path, step: int, write: Callable[[Path], None], state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of this step; all of it is there afterwards, or none.

    Args:
        root: the folder of all checkpoints; made when missing.
        step: steps done. A checkpoint of the same step is replaced.
        write: fills the folder it is given: weights, optimiser, whatever the run needs.
        state: the rest, as JSON.
        keep: how many complete checkpoints stay, newest first; the one just written always does.

    Example:
        save(folder / "checkpoints", 12, lambda to: model.save_pretrained(to / "model"), {"seed": 0}, keep=2)
    """
    final, fresh = root / f"step-{step:06}", _hidden(root, "tmp", step)
    with disk_errors(final):
        root.mkdir(parents=True, exist_ok=True)
        _restore(root)
        try:
            fresh.mkdir()
            write(fresh)
            (fresh / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            write_manifest(fresh, step)
            _sync_tree(fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if final.exists():
            # A kill after this line leaves the old one under its hidden name; `_restore` gives it its name back.
            final.rename(_hidden(root, "old", step))
        fresh.rename(final)
        _sync(root)
        _prune(root, final, keep)
    return final


def find(root: Path, which: str, verify: bool = True) -> Path:
    """The folder of a checkpoint that can be loaded.

    Args:
        root: the folder of all checkpoints.
        which: `latest`, a step number, or a path. `latest` passes over damaged ones, with a warning; asking for a
            damaged one by number or path is an error that names the bad file.
        verify: compare hashes, not sizes alone.
    """
    _restore(root)
    if which == "latest":
        return _latest(root, verify)
    named = root / (f"step-{int(which):06}" if which.isdecimal() else which)
    folder = named if named.is_dir() or which.isdecimal() else Path(which).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"no checkpoint at {folder}. {_what_exists(root)}")
    try:
        check(folder, verify)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} cannot be used: {error}. {_what_exists(root)}") from error
    return folder


def load_state(folder: Path) -> dict[str, Any]:
    """The `state` a checkpoint was saved with. A key that it lacks is `DamagedCheckpoint` when it is asked for."""
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} holds a {type(state).__name__} and not an object")
    return _State(path, state)


class _State(dict[str, Any]):
    def __init__(self, path: Path, values: dict[str, Any]):
        super().__init__(values)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise DamagedCheckpoint(f"{self.path} has no {key!r}: it is not the state of such a run")


def check_model(folder: Path) -> Path:
    """The same folder of a model; where it lies in a checkpoint, once its files are found to be what was written."""
    home = folder.absolute().parent
    if (home / NAME).exists() or STEP.fullmatch(home.name):
        try:
            check(home, verify=True, under=folder.name)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"the model {folder} cannot be used: {error}.") from error
    return folder


def has_checkpoints(root: Path) -> bool:
    """Whether there is a checkpoint, whole or not."""
    _restore(root)
    return bool(_steps(root))


def complete_checkpoints(root: Path) -> list[Path]:
    """The checkpoints whose files are all there in full size, oldest step first."""
    return [folder for folder in _steps(root) if _damage(folder, verify=False) is None]


def rewind(root: Path, step: int) -> None:
    """Remove every checkpoint after this step.

    A run resumed from an older checkpoint leaves the later ones' line; `latest` must not lead back to it.
    """
    for folder in _steps(root):
        if _number(folder) > step:
            log.info("removing %s: the run goes on from step %d", folder, step)
            _discard(folder)


def _latest(root: Path, verify: bool) -> Path:
    folders = _steps(root)
    for folder in reversed(folders):
        damage = _damage(folder, verify)
        if damage is None:
            return folder
        log.warning("passing over the checkpoint %s: %s", folder, damage)
    found = f"All {len(folders)} there are damaged." if folders else "There is none."
    raise ConfigError(f"no complete checkpoint in {root}. {found} Start a run in another output_dir, or give a path.")


def _damage(folder: Path, verify: bool) -> DamagedCheckpoint | None:
    try:
        check(folder, verify)
    except DamagedCheckpoint as error:
        return error
    return None


def _steps(root: Path) -> list[Path]:
    found = [path for path in root.iterdir() if STEP.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _what_exists(root: Path) -> str:
    names = [str(_number(folder)) for folder in complete_checkpoints(root)]
    if not names:
        return f"{root} has no complete checkpoint; start a run in another output_dir."
    return f"{root} has steps {', '.join(names)}; write 'latest', one of these numbers, or a path."


def _prune(root: Path, written: Path, keep: int) -> None:
    kept = {written, *complete_checkpoints(root)[-keep:]} if keep > 0 else {written}
    for folder in complete_checkpoints(root):
        if folder not in kept:
            _discard(folder)
    for pattern in (".tmp-*", ".old-*"):
        for stale in root.glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Hide it first, so that a kill while deleting leaves no half checkpoint under a good name."""
    hidden = _hidden(folder.parent, "tmp", _number(folder))
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _restore(root: Path) -> None:
    """Undo the first half of a replacement that was killed before its second."""
    for folder in root.glob(".old-*"):
        named = REPLACED.fullmatch(folder.name)
        if named and not (root / named.group(1)).exists():
            folder.rename(root / named.group(1))


def _hidden(root: Path, kind: str, step: int) -> Path:
    return root / f".{kind}-step-{step:06}-{uuid.uuid4().hex[:8]}"


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
