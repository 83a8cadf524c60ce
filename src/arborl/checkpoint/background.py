"""Writing while the run goes on: one thread, one job at a time, and no failure is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Does a job in a thread of its own. What the job reads must not change meanwhile: give it copies.

    A job that fails raises its own error from the next `look`, `wait` or `start`, whichever comes first, once.

    Example:
        background = Background("a checkpoint")
        background.start(lambda: save(root, 12, copied.write, state, keep=2))
        ...                  # the run goes on
        background.look()    # raises where it has failed by now
        background.close()   # waits

    Args:
        what: what is written, in messages.
    """

    def __init__(self, what: str = "a checkpoint") -> None:
        self.what, self.thread = what, ThreadPoolExecutor(1, "arborl-writer")
        self.job: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something that `wait` would wait for."""
        return self.job is not None and not self.job.done()

    def start(self, work: Callable[[], object]) -> None:
        """Begin, once the job before has ended."""
        self.wait()
        self.job = self.thread.submit(work)

    def look(self) -> None:
        """Raise the error of a job that has failed; do not wait for one that is not done."""
        if not self.busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Until the job is done, or for so long; raise its error where it has failed. Whether it is done."""
        job = self.job
        if job is None:
            return True
        try:
            if job in wait([job], seconds).done:
                job.result()
            return job.done()
        finally:
            if job.done():  # else somebody interrupts the waiting, and the job goes on
                self.job = None

    def close(self) -> None:
        """Wait, and end the thread. The run ends, maybe for another reason: a failure is logged and not raised."""
        try:
            self.wait()
        except Exception as error:
            log.error("%s is not written: %s", self.what, error)
        self.thread.shutdown()
