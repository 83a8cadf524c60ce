"""What a tracker is, and how several of them follow one run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arborl.errors import DiskWriteError
from arborl.types import Episode, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """The run that a tracker is to follow."""

    name: str
    """What its folder is called."""
    folder: Path
    config: Mapping[str, Any]
    """The whole configuration in plain values; secrets are masked."""
    step: int = 0
    """Steps that are done: above 0 where the run goes on from a checkpoint."""


class Tracker(Protocol):
    """Takes the numbers of each step. Step N is the N-th update, done; step 0 is the start, before any.

    These two it must have. What follows it may have, and is then called, in this order:

        begin(run: Begun)                   once, before anything else
        episodes(episodes, step, kind)      at most 16 episodes of a step; `kind` is `train` or `evaluation`
        picture(path, step, kind)           a picture that was drawn: of an episode (also `final`), or `curve`
        finish(summary, state)              once, at the end: `finished`, `stopped` or `failed`; before `close`
    """

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
        self._each("log", f" at step {step}", metrics, step)

    def begin(self, run: Begun) -> None:
        """Tell what is to be followed."""
        self._each("begin", "", run)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        """Show some episodes."""
        self._each("episodes", f" at step {step}", episodes, step, kind)

    def picture(self, path: Path, step: int, kind: str) -> None:
        """Show a picture that was drawn."""
        self._each("picture", f" at step {step}", path, step, kind)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        """Tell how the run ended."""
        self._each("finish", "", summary, state)

    def _each(self, method: str, when: str, *args: Any) -> None:
        for tracker in list(self.trackers):
            try:
                if (told := getattr(tracker, method, None)) is not None:
                    told(*args)
            except DiskWriteError:  # the run's own file: without it, the run is not worth its time
                raise
            except Exception:
                log.warning("%s failed%s and is dropped; the run goes on", name_of(tracker), when, exc_info=True)
                self.trackers.remove(tracker)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception:
                log.warning("%s failed while closing", name_of(tracker), exc_info=True)
        self.trackers.clear()


def name_of(tracker: object) -> str:
    """What a tracker is called in messages."""
    return type(tracker).__name__
