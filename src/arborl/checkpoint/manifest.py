"""`MANIFEST` of a checkpoint: size and hash of every file; written last."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arborl.errors import ConfigError

NAME = "MANIFEST"
VERSION = 2  # since version 2 the hash of a file is the hash of the hashes of its pieces, computed in parallel
PIECE = 2**26
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))  # half of the cores at most: training continues meanwhile


class DamagedCheckpoint(ConfigError):
    """A checkpoint is incomplete or changed."""


def write_manifest(folder: Path, step: int) -> None:
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, in_pieces(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    }
    manifest = {"version": VERSION, "step": step, "files": files}
    (folder / NAME).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def check(folder: Path, verify: bool, under: str = "") -> None:
    """Raise `DamagedCheckpoint` with the name of the file unless all files are as written."""
    version, files = _listed(folder)
    digest_of = in_one if version == 1 else in_pieces
    for name, (size, digest) in files.items():
        if name.startswith(f"{under}/" if under else ""):
            path = folder / name
            try:
                _check_size(path, size)
                if verify and digest_of(path) != digest:
                    raise DamagedCheckpoint(f"{path} has the right size, but not the content that was written")
            except OSError as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def in_pieces(path: Path) -> str:
    """SHA-256 of the SHA-256 digests of pieces of 64 MiB, read in parallel."""
    starts = range(0, max(path.stat().st_size, 1), PIECE)
    if len(starts) == 1:
        return hashlib.sha256(_piece(path, 0)).hexdigest()
    with ThreadPoolExecutor(min(THREADS, len(starts))) as pool:
        return hashlib.sha256(b"".join(pool.map(lambda start: _piece(path, start), starts))).hexdigest()


def in_one(path: Path) -> str:
    """SHA-256 of a file, for version 1."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _piece(path: Path, start: int) -> bytes:
    found, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = PIECE
        while left and (count := file.readinto(buffer[:left])):
            found.update(buffer[:count])
            left -= count
    return found.digest()


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing, though {NAME} lists it")
    if path.stat().st_size != size:
        raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, and {size} were written")


def _listed(folder: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Version of the manifest, and size and hash of each file."""
    path = folder / NAME
    if not path.is_file():
        raise DamagedCheckpoint(
            f"{path} is missing: writing this checkpoint was never finished, or it is not a checkpoint"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["version"]
        if version in (1, VERSION):
            files = {_inside(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
            return int(version), files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    raise DamagedCheckpoint(f"{path} has version {version!r}, and this Arbor reads versions 1 and {VERSION}")


def _inside(name: str) -> str:
    """The name; ValueError if it leads out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not a file of the checkpoint")
    return name
