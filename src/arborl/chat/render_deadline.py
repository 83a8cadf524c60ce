"""A deadline for chat templates: one that loops without end is ended by an exception, and says so in one line.

A template is a program of its author's. The thread that renders leaves a mark, which costs less than a microsecond;
another thread looks at the marks twice a second and raises `RenderTimeout` in a thread that has used too much processor
time for one render. Processor time, because a busy machine may take long for an honest one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from threading import get_ident

import jinja2

from arborl.errors import ConfigError

SECONDS = 10.0
"""Processor time of one render; an honest one takes milliseconds."""
LOOK_SECONDS = 0.5
IDLE_LOOKS = 20


class RenderTimeout(jinja2.TemplateError):
    """A template used more processor time than a render may."""


class RenderDeadline:
    """Ends renders that take too long.

    Example:
        mark = deadline.begin()
        try:
            …                    # RenderTimeout may be raised here
        finally:
            deadline.end(mark)   # and nowhere behind this line
    """

    def __init__(self, seconds: float = SECONDS, look_seconds: float = LOOK_SECONDS):
        self.seconds, self.look_seconds = seconds, look_seconds
        self._renders: dict[object, int] = {}
        """The thread of each mark. Taking a mark out decides: only one of the two threads does it."""
        self._struck: set[object] = set()
        self._looking: threading.Thread | None = None

    def begin(self) -> object:
        """The mark of a render that this thread begins."""
        mark = object()
        self._renders[mark] = get_ident()
        if self._looking is None:
            self._start()
        return mark

    def end(self, mark: object) -> None:
        """The render is over."""
        if self._renders.pop(mark, None) is None:
            while mark not in self._struck:
                time.sleep(0.001)
            self._struck.discard(mark)
            _raise_in(get_ident(), None)  # what has not come yet would come to other code of this thread

    def forget(self) -> None:
        """In a process that was forked: the threads of its parent are not there."""
        self._renders, self._struck, self._looking = {}, set(), None

    def _start(self) -> None:
        self._looking = threading.Thread(target=self._look, name="arborl-render-deadline", daemon=True)
        self._looking.start()

    def _look(self) -> None:
        since: dict[object, float] = {}
        idle = 0
        while idle < IDLE_LOOKS:
            time.sleep(self.look_seconds)
            seen = dict(self._renders)
            idle = 0 if seen else idle + 1
            since = {mark: since[mark] if mark in since else _used(thread) for mark, thread in seen.items()}
            for mark, thread in seen.items():
                if _used(thread) - since[mark] > self.seconds:
                    self.strike(mark)
        self._looking = None
        if self._renders:  # begun meanwhile, by a thread that saw this one
            self._start()

    def strike(self, mark: object) -> None:
        """End this render, unless it is over."""
        thread = self._renders.pop(mark, None)
        if thread is not None:
            _raise_in(thread, RenderTimeout)
            self._struck.add(mark)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next instruction; None takes back one that is still to come."""
    what = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _used(thread: int) -> float:
    """Processor seconds of a thread, 0 where it has ended; seconds of the clock where the system keeps none."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return time.monotonic()
    if all(other.ident != thread for other in threading.enumerate()):  # its number must not be asked about any more
        return 0.0
    try:
        return time.clock_gettime(clock_of(thread))
    except OSError:
        return 0.0


DEADLINE = RenderDeadline()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DEADLINE.forget)


def without_end() -> ConfigError:
    """What is said of a template that was ended."""
    return ConfigError(
        f"the chat template took more than {DEADLINE.seconds:g} s of processor time for one conversation: it loops "
        "without end, or nearly. Give another (model.chat_template)."
    )
