"""C sources compiled at first use for this machine's processor.

The result is cached in the user's cache folder. Its name depends on the source, the compiler and the processor
features, so machines can share the folder.
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
HEADER = Path(__file__).with_name("vectors.h")  # header of all sources


@cache
def load_c_library(source: Path) -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        log.info("no C compiler (cc, gcc or clang): %s is not used", source.name)
        return None
    try:
        return ctypes.CDLL(str(_compile(compiler, source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home folder
        output = getattr(error, "stderr", None) or str(error)
        log.warning("%s is not used: %s cannot compile it: %s", source.name, compiler, output.strip()[:500])
        return None


def _compile(compiler: str, source: Path) -> Path:
    code = source.read_bytes() + HEADER.read_bytes()
    features = _run(compiler, *FLAGS, "-dM", "-E", "-x", "c", "/dev/null")
    name = hashlib.sha256(code + features.encode() + " ".join(FLAGS).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arborl"
    target = folder / f"{source.stem}-{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # renamed when complete
            _run(compiler, *FLAGS, "-I", str(HEADER.parent), "-o", f"{made}/library.so", str(source), "-lm")
            os.replace(f"{made}/library.so", target)
    return target


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        os.cpu_count() or 1, "compiled", torch.set_flush_denormal, (True,)
    )  # as in the learner's threads


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has the pool and none of its threads


def run_parallel(work: Callable[[int], object], parts: int) -> None:
    """Call `work` for all parts, the first in this thread and the others in a pool. No part may wait for another. C
    code runs without the interpreter's lock."""
    others = [_threads().submit(work, part) for part in range(1, parts)]
    work(0)
    for other in others:
        other.result()
