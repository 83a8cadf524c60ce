"""A deadline for chat templates: one that loops without end is ended by an exception, and says so in one line.

A template is a program of its author's. The thread that renders leaves a note, which costs about a microsecond; another
thread looks at the notes twice a second and raises `RenderTimeout` in a thread that has used too much processor time
for one render. Processor time, because a busy machine may take long for an honest one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType

import jinja2

from arborl.errors import ConfigError

SECONDS = 10.0
"""Processor time of one render; an honest one takes milliseconds."""
LOOK_SECONDS = 0.5


class RenderTimeout(jinja2.TemplateError):
    """A template used more processor time than a render may."""


class Watched:
    """One render, to be used as a context; `watch()` makes it."""

    __slots__ = ("_deadline", "clock", "ended", "since", "thread")

    def __init__(self, deadline: RenderDeadline):
        self._deadline, self.ended, self.since = deadline, False, -1.0
        self.thread = threading.get_ident()
        self.clock = _clock_of(self.thread)

    def __enter__(self) -> Watched:
        self._deadline.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._deadline.end(self)
        except RenderTimeout:  # it came after the last line of the template
            self._deadline.end(self)

    def used(self) -> float:
        """Processor seconds since this was first called."""
        now = time.clock_gettime(self.clock)
        self.since = now if self.since < 0 else self.since
        return now - self.since


class RenderDeadline:
    """Ends renders that take too long."""

    def __init__(self, seconds: float = SECONDS, look_seconds: float = LOOK_SECONDS):
        self.seconds, self.look_seconds = seconds, look_seconds
        self._renders: dict[int, Watched] = {}
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None

    def watch(self) -> Watched:
        """A context around one render of this thread."""
        return Watched(self)

    def begin(self, render: Watched) -> None:
        self._renders[id(render)] = render
        looking = self._looking
        if looking is None or not looking.is_alive():  # a fork has no threads but its own
            with self._lock:
                if self._looking is looking:
                    self._looking = threading.Thread(target=self._look, name="arborl-render-deadline", daemon=True)
                    self._looking.start()

    def end(self, render: Watched) -> None:
        with self._lock:
            self._renders.pop(id(render), None)
            if render.ended:  # an exception that has not come yet would come to somebody else
                _raise_in(render.thread, None)

    def _look(self) -> None:
        idle = 0
        while idle < 20:
            time.sleep(self.look_seconds)
            idle = 0 if self._renders else idle + 1
            for key, render in list(self._renders.items()):
                self._end_if_late(key, render)
        with self._lock:
            self._looking = None
        if self._renders:  # begun meanwhile, by a thread that saw this one alive
            self.begin(next(iter(self._renders.values())))

    def _end_if_late(self, key: int, render: Watched) -> None:
        try:
            late = render.used() > self.seconds
        except OSError:  # its thread has ended
            late = False
        with self._lock:
            if late and self._renders.pop(key, None) is render:
                render.ended = True
                _raise_in(render.thread, RenderTimeout)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next instruction; None takes back one that is still to come."""
    what = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _clock_of(thread: int) -> int:
    """The clock of a thread's processor time; of the time of day where the system has none."""
    find = getattr(time, "pthread_getcpuclockid", None)
    return time.CLOCK_MONOTONIC if find is None else int(find(thread))


DEADLINE = RenderDeadline()


def without_end() -> ConfigError:
    """What is said of a template that was ended."""
    return ConfigError(
        f"the chat template took more than {DEADLINE.seconds:g} s of processor time for one conversation: it loops "
        "without end, or nearly. Give another (model.chat_template)."
    )
