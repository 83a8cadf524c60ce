"""Failures of episodes grouped by cause, with tracebacks reduced to the lines of user code."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from arborl.errors import printable
from arborl.types import Episode, Failure

FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+)')
BEGINS = "Traceback (most recent call last):"
HERE = f"{Path(__file__).parent}{os.sep}"
FRAMEWORK = tuple(
    f"{HERE}{place}"
    for place in (
        f"rollout{os.sep}", "errors.py", f"rewards{os.sep}reward.py", f"rewards{os.sep}threaded_calls.py",
        f"tools{os.sep}core{os.sep}background_threads.py",
    )
)  # fmt: skip
"""Files of the framework that every call to user code passes."""
MODEL_COMPONENTS = ("engine", "learner", "reference", "critic", "teacher")
"""Components that run a model, by the first word of their names; their failures are none of the task."""
MAX_CAUSES = 50
"""Distinct causes; further failures are counted with the most similar one."""
MAX_LINE = 400
"""Characters of a failure in one line."""
LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Failures with the same component, exception type and lines."""

    failure: Failure
    """The first one, with its traceback."""
    episode: str
    """Id of its episode."""
    when: str
    """Stage of the run: `step 3`, `evaluation at step 0`."""
    count: int = 1

    def __str__(self) -> str:
        return f"{one_line(self.failure)} ×{self.count} (first in episode {self.episode} of {self.when})"


def component(failure: Failure) -> str:
    """`environment` for a failure of `environment 'lake'`."""
    return failure.where.partition(" ")[0]


class Failures:
    """The failures of a run, by cause."""

    def __init__(self) -> None:
        self.causes: dict[tuple[str, ...], FailureCause] = {}

    def add(self, episodes: Iterable[Episode], when: str) -> None:
        for episode in episodes:
            if episode.failure is not None:
                key = failure_key(episode.failure)
                if key not in self.causes and len(self.causes) >= MAX_CAUSES:
                    key = max(self.causes, key=lambda other: _nearness(other, key))
                known = self.causes.get(key, FailureCause(episode.failure, episode.id, when, 0))
                self.causes[key] = dataclasses.replace(known, count=known.count + 1)

    def __iter__(self) -> Iterator[FailureCause]:
        """Most frequent first."""
        return iter(sorted(self.causes.values(), key=lambda cause: -cause.count))

    def __len__(self) -> int:
        return len(self.causes)

    def state(self) -> list[dict[str, Any]]:
        """As plain JSON values, for checkpoints and `summary.json`."""
        return [dataclasses.asdict(cause) for cause in self]

    def load_state(self, state: Iterable[dict[str, Any]]) -> None:
        """Restore the counts of `state`."""
        known = [FailureCause(**{**row, "failure": Failure(**row["failure"])}) for row in state]
        self.causes = {failure_key(cause.failure): cause for cause in known}


class FirstFailureLogger:
    """Logs a warning for the first failure of each cause; later ones are logged at debug level."""

    def __init__(self, log: logging.Logger):
        self.log, self.logged = log, set[tuple[str, ...]]()

    def tell(self, episode: Episode) -> None:
        if episode.failure is None:
            return
        key = failure_key(episode.failure)
        level = logging.DEBUG if key in self.logged or len(self.logged) >= MAX_CAUSES else logging.WARNING
        self.log.log(level, "episode %s failed and is excluded: %s", episode.id, one_line(episode.failure))
        if level == logging.WARNING:
            self.logged.add(key)
            self.log.info("where it failed:\n%s", printable(trim_traceback(episode.failure.traceback)))


def one_line(failure: Failure) -> str:
    text = printable(" ".join(str(failure).split()))
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 1]}…"


def _nearness(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def failure_key(failure: Failure) -> tuple[str, ...]:
    """Key of the cause: component, exception type and lines; without lines, the message without its numbers.

    With lines, the message is left out: it often names the task.
    """
    lines = _lines(trim_traceback(failure.traceback)) or _lines(failure.traceback)
    words = () if lines else (re.sub(r"0x[0-9a-f]+|\d+", "#", failure.message),)
    return (failure.where, failure.kind, *dict.fromkeys(lines), *words)


def _lines(trace: str) -> list[str]:
    return [f"{found['file']}:{found['line']}" for row in trace.splitlines() if (found := FRAME.match(row))]


def trim_traceback(trace: str) -> str:
    """The traceback from the first line of user code on, without chained ones that have no user code."""
    blocks = [_Block(lines) for lines in _split(trace)]
    kept = [block for block in blocks if block.contains(_is_user_code)] or blocks
    if kept[-1] is not blocks[-1]:
        kept[-1].tail = [row for row in kept[-1].tail if row not in CHAINS]
    return "\n".join("\n".join(block.lines()) for block in kept).strip("\n")


class _Block:
    """One traceback: heading, frames, and the lines after them."""

    def __init__(self, lines: list[str]):
        self.head: list[str] = []
        self.frames: list[list[str]] = []
        self.tail: list[str] = []
        for row in lines:
            if FRAME.match(row):
                self.frames.append([row])
            elif not self.frames:
                self.head.append(row)
            elif row.startswith("  ") and not self.tail:
                self.frames[-1].append(row)
            else:
                self.tail.append(row)

    def contains(self, matches: Callable[[str], bool]) -> bool:
        return any(matches(_file(frame)) for frame in self.frames)

    def lines(self) -> list[str]:
        """The lines that are kept."""
        matches = _is_user_code if self.contains(_is_user_code) else _is_part_code
        begins = next((i for i, frame in enumerate(self.frames) if matches(_file(frame))), None)
        if begins is None:
            return self.tail if self.frames else self.head  # a check of a returned value: its message suffices
        return [*self.head, *(row for frame in self.frames[begins:] for row in frame), *self.tail]


def _split(trace: str) -> list[list[str]]:
    """The lines of each traceback; lines between two belong to the first."""
    parts: list[list[str]] = [[]]
    for row in trace.splitlines():
        if row == BEGINS and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    return parts


def _file(frame: list[str]) -> str:
    found = FRAME.match(frame[0])
    return found["file"] if found else ""


def _is_user_code(file: str) -> bool:
    return not file.startswith(HERE) and not _is_python_code(file)


def _is_part_code(file: str) -> bool:
    """Whether it is code of a part of the library: environment, agent, tool."""
    return not file.startswith(FRAMEWORK) and not _is_python_code(file)


def _is_python_code(file: str) -> bool:
    return file.startswith((LIBRARY, "<frozen")) and not any(name in file for name in INSTALLED)
