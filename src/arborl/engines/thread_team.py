"""Threads that run the parts of one job at the same time.

The parts of a compiled sampling step wait for each other, so each part needs a running thread of its own. Threads are
started before the first part begins; where the system starts fewer, the caller divides the job into fewer parts.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

Part = Callable[[], None]
Parts = SimpleQueue[Part | None]


class ThreadTeam:
    """A calling thread and as many others as were needed so far.

    Args:
        name: of the threads.

    Example:
        count = team.start(8)                # 8, or as many threads as the system starts
        team.run(work, count)                # work(0) … work(count - 1), at the same time
    """

    def __init__(self, name: str):
        self.name = name
        self._reset()

    def _reset(self) -> None:
        self.pid, self.size = os.getpid(), 1
        self.refused = False
        """The system has started no more."""
        self.parts: Parts = SimpleQueue()
        weakref.finalize(self, self.parts.put, None)

    def start(self, wanted: int) -> int:
        """Start threads until there are `wanted`, this one included; how many of these there are."""
        if self.pid != os.getpid():  # a forked process has this object and none of its threads
            self._reset()
        while self.size < wanted and not self.refused:
            thread = threading.Thread(target=_work, args=(self.parts,), name=f"{self.name}-{self.size}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.refused = True
                log.warning("%d threads instead of %d: %s", self.size, wanted, error)
            else:
                self.size += 1
        return min(self.size, wanted)

    def run(self, work: Callable[[int], object], count: int) -> None:
        """Call `work` with 0 to `count - 1`, each in a thread of its own, 0 in this one; return when all have returned.

        Raises:
            Exception: the first that `work` raised in another thread.
        """
        if count > self.size:
            raise ValueError(f"{count} parts and {self.size} threads: call start({count}) before, and use its number")
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

        def part(number: int) -> Part:
            return lambda: outcomes.put(_error_of(work, number))

        for number in range(1, count):
            self.parts.put(part(number))
        try:
            work(0)
        finally:  # the others use what the caller is about to free
            errors = [outcomes.get() for _ in range(1, count)]
        for error in errors:
            if error is not None:
                raise error


def _error_of(work: Callable[[int], object], number: int) -> BaseException | None:
    try:
        work(number)
    except BaseException as error:
        return error
    return None


def _work(parts: Parts) -> None:
    """Run parts until the team is gone."""
    while (part := parts.get()) is not None:
        part()
        del part  # it refers to what the caller holds
    parts.put(None)  # for the next thread
