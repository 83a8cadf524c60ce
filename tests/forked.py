"""Commands in processes of their own that do not each import torch anew, which takes longer than the runs of tests.

One process imports it and does nothing else; whatever is started here is a copy of that one. It has its own memory,
signals, exit code and chance, and can be killed like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PARENT = multiprocessing.get_context("forkserver")
PARENT.set_forkserver_preload(
    ["torch", "transformers.models.llama.modeling_llama", "arborl.training_run.run_session",
     "arborl.learner.core.learner",
     "arborl.engines.local", "arborl.cli.main", "arborl.config.load_config", "hydra", "matplotlib.figure"]
)  # fmt: skip


class Forked:
    """A running `python WORDS…` whose stdout and stderr go to one file; a subset of `subprocess.Popen`.

    Args:
        words: `-m MODULE …` or a script's path, and its arguments.
        cwd: where it works.
        env: set beside what this process has.
    """

    def __init__(self, words: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None):
        self._output_path = Path(tempfile.mkstemp(prefix="forked-")[1])
        place = str(cwd or Path.cwd())
        more = dict(os.environ) | dict(env or {})
        self._process = PARENT.Process(target=_begin, args=(list(words), place, more, self._output_path), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end of the process; returns its output."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("a forked command", timeout or 0, self._output_path.read_bytes())
        output = self._output_path.read_text(errors="replace")
        self._output_path.unlink()
        return output, None


def forked(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end; returns its exit code and output."""
    process = Forked(words, cwd, env)
    output, _ = process.communicate(300)
    assert process.returncode is not None
    return process.returncode, output


def _begin(words: list[str], place: str, env: dict[str, str], output_path: Path) -> None:
    """In the copy: become the command."""
    import random

    import numpy as np
    import torch

    for seed in (random.seed, np.random.seed, torch.seed):  # a new process has its own chance
        seed()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(env)
    out = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    module, words = (words[1], words[1:]) if words[0] == "-m" else (None, words)
    sys.argv = words
    if module is not None:
        sys.path.insert(0, place)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
