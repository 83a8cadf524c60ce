"""Plain C of ours, compiled where it runs: for this machine's processor, once, where there is a compiler.

What was compiled is kept in the user's cache folder under a name that depends on the source, on the compiler and on all
that it knows of the processor, so a folder shared by several machines is right for each of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")
SHARED = Path(__file__).with_name("vectors.h")
"""What all of it may include."""


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library made of this file; None, and a line in the log, where there is no compiler or it does not manage."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        log.info("no C compiler (cc, gcc or clang): %s is not used", source.name)
        return None
    try:
        return ctypes.CDLL(str(_built(compiler, source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # also where a user has no home
        said = getattr(error, "stderr", None) or str(error)
        log.warning("%s is not used, for it cannot be compiled by %s: %s", source.name, compiler, said.strip()[:500])
        return None


def _built(compiler: str, source: Path) -> Path:
    code = source.read_bytes() + SHARED.read_bytes()
    about = _ask(compiler, *FLAGS, "-dM", "-E", "-x", "c", "/dev/null")
    name = hashlib.sha256(code + about.encode() + " ".join(FLAGS).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arborl"
    target = folder / f"{source.stem}-{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # a name of its own until it is whole
            _ask(compiler, *FLAGS, "-I", str(SHARED.parent), "-o", f"{made}/library.so", str(source), "-lm")
            os.replace(f"{made}/library.so", target)
    return target


def _ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


# ------------------------------------------------------------------------------------------------ threads


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "compiled", torch.set_flush_denormal, (True,))  # as the learner's


os.register_at_fork(after_in_child=_threads.cache_clear)  # it has the pool, and none of its threads


def at_once(work: Callable[[int], object], parts: int) -> None:
    """Call it for all parts, the first in this thread, the others beside it where there are threads to spare. So no
    part may wait for another. The interpreter's lock is free while C runs."""
    others = [_threads().submit(work, part) for part in range(1, parts)]
    work(0)
    for other in others:
        other.result()
