"""Bounded and safe access to the files of a run folder.

A run folder may come from an untrusted source; all readers open its files here. Only regular files are read: a link, a
FIFO, a device or a folder is refused before a byte is read, without blocking. Files that are larger or deeper than any
run writes are refused with an error that names the file (`Unreadable`). Files are replaced atomically; links never are.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from arborl.config.load_config import MAX_CHARS, PARSERS, check_yaml
from arborl.errors import ConfigError

MAX_JSON = 16 * 2**20
"""Bytes of a JSON file such as `summary.json`."""
MAX_LINE = 32 * 2**20
"""Bytes of a line; enough for an episode of some millions of tokens."""
MAX_LINES_FILE = 4 * 2**30
"""Bytes of a file of lines."""
MAX_ARRAYS = 256 * 2**20
"""Bytes of the arrays of a `.npz`, decompressed."""
MAX_DEPTH = 64
"""Nesting of lists and objects."""
MAX_VALUES = 1_000_000
"""Values of a JSON file, not counting lists of numbers."""
MAX_INT = 2**63
MAX_NUMBER = 1e300
"""NaN is not below it either."""
NUMBERS = {int, float}
MAX_ENTRIES = 200_000
"""Entries of a folder that are listed."""


class Unreadable(ConfigError):
    """A file of a run folder that is refused."""


def open_regular(path: Path, max_bytes: int) -> BinaryIO:
    """Open a regular file of at most `max_bytes` for reading; otherwise `Unreadable`, or `FileNotFoundError`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise Unreadable(f"{path}: is not a regular file and is not read.") from error
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"{path}: is not a regular file and is not read.")
        if found.st_size > max_bytes:
            raise Unreadable(f"{path}: has {found.st_size:,} bytes; at most {max_bytes:,} are read.")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file, not a link."""
    with suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, unordered; empty if it does not exist or is a link."""
    found: list[os.DirEntry[str]] = []
    with suppress(OSError):
        if stat.S_ISDIR(os.lstat(folder).st_mode):
            with os.scandir(folder) as entries:
                for entry in entries:
                    found.append(entry)
                    if len(found) >= MAX_ENTRIES:
                        break
    return found


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The whole file, at most `max_bytes` also if it grows."""
    with open_regular(path, max_bytes) as file:
        return file.read(max_bytes)


def read_json(path: Path, max_bytes: int = MAX_JSON) -> Any:
    """The JSON of a file, of bounded depth and size."""
    return parse_json(read_bytes(path, max_bytes), path)


def parse_json(data: bytes, where: object) -> Any:
    try:
        found = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{where}: not JSON: {str(error)[:200]}") from error
    check_tree(found, where)
    return found


def read_yaml(path: Path) -> Any:
    """The YAML of a file as JSON values: text keys, no dates, sets or huge numbers."""
    try:
        text = read_bytes(path, 4 * MAX_CHARS).decode("utf-8")
        check_yaml(text, path, PARSERS[:1])
        return _as_json(yaml.load(text, PARSERS[0]))
    except yaml.YAMLError as error:
        raise Unreadable(f"{path}: not YAML: {str(error).splitlines()[0][:200]}") from error
    except (ValueError, TypeError, RecursionError, OverflowError, AttributeError) as error:  # odd scalars and keys
        raise Unreadable(f"{path}: cannot be read: {str(error)[:200]}") from error


def check_tree(tree: Any, where: object) -> None:
    """Refuse a value that is nested too deeply or has too many parts."""
    left, count = [(tree, 1)], 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise Unreadable(f"{where}: nested more than {MAX_DEPTH} deep, or has more than {MAX_VALUES:,} values.")
        if isinstance(value, dict):
            left.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list) and not set(map(type, value)) <= NUMBERS:  # lists of token ids are skipped
            left.extend((inner, depth + 1) for inner in value)


def read_lines(path: Path, begin: int = 0) -> Generator[tuple[int, bytes], None, None]:
    """Lines from byte `begin` on with their lengths; a line that is too long has no bytes."""
    with open_regular(path, MAX_LINES_FILE) as file:
        file.seek(begin)
        while line := file.readline(MAX_LINE):
            length = len(line)
            if length == MAX_LINE and not line.endswith(b"\n"):
                line = b""
                while more := file.readline(MAX_LINE):
                    length += len(more)
                    if more.endswith(b"\n"):
                        line = b"\n"
                        break
            yield length, line


def read_arrays(path: Path, names: Sequence[str], max_bytes: int = MAX_ARRAYS) -> dict[str, NDArray[Any]]:
    """Arrays of numbers of a `.npz`; at most `max_bytes` are decompressed. Object arrays are `Unreadable`."""
    try:
        with open_regular(path, max_bytes) as file, zipfile.ZipFile(file) as held:
            found: dict[str, NDArray[Any]] = {}
            for name in names:
                found[name] = _array(held, f"{name}.npy", max_bytes)
                max_bytes -= found[name].nbytes
            return found
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise Unreadable(f"{path}: is not a file of arrays: {str(error)[:200]}") from error
    except (OverflowError, TypeError, SyntaxError, RecursionError, MemoryError, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
        raise Unreadable(f"{path}: is not a file of arrays: {type(error).__name__}") from error


def _array(held: zipfile.ZipFile, name: str, max_bytes: int) -> NDArray[Any]:
    with held.open(name) as packed:
        data = packed.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{name} has more than {max_bytes:,} bytes")
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(stream)
    if kind.hasobject or math.prod(shape) * kind.itemsize != len(data) - stream.tell() or len(shape) > 1:
        raise ValueError(f"{name} is not a list of numbers")
    return np.frombuffer(data, kind, offset=stream.tell()).reshape(shape)


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(_as_json(key)): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -MAX_INT <= value < MAX_INT else None
    return value if value is None or isinstance(value, str | float | bool) else str(value)


def finite_number(value: Any) -> Any:
    """The value if it is a finite number, otherwise None."""
    return value if type(value) in (int, float) and abs(value) < MAX_NUMBER else None


def replace_file(path: Path, data: bytes) -> Path:
    """Replace a file atomically. If the path is a link or not a regular file, nothing is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not is_regular(path):
        raise Unreadable(f"{path}: is not a regular file and is not replaced. Remove it, or write another path.")
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(fresh, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
    return path


def _umask() -> int:
    """Read from /proc: `os.umask` would change it for other threads."""
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("Umask")).split()[1], 8)
    return 0o022
