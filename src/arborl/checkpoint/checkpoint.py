"""Write and find checkpoints. A kill at any moment leaves a complete one.

    checkpoints/step-000012/{model/…, optimizer.pt, state.json, MANIFEST}

`step-000012` is the state after 12 steps. A folder is written under a hidden name and renamed once it is complete and
on disk. One process writes to a root at a time."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from arborl.checkpoint.manifest import NAME, DamagedCheckpoint, check, write_manifest
from arborl.checkpoint.scores import CheckpointScores
from arborl.errors import ConfigError, disk_errors

log = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{6,})")
REPLACED = re.compile(r"\.old-(step-\d{6,})-\w+")
STATE = "state.json"


def save(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    state: dict[str, Any],
    keep: int,
    also: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
) -> Path:
    """Write the checkpoint after `step` steps, completely or not at all; one of the same step is replaced.

    Args:
        write: writes weights and optimizer state into the given folder.
        state: other state, as JSON.
        keep: number of newest complete checkpoints to keep; the written one always stays.
        also: selects further ones to keep from the steps of all complete checkpoints, oldest first.
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
            # after a kill here, `_restore` renames the old one back
            final.rename(_hidden(root, "old", step))
        fresh.rename(final)
        _sync(root)
        _prune(root, final, keep, also)
    return final


def checkpoint_name(text: str) -> str | None:
    """`latest`, `best` or a step number for the names `latest`, `final`, `best`, `12`, `step-12` and `step_12`; else
    None."""
    if text in ("latest", "final"):
        return "latest"
    if text == "best":
        return text
    number = re.fullmatch(r"(?:step[-_])?(\d+)", text)
    return str(int(number[1])) if number else None


def resolve_path(path: Path) -> Path:
    """The checkpoint of a path such as `RUN/final`, `RUN/step_12` or `RUN/checkpoints/final`; other paths unchanged."""
    which = None if path.exists() else checkpoint_name(path.name)
    roots = (path.parent, path.parent / "checkpoints") if which is not None else ()
    root = next((root for root in roots if has_checkpoints(root)), None)
    return path if which is None or root is None else find(root, which)


def find(root: Path, which: str) -> Path:
    """The folder of a complete checkpoint: `latest` or `final`, `best`, a step number, or a path. `latest` skips
    damaged ones with a warning; a damaged one by another name is an error."""
    _restore(root)
    which = which if (root / which).is_dir() else checkpoint_name(which) or which
    if which == "latest":
        return _latest(root)
    if which == "best":
        which = str(_best(root))
    named = root / (f"step-{int(which):06}" if which.isdecimal() else which)
    folder = named if named.is_dir() or which.isdecimal() else Path(which).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"no checkpoint at {folder}. {_what_exists(root)}")
    try:
        check(folder, verify=True)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} cannot be used: {error}. {_what_exists(root)}") from error
    return folder


def load_state(folder: Path) -> dict[str, Any]:
    """The `state` of a checkpoint. Reading a missing key raises `DamagedCheckpoint`."""
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
        raise DamagedCheckpoint(f"{self.path} has no {key!r}: it is not the state of a run")


def check_model(folder: Path) -> Path:
    """The folder of a model; if it is part of a checkpoint, its hashes are verified."""
    home = folder.absolute().parent
    if (home / NAME).exists() or STEP.fullmatch(home.name):
        try:
            check(home, verify=True, under=folder.name)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"the model {folder} cannot be used: {error}.") from error
    return folder


def has_checkpoints(root: Path) -> bool:
    """Whether there is a checkpoint, complete or not."""
    _restore(root)
    return bool(_steps(root))


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints whose files all have the right size, oldest first."""
    return [folder for folder in _steps(root) if _damage(folder, verify=False) is None]


def complete_steps(root: Path) -> list[int]:
    return [_number(folder) for folder in complete_checkpoints(root)]


def rewind(root: Path, step: int) -> None:
    """Delete all checkpoints after this step: a run that resumes from an older one diverges from them."""
    for folder in _steps(root):
        if _number(folder) > step:
            log.info("deleting %s: the run resumes from step %d", folder, step)
            _discard(folder)


def newest_usable(root: Path, up_to: int | None = None) -> Path | None:
    """The newest checkpoint that is not damaged, at most of step `up_to`. Damaged ones are skipped with a warning."""
    _restore(root)
    for folder in reversed(_steps(root)):
        if up_to is not None and _number(folder) > up_to:
            continue
        damage = _damage(folder, verify=True)
        if damage is None:
            return folder
        log.warning("skipping the checkpoint %s: %s", folder, damage)
    return None


def steps_around_age(steps: Sequence[int], age: int) -> set[int]:
    """Of ascending steps: the newest that is at least `age` steps older than the last, and the oldest that is younger,
    which takes its place later. So there is always a checkpoint of at least that age, if there ever was one."""
    limit = steps[-1] - age if steps else 0
    old, young = [step for step in steps if step <= limit], [step for step in steps if step > limit]
    return {*old[-1:], *young[:1]}


def _latest(root: Path) -> Path:
    if (folder := newest_usable(root)) is not None:
        return folder
    folders = _steps(root)
    found = f"All {len(folders)} there are damaged." if folders else "There is none."
    raise ConfigError(f"no complete checkpoint in {root}. {found} Start a run in another output_dir, or give a path.")


def _best(root: Path) -> int:
    scores = CheckpointScores.read(root)
    if (best := scores.best(complete_steps(root))) is None:
        advice = "trainer.keep_best=METRIC keeps the one with the highest value of a metric"
        raise ConfigError(f"no best checkpoint in {root}: no metric was recorded for one there; {advice}.")
    return best


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


def _prune(root: Path, written: Path, keep: int, also: Callable[[Sequence[int]], Collection[int]]) -> None:
    complete = complete_checkpoints(root)
    kept = {written, *complete[-keep:]} if keep > 0 else {written}
    chosen = set(also([_number(folder) for folder in complete]))
    for folder in complete:
        if folder not in kept and _number(folder) not in chosen:
            _discard(folder)
    for pattern in (".tmp-*", ".old-*"):
        for stale in root.glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Rename, then delete: a kill meanwhile leaves no incomplete checkpoint."""
    hidden = _hidden(folder.parent, "tmp", _number(folder))
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _restore(root: Path) -> None:
    """Undo an interrupted replacement."""
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


class BackgroundWriter:
    """Runs one job at a time in a thread; it must read copies of data that changes meanwhile. The error of a failed job
    is raised once, by the next `raise_if_failed`, `wait` or `start`."""

    def __init__(self, what: str = "a checkpoint") -> None:
        self.what, self.thread = what, ThreadPoolExecutor(1, "arborl-writer")
        self.job: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        return self.job is not None and not self.job.done()

    def start(self, work: Callable[[], object]) -> None:
        self.wait()
        self.job = self.thread.submit(work)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed job; do not wait for a running one."""
        if not self.busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the job is done, at most `seconds`; raise its error. Returns whether it is done."""
        job = self.job
        if job is None:
            return True
        try:
            if job in wait([job], seconds).done:
                job.result()
            return job.done()
        finally:
            if job.done():  # else the wait was interrupted and the job still runs
                self.job = None

    def close(self) -> None:
        """Wait, and end the thread. An error is logged, not raised: the run may end for another reason."""
        try:
            self.wait()
        except Exception as error:
            log.error("%s is not written: %s", self.what, error)
        self.thread.shutdown()
