"""Trackers that may be slow, hang or break: each works in a thread of its own, and the run never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from arborl.track.episode_rows import chosen
from arborl.track.tracker import Begun, Tracker
from arborl.types import Episode, Metrics

log = logging.getLogger(__name__)

WAITING = 1000
"""Calls that may wait for a tracker; where there are more, it has stopped answering."""
PATIENCE = 60.0
"""Seconds that a run waits at its end for what is still to be sent."""


class Aside:
    """A tracker that is made, and called, elsewhere than the run. What goes wrong there is said once, by its name.

    Args:
        name: what it is called in messages.
        make: makes it, in its thread.
        waiting: calls that may wait for it.
        patience: seconds that `close` waits.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], waiting: int = WAITING, patience: float = PATIENCE):
        self.name, self.make, self.patience = name, make, patience
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(waiting)
        self.dropped = False
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def begin(self, run: Begun) -> None:
        self._ask("begin", replace(run, config=deepcopy(dict(run.config))))  # the run's own goes into checkpoints

    def log(self, metrics: Metrics, step: int) -> None:
        self._ask("log", dict(metrics), step)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        self._ask("episodes", chosen(episodes), step, kind)

    def picture(self, path: Path, step: int, kind: str) -> None:
        self._ask("picture", path, step, kind)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self._ask("finish", dict(summary), state)

    def close(self) -> None:
        """Wait, not for ever, until all has been sent."""
        if self.dropped:
            return
        with suppress(queue.Full):
            self.calls.put(None, timeout=self.patience)
        self.thread.join(self.patience)
        if self.thread.is_alive():
            self._drop(f"has not come to an end within {self.patience:g} s and is left behind")

    def _ask(self, method: str, *args: Any) -> None:
        if self.dropped:
            return
        try:
            self.calls.put_nowait((method, args))
        except queue.Full:
            self._drop(f"has left {self.calls.maxsize} calls unanswered and is dropped; the run goes on")

    def _drop(self, why: str, trace: bool = False) -> None:
        if not self.dropped:
            self.dropped = True
            log.warning("the tracker %s %s", self.name, why, exc_info=trace)

    def _work(self) -> None:
        tracker, doing = None, "start"
        try:
            tracker = self.make()
            while not self.dropped and (call := self.calls.get()) is not None:
                doing, args = call
                if (told := getattr(tracker, doing, None)) is not None:
                    told(*args)
            doing = "close"
        except BaseException as error:  # `sys.exit` too: some libraries end the process when they are not logged in
            short = str(error).strip().partition("\n")[0]
            self._drop(f"failed ({doing}: {type(error).__name__}: {short}) and is dropped; the run goes on")
            log.debug("where the tracker %s failed", self.name, exc_info=True)
        try:
            if tracker is not None:
                tracker.close()
        except BaseException as error:
            self._drop(f"failed while closing ({type(error).__name__}: {error})")
