"""What a tracker is, and how several of them follow one run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from arborl.errors import CannotWrite
from arborl.types import Metrics

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the numbers of each step. Step N is the N-th update, done; step 0 is the start, before any."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Record numbers of a step, in order. The latest step may be given more of them: its evaluation."""
        ...

    def close(self) -> None:
        """Finish writing. Called once, also after a failure."""
        ...


class Trackers:
    """Several trackers as one. One that raises is reported once and dropped; the run goes on without it.

    Example:
        trackers = Trackers([JsonlTracker(folder / "metrics.jsonl"), TensorBoardTracker(folder / "tensorboard")])
        trackers.log({"reward/mean": 0.4}, step=1)
    """

    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = list(trackers)

    def log(self, metrics: Metrics, step: int) -> None:
        for tracker in list(self.trackers):
            try:
                tracker.log(metrics, step)
            except CannotWrite:  # the run's own file: without it, the run is not worth its time
                raise
            except Exception:
                log.warning("%s failed at step %d and is dropped; the run goes on", _name(tracker), step, exc_info=True)
                self.trackers.remove(tracker)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception:
                log.warning("%s failed while closing", _name(tracker), exc_info=True)
        self.trackers.clear()


def _name(tracker: Tracker) -> str:
    return type(tracker).__name__
