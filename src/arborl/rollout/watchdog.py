"""Says who holds the event loop while they do: from inside the loop nobody could.

Environments that may block run in threads. What else is `async` (an agent, a tool, a reward, an environment that said
it would not block) runs in the event loop, and one that calls `time.sleep` there stops every episode, every deadline
and Ctrl-C. It cannot be stopped from here, but it can be named.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType
from typing import ClassVar

from arborl.rewards.reward import Rewards
from arborl.rollout.deadlines import ENGINE, across, untimed

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks."""
HELD = 2.0
"""Seconds without a sign of life after which somebody is said to hold the loop."""
OURS = str(Path(__file__).parents[1])
LIBRARIES = ("<", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
LOOPS = ("asyncio/events.py", "asyncio/base_events.py", "asyncio/runners.py")
"""Where what runs in a loop ends and what runs the loop begins."""


NAMED = (across.__code__, untimed.__code__, Rewards._ask.__code__)
"""Functions whose local `where` says whose code they call."""


class Watchdog:
    """Watches the event loop it is entered in, from a thread; warns once of each place that holds it.

    Example:
        with Watchdog():
            await play()
    """

    told: ClassVar[set[str]] = set()
    """Places that were named, in this process: every episode passes them again."""

    def __init__(self) -> None:
        self.over, self.alive = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, name="arborl-watchdog", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.is_set():
            self.alive.clear()
            try:
                self.loop.call_soon_threadsafe(self.alive.set)
            except RuntimeError:  # the loop is closed
                return
            silent = 0.0
            while not self.over.wait(LOOK) and not self.alive.is_set():
                silent += LOOK
                if silent >= HELD:
                    self._tell(silent)

    def _tell(self, seconds: float) -> None:
        place = holder(sys._current_frames().get(self.thread))
        if place is None or place in self.told:
            return
        self.told.add(place)
        log.warning(
            "%s has held the event loop for %.1f s, and nothing else can run meanwhile: no other episode, no deadline, "
            "no Ctrl-C. What waits there must be awaited. Environments that do not say `blocking = False`, and tools "
            "and rewards that are plain functions, run in threads and may block.",
            place,
            seconds,
        )


def holder(frame: FrameType | None) -> str | None:
    """Whose code a thread is in: the line that is neither ours nor a library's, and the environment or reward it was
    called for.

    None where the innermost line is ours and of neither: a computation of ours is no news.
    """
    line = ours = None
    while frame is not None and not frame.f_code.co_filename.endswith(LOOPS):
        code = frame.f_code
        if code in NAMED:
            where = frame.f_locals["where"]
            return None if where == ENGINE else f"{where}{f' ({line})' if line else ''}"
        if line is ours is None and not code.co_filename.startswith(LIBRARIES):
            place = f"{code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
            line, ours = (None, place) if code.co_filename.startswith(OURS) else (place, None)
        frame = frame.f_back
    return line
