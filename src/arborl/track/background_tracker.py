"""BackgroundTracker: runs a tracker that may be slow, hang or fail in its own thread; the run never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from arborl.track.tracker import RunStart, Tracker, TrackerCalls

log = logging.getLogger(__name__)

MAX_QUEUED = 1000
"""Queued calls above which a tracker counts as hanging."""
CLOSE_SECONDS = 60.0
"""How long a run waits at its end for queued calls."""


class BackgroundTracker(TrackerCalls):
    """Creates and calls a tracker in a thread. An error is logged once, and the tracker is dropped."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], max_queued: int = MAX_QUEUED, close_seconds: float = CLOSE_SECONDS
    ):
        self.name, self.make, self.close_seconds = name, make, close_seconds
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(max_queued)
        self.dropped = False
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def begin(self, run: RunStart) -> None:
        super().begin(replace(run, config=deepcopy(dict(run.config))))  # the run's own is written into checkpoints

    def close(self) -> None:
        """Wait, for a limited time, until all calls are done."""
        if self.dropped:
            return
        with suppress(queue.Full):
            self.calls.put(None, timeout=self.close_seconds)
        self.thread.join(self.close_seconds)
        if self.thread.is_alive():
            self._drop(f"did not finish within {self.close_seconds:g} s and is abandoned")

    def _call(self, method: str, *args: Any) -> None:
        if self.dropped:
            return
        try:
            self.calls.put_nowait((method, args))
        except queue.Full:
            self._drop(f"has {self.calls.maxsize} queued calls and is dropped; the run continues")

    def _drop(self, why: str, trace: bool = False) -> None:
        if not self.dropped:
            self.dropped = True
            log.warning("the tracker %s %s", self.name, why, exc_info=trace)

    def _work(self) -> None:
        tracker, method = None, "start"
        try:
            tracker = self.make()
            while not self.dropped and (call := self.calls.get()) is not None:
                method, args = call
                if (function := getattr(tracker, method, None)) is not None:
                    function(*args)
            method = "close"
        except BaseException as error:  # `sys.exit` too: some libraries exit without a login
            short = str(error).strip().partition("\n")[0]
            self._drop(f"failed ({method}: {type(error).__name__}: {short}) and is dropped; the run continues")
            log.debug("traceback of the tracker %s", self.name, exc_info=True)
        try:
            if tracker is not None:
                tracker.close()
        except BaseException as error:
            self._drop(f"failed while closing ({type(error).__name__}: {error})")
