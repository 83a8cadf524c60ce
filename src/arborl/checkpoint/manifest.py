"""The file that makes a checkpoint complete: every file with its size and hash, written last."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from arborl.errors import ConfigError

NAME = "MANIFEST"
VERSION = 1


class Damaged(ConfigError):
    """A checkpoint is incomplete, or not what was written."""


def write_manifest(folder: Path, step: int) -> None:
    """List every file of the folder."""
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    }
    manifest = {"version": VERSION, "step": step, "files": files}
    (folder / NAME).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def check(folder: Path, verify: bool, under: str = "") -> None:
    """Raise `Damaged`, which names the bad file, unless the folder holds what was written.

    Args:
        folder: a checkpoint.
        verify: compare the hashes too, which reads every byte; sizes alone find what a kill leaves behind.
        under: only the files in this folder of it.
    """
    for name, (size, digest) in _files(folder).items():
        if name.startswith(f"{under}/" if under else ""):
            try:
                _check_file(folder / name, size, digest if verify else None)
            except OSError as error:
                raise Damaged(f"{folder / name} cannot be read: {error.strerror}") from error


def _check_file(path: Path, size: int, digest: str | None) -> None:
    if not path.is_file():
        raise Damaged(f"{path} is missing, though {NAME} lists it")
    if path.stat().st_size != size:
        raise Damaged(f"{path} has {path.stat().st_size} bytes, and {size} were written")
    if digest is not None and _sha256(path) != digest:
        raise Damaged(f"{path} has the right size but not the bytes that were written")


def _files(folder: Path) -> dict[str, tuple[int, str]]:
    path = folder / NAME
    if not path.is_file():
        raise Damaged(f"{path} is missing: writing this checkpoint was never finished, or it is not a checkpoint")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
        if version == VERSION:
            return {_inside(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    raise Damaged(f"{path} has version {version!r}, and this Arbor reads version {VERSION}")


def _inside(name: str) -> str:
    """The same name, unless it leads out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
