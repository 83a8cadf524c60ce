"""Spans: what a run does, inside what, and for how long, told to OpenTelemetry; nothing at all where nobody listens.

A step holds its episodes, an episode its model calls and tool calls. Each span has what is known of those around it:
`arborl.run`, `arborl.step`, `arborl.episode`. Model and tool calls have OpenTelemetry's own names for what they share
with those of others (`gen_ai.…`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

_tracer: Any = None
"""OpenTelemetry's; none where nobody listens."""
_picture: TimelineSink | None = None
"""What draws spans as slices of time; none where nobody does."""
_around: ContextVar[dict[str, Any] | None] = ContextVar("around", default=None)
"""Attributes of the spans that the present one is in, for all inside."""
_unscored: dict[int, tuple[Any, Any, int]] = {}
"""Episodes that wait for their reward: the episode, its span, and when it ended."""


class TimelineSink(Protocol):
    """Draws work as slices of time, by kind; those at the same time on lines of their own."""

    def wanted(self, kind: str) -> bool: ...

    def take(self, kind: str) -> int: ...

    def add(self, kind: str, name: str, began: float, ended: float, args: dict[str, Any], line: int = 0) -> None: ...


def set_tracer(tracer: Any) -> None:
    """Tell this tracer from now on; none ends it."""
    global _tracer
    end_open_spans()
    _tracer = tracer


def set_timeline(picture: TimelineSink | None) -> None:
    """Draw spans here from now on; none ends it."""
    global _picture
    _picture = picture


def add_to_timeline(kind: str, name: str, began: float, ended: float, **args: Any) -> None:
    """Draw what has been done already, between two times of `time.time()`, by somebody who does one thing at a time."""
    if _picture is not None and _picture.wanted(kind):
        _picture.add(kind, name, began, ended, args)


def span(name: str, **attributes: Any) -> Span:
    """A span around what follows; keywords with `__` for `.` are its attributes, and `inside_…` those of all in it too.

    Example:
        with span("arborl.step", inside_arborl__step=3) as own:
            own.note(arborl__reward=0.4)
    """
    told = NOTHING if _tracer is None else _Told(name, attributes)
    kind = KINDS.get(name) or ("tools" if name.startswith("execute_tool") else "others")
    return _Drawn(told, _picture, kind, name) if _picture is not None and _picture.wanted(kind) else told


KINDS = {
    "arborl.step": "steps",
    "arborl.learn": "learner",
    "arborl.publish": "learner",
    "arborl.wait": "learner",
    "arborl.episode": "rollout",
    "chat": "model calls",
}
"""Where in a picture a span is."""


class Span:
    """The span of nobody: costs two empty calls."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, **attributes: Any) -> None:
        """Add attributes; those that are none are left out."""

    def fail(self, why: str) -> None:
        """Mark as failed what does not raise: a tool's answer, an episode."""

    def end_when_scored(self, episode: Any) -> None:
        """End when `end_scored_spans` is told of the episode, with the time of now."""


NOTHING = Span()


class _Told(Span):
    """A span that somebody listens to."""

    __slots__ = ("_held", "_inside", "_token", "attributes", "current", "name", "own")

    def __init__(self, name: str, attributes: dict[str, Any]):
        self.name, self.attributes = name, attributes
        self._held = False
        self._token: Token[dict[str, Any] | None] | None = None

    def __enter__(self) -> Self:
        from opentelemetry import trace

        inside = {_dotted(key[7:]): value for key, value in self.attributes.items() if key.startswith("inside_")}
        plain = {_dotted(key): value for key, value in self.attributes.items() if not key.startswith("inside_")}
        around = {**(_around.get() or {}), **inside}
        self._token = _around.set(around)
        self.own = _tracer.start_span(self.name, attributes=_known({**around, **plain}))
        self.current = trace.use_span(self.own, record_exception=False, set_status_on_exception=False)
        self.current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if isinstance(error, Exception):
                self.own.record_exception(error)
            self.fail(kind.__name__ if kind is not None else "")
        self.current.__exit__(None, None, None)
        if self._token is not None:
            _around.reset(self._token)
        if not self._held:
            self.own.end()

    def note(self, **attributes: Any) -> None:
        self.own.set_attributes(_known({_dotted(key): value for key, value in attributes.items()}))

    def fail(self, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.own.set_status(Status(StatusCode.ERROR, why))
        self.own.set_attribute("error.type", why)

    def end_when_scored(self, episode: Any) -> None:
        self._held = True
        _unscored[id(episode)] = episode, self.own, time.time_ns()


class _Drawn(Span):
    """A span that is drawn too."""

    __slots__ = ("began", "kind", "line", "name", "notes", "picture", "told")

    def __init__(self, told: Span, picture: TimelineSink, kind: str, name: str):
        self.told, self.picture, self.kind, self.name = told, picture, kind, name
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.told.__enter__()
        self.began, self.line = time.time(), self.picture.take(self.kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.notes["error"] = kind.__name__
        self.picture.add(self.kind, self.name, self.began, time.time(), self.notes, self.line)
        self.told.__exit__(kind, error, trace)

    def note(self, **attributes: Any) -> None:
        self.notes |= _known({_dotted(key): value for key, value in attributes.items()})
        self.told.note(**attributes)

    def fail(self, why: str) -> None:
        self.notes["error"] = why
        self.told.fail(why)

    def end_when_scored(self, episode: Any) -> None:
        self.notes["episode"] = episode.id
        self.told.end_when_scored(episode)


def end_scored_spans(episodes: Iterable[Any]) -> None:
    """These episodes have their rewards, or have failed for want of one."""
    if not _unscored:
        return
    for episode in episodes:
        held = _unscored.pop(id(episode), None)
        if held is not None:
            _, own, ended = held
            if episode.failure is None:
                own.set_attributes({"arborl.reward": float(episode.reward)})
            own.end(end_time=ended)


def end_open_spans() -> None:
    """End the spans of episodes that nobody has scored."""
    while _unscored:
        _, (_, own, ended) = _unscored.popitem()
        own.end(end_time=ended)


def _dotted(key: str) -> str:
    return key.replace("__", ".")


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
