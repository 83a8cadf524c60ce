"""Failures by cause: which of them are the same one, how often it happened, and where in somebody's file it began."""

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
        f"rollout{os.sep}", "errors.py", f"rewards{os.sep}reward.py", f"rewards{os.sep}plain_calls.py",
        f"tools{os.sep}threads.py",
    )
)  # fmt: skip
"""Files that every call passes on its way to somebody's code."""
MOST = 50
"""Causes that are kept apart; what else happens is counted with the nearest of them."""
LONG = 400
"""Characters of a failure told in one line."""
LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Failures that are one: the same kind of exception from the same lines of the same part."""

    failure: Failure
    """The first of them, with its traceback."""
    episode: str
    """The id of the episode it was in."""
    when: str
    """In which part of the run: `step 3`, `evaluation at step 0`."""
    count: int = 1

    def __str__(self) -> str:
        return f"{one_line(self.failure)} ×{self.count} (first in episode {self.episode} of {self.when})"


class Failures:
    """The failures of a run, by cause.

    Example:
        failures = Failures()
        failures.add(episodes, "step 3")
        print(*failures, sep="\\n")       # environment 'lake': ValueError: thin ice ×5 (first in episode t#1 of step 3)
    """

    def __init__(self) -> None:
        self.causes: dict[tuple[str, ...], FailureCause] = {}

    def add(self, episodes: Iterable[Episode], when: str) -> None:
        """Count those of these episodes that failed."""
        for episode in episodes:
            if episode.failure is not None:
                key = failure_key(episode.failure)
                if key not in self.causes and len(self.causes) >= MOST:
                    key = max(self.causes, key=lambda other: _nearness(other, key))
                known = self.causes.get(key, FailureCause(episode.failure, episode.id, when, 0))
                self.causes[key] = dataclasses.replace(known, count=known.count + 1)

    def __iter__(self) -> Iterator[FailureCause]:
        """The commonest first."""
        return iter(sorted(self.causes.values(), key=lambda cause: -cause.count))

    def __len__(self) -> int:
        return len(self.causes)

    def state(self) -> list[dict[str, Any]]:
        """As plain JSON values, for checkpoints and `summary.json`."""
        return [dataclasses.asdict(cause) for cause in self]

    def load_state(self, state: Iterable[dict[str, Any]]) -> None:
        """Go on counting from what `state` said."""
        known = [FailureCause(**{**row, "failure": Failure(**row["failure"])}) for row in state]
        self.causes = {failure_key(cause.failure): cause for cause in known}


class FirstFailureLogger:
    """Warns of the first failure of each cause and is silent about those like it, which are counted elsewhere."""

    def __init__(self, log: logging.Logger):
        self.log, self.told = log, set[tuple[str, ...]]()

    def tell(self, episode: Episode) -> None:
        """Say that the episode failed, unless one failed alike before."""
        if episode.failure is None:
            return
        key = failure_key(episode.failure)
        level = logging.DEBUG if key in self.told or len(self.told) >= MOST else logging.WARNING
        self.log.log(level, "episode %s failed and is left out: %s", episode.id, one_line(episode.failure))
        if level == logging.WARNING:
            self.told.add(key)
            self.log.info("where it failed:\n%s", printable(trim_traceback(episode.failure.traceback)))


def one_line(failure: Failure) -> str:
    """A failure in one line, however much its message says."""
    words = printable(" ".join(str(failure).split()))
    return words if len(words) <= LONG else f"{words[: LONG - 1]}…"


def _nearness(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def failure_key(failure: Failure) -> tuple[str, ...]:
    """What failures of one cause share: part, exception and lines; where no lines are known, the words but for numbers.

    The message is no part of it where there are lines: it often names the task.
    """
    lines = _lines(trim_traceback(failure.traceback)) or _lines(failure.traceback)
    words = () if lines else (re.sub(r"0x[0-9a-f]+|\d+", "#", failure.message),)
    return (failure.where, failure.kind, *dict.fromkeys(lines), *words)


def _lines(trace: str) -> list[str]:
    return [f"{found['file']}:{found['line']}" for row in trace.splitlines() if (found := FRAME.match(row))]


def trim_traceback(trace: str) -> str:
    """A traceback from the first line in somebody's own file on; without one, from where it leaves the framework.

    Of several (chained, or one from another process) those that never touch somebody's file are left out.
    """
    blocks = [_Block(lines) for lines in _split(trace)]
    kept = [block for block in blocks if block.touches(_theirs)] or blocks
    if kept[-1] is not blocks[-1]:
        kept[-1].tail = [row for row in kept[-1].tail if row not in CHAINS]
    return "\n".join("\n".join(block.lines()) for block in kept).strip("\n")


class _Block:
    """One traceback: its heading, frames, and what follows them."""

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

    def touches(self, whose: Callable[[str], bool]) -> bool:
        return any(whose(_file(frame)) for frame in self.frames)

    def lines(self) -> list[str]:
        """What is shown of it."""
        whose = _theirs if self.touches(_theirs) else _of_a_part
        begins = next((i for i, frame in enumerate(self.frames) if whose(_file(frame))), None)
        if begins is None:
            return self.tail if self.frames else self.head  # our own check of what somebody returned: its words say it
        return [*self.head, *(row for frame in self.frames[begins:] for row in frame), *self.tail]


def _split(trace: str) -> list[list[str]]:
    """The lines of each traceback; what stands between two belongs to the first."""
    parts: list[list[str]] = [[]]
    for row in trace.splitlines():
        if row == BEGINS and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    return parts


def _file(frame: list[str]) -> str:
    found = FRAME.match(frame[0])
    return found["file"] if found else ""


def _theirs(file: str) -> bool:
    return not file.startswith(HERE) and not _of_python(file)


def _of_a_part(file: str) -> bool:
    """Of an environment, an agent, a tool that is ours."""
    return not file.startswith(FRAMEWORK) and not _of_python(file)


def _of_python(file: str) -> bool:
    return file.startswith((LIBRARY, "<frozen")) and not any(name in file for name in INSTALLED)
