"""Tracing spans for OpenTelemetry and the timeline; almost free without a tracer.

A step contains its episodes, an episode its model calls and tool calls. Each span has the attributes of those around
it: `arborl.run`, `arborl.step`, `arborl.episode`. Model and tool calls use OpenTelemetry's names (`gen_ai.…`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

_tracer: Any = None
"""Tracer of OpenTelemetry, if any."""
_timeline: TimelineSink | None = None
"""Timeline that records spans, if any."""
_around: ContextVar[dict[str, Any] | None] = ContextVar("around", default=None)
"""Inherited attributes of the enclosing spans."""
_unscored: dict[int, tuple[Any, Any, int]] = {}
"""Episodes without rewards yet: episode, span, end time."""


class TimelineSink(Protocol):
    """Records spans by kind; concurrent spans are on different lines."""

    def wanted(self, kind: str) -> bool: ...

    def take(self, kind: str) -> int: ...

    def add(self, kind: str, name: str, began: float, ended: float, args: dict[str, Any], line: int = 0) -> None: ...


def set_tracer(tracer: Any) -> None:
    """Set the tracer; None removes it."""
    global _tracer
    end_open_spans()
    _tracer = tracer


def set_timeline(timeline: TimelineSink | None) -> None:
    """Set the timeline; None removes it."""
    global _timeline
    _timeline = timeline


def add_to_timeline(kind: str, name: str, began: float, ended: float, **args: Any) -> None:
    """Record finished sequential work between two times of `time.time()`."""
    if _timeline is not None and _timeline.wanted(kind):
        _timeline.add(kind, name, began, ended, args)


def span(name: str, **attributes: Any) -> Span:
    """A span. Keywords are attributes, with `__` for `.`; those with the prefix `inside_` are inherited by inner spans.

    Example:
        with span("arborl.step", inside_arborl__step=3) as step:
            step.note(arborl__reward=0.4)
    """
    traced = NO_SPAN if _tracer is None else _TracedSpan(name, attributes)
    kind = KINDS.get(name) or ("tools" if name.startswith("execute_tool") else "others")
    return _TimelineSpan(traced, _timeline, kind, name) if _timeline is not None and _timeline.wanted(kind) else traced


KINDS = {
    "arborl.step": "steps",
    "arborl.learn": "learner",
    "arborl.publish": "learner",
    "arborl.wait": "learner",
    "arborl.episode": "rollout",
    "chat": "model calls",
}
"""Row of the timeline by span name."""


class Span:
    """A span without tracer: two empty calls."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, **attributes: Any) -> None:
        """Add attributes that are not None."""

    def fail(self, why: str) -> None:
        """Mark the span as failed without an exception."""

    def end_when_scored(self, episode: Any) -> None:
        """End the span at the current time when `end_scored_spans` gets the episode."""


NO_SPAN = Span()


class _TracedSpan(Span):
    """A span with a tracer."""

    __slots__ = ("_held", "_inside", "_token", "attributes", "current", "name", "otel_span")

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
        self.otel_span = _tracer.start_span(self.name, attributes=_known({**around, **plain}))
        self.current = trace.use_span(self.otel_span, record_exception=False, set_status_on_exception=False)
        self.current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if isinstance(error, Exception):
                self.otel_span.record_exception(error)
            self.fail(kind.__name__ if kind is not None else "")
        self.current.__exit__(None, None, None)
        if self._token is not None:
            _around.reset(self._token)
        if not self._held:
            self.otel_span.end()

    def note(self, **attributes: Any) -> None:
        self.otel_span.set_attributes(_known({_dotted(key): value for key, value in attributes.items()}))

    def fail(self, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.otel_span.set_status(Status(StatusCode.ERROR, why))
        self.otel_span.set_attribute("error.type", why)

    def end_when_scored(self, episode: Any) -> None:
        self._held = True
        _unscored[id(episode)] = episode, self.otel_span, time.time_ns()


class _TimelineSpan(Span):
    """A span that is also recorded in the timeline."""

    __slots__ = ("began", "kind", "line", "name", "notes", "timeline", "traced")

    def __init__(self, traced: Span, timeline: TimelineSink, kind: str, name: str):
        self.traced, self.timeline, self.kind, self.name = traced, timeline, kind, name
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.traced.__enter__()
        self.began, self.line = time.time(), self.timeline.take(self.kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.notes["error"] = kind.__name__
        self.timeline.add(self.kind, self.name, self.began, time.time(), self.notes, self.line)
        self.traced.__exit__(kind, error, trace)

    def note(self, **attributes: Any) -> None:
        self.notes |= _known({_dotted(key): value for key, value in attributes.items()})
        self.traced.note(**attributes)

    def fail(self, why: str) -> None:
        self.notes["error"] = why
        self.traced.fail(why)

    def end_when_scored(self, episode: Any) -> None:
        self.notes["episode"] = episode.id
        self.traced.end_when_scored(episode)


def end_scored_spans(episodes: Iterable[Any]) -> None:
    """End the spans of episodes that have rewards or failed."""
    if not _unscored:
        return
    for episode in episodes:
        held = _unscored.pop(id(episode), None)
        if held is not None:
            _, otel_span, ended = held
            if episode.failure is None:
                otel_span.set_attributes({"arborl.reward": float(episode.reward)})
            otel_span.end(end_time=ended)


def end_open_spans() -> None:
    """End the spans of episodes without rewards."""
    while _unscored:
        _, (_, otel_span, ended) = _unscored.popitem()
        otel_span.end(end_time=ended)


def _dotted(key: str) -> str:
    return key.replace("__", ".")


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
