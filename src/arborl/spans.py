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
from typing import Any, Self

_tracer: Any = None
"""OpenTelemetry's; none where nobody listens."""
_around: ContextVar[dict[str, Any] | None] = ContextVar("around", default=None)
"""Attributes of the spans that the present one is in, for all inside."""
_unscored: dict[int, tuple[Any, Any, int]] = {}
"""Episodes that wait for their reward: the episode, its span, and when it ended."""


def listen(tracer: Any) -> None:
    """Tell this tracer from now on; none ends it."""
    global _tracer
    settle()
    _tracer = tracer


def span(name: str, **attributes: Any) -> Span:
    """A span around what follows; keywords with `__` for `.` are its attributes, and `inside_…` those of all in it too.

    Example:
        with span("arborl.step", inside_arborl__step=3) as own:
            own.note(arborl__reward=0.4)
    """
    return NOTHING if _tracer is None else _Told(name, attributes)


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

    def until_scored(self, episode: Any) -> None:
        """End when `scored` is told of the episode, with the time of now."""


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

    def until_scored(self, episode: Any) -> None:
        self._held = True
        _unscored[id(episode)] = episode, self.own, time.time_ns()


def scored(episodes: Iterable[Any]) -> None:
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


def settle() -> None:
    """End the spans of episodes that nobody has scored."""
    while _unscored:
        _, (_, own, ended) = _unscored.popitem()
        own.end(end_time=ended)


def _dotted(key: str) -> str:
    return key.replace("__", ".")


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
