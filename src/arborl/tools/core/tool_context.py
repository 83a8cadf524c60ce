"""Task fields, episode state and other parameters that the model does not write; output limits.

A parameter is marked by its annotation. Marked parameters are not part of the schema that the model sees.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, Self, get_args, get_origin

from arborl.errors import EpisodeError
from arborl.types import Task

TOKEN_ESTIMATE = re.compile(r"[^\W\d_]{1,4}|\s+|.", re.DOTALL)
"""Approximate tokens without a tokenizer: up to four letters, a run of white space, or any other character."""


@dataclass(frozen=True, slots=True)
class TaskField:
    """Marks a parameter that gets a field of the task: `answer: Annotated[str, TaskField()]`.

    Example:
        @tool
        def check(guess: str, right: Annotated[str, TaskField("answer")]) -> bool: ...
    """

    field: str | None = None
    """Name of the field; by default the parameter's name."""


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeState:
    """Marks a parameter that lives as long as the episode: `notes: Annotated[list[str], EpisodeState(list)]`.

    The object is created at its first use and closed with the episode if it has a `close` method (plain or async).
    Tools with the same annotation share the object:

    Example:
        Notes = Annotated[list[str], EpisodeState(list)]

        @tool(stateful=True)
        def note(text: str, notes: Notes) -> str: ...

        @tool(stateful=True)
        def recall(notes: Notes) -> list[str]: ...
    """

    make: Callable[[], Any]
    """Called without arguments, once per episode."""


class TokenEncoder(Protocol):
    """The part of a tokenizer that output limits need."""

    def encode(self, text: str) -> list[int]: ...


_episode_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class ToolContext:
    """One episode as its tools see it. A parameter annotated `ToolContext` gets this object.

    Example:
        async with ToolContext(task) as context:      # the end closes every state
            await toolbox.run(calls, context)
    """

    task: Task = field(default_factory=lambda: Task(""))
    tokenizer: TokenEncoder | None = None
    """The model's tokenizer, for output limits in tokens."""
    id: str = field(default_factory=lambda: f"episode-{next(_episode_numbers)}")
    """Unique in this process."""
    calls: int = 0
    """Number of tool calls of the agent so far."""
    _states: dict[Any, Any] = field(default_factory=dict)

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.task.fields

    def state(self, key: Any, make: Callable[[], Any]) -> Any:
        """The episode's object under `key`, created at the first call."""
        if key not in self._states:
            self._states[key] = make()
        return self._states[key]

    async def close(self) -> None:
        """Close every state, the newest first; an error does not stop the others."""
        first: Exception | None = None
        while self._states:
            _, state = self._states.popitem()
            try:
                result = state.close() if callable(getattr(state, "close", None)) else None
                if inspect.isawaitable(result):
                    await result
            except Exception as error:
                first = first or error
        if first is not None:
            raise EpisodeError("closing the state of a tool", first) from first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class ParameterInjector:
    """Fills the marked parameters of one tool."""

    tool: str
    markers: Mapping[str, Any]  # parameter -> `TaskField`, `EpisodeState`, or the class `ToolContext`
    optional: frozenset[str]  # parameters with a default; their task field may be missing

    def values(self, context: ToolContext) -> dict[str, Any]:
        """Values of the marked parameters. A missing task field is an error of the run: it ends the episode."""
        values = {}
        for parameter, marker in self.markers.items():
            if marker is ToolContext:
                values[parameter] = context
            elif isinstance(marker, EpisodeState):
                values[parameter] = self.state(context, marker, marker.make)
            elif (name := marker.field or parameter) in context.fields:
                values[parameter] = context.fields[name]
            elif parameter not in self.optional:
                present = ", ".join(context.fields) or "no fields"
                missing = LookupError(f"it needs the field {name!r}; task {context.task.id!r} has: {present}")
                raise EpisodeError(f"tool {self.tool!r}", missing)
        return values

    def state(self, context: ToolContext, key: Any, make: Callable[[], Any]) -> Any:
        """The episode's object under `key`; an exception of `make` ends the episode."""
        try:
            return context.state(key, make)
        except Exception as error:
            raise EpisodeError(f"the state of tool {self.tool!r}", error) from error


def injection_marker(annotation: Any) -> Any:
    if annotation is ToolContext:
        return ToolContext
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            if isinstance(extra, TaskField | EpisodeState):
                return extra
            if extra is TaskField:  # `Annotated[str, TaskField]`, without the parentheses
                return TaskField()
    return None


def truncate(text: str, max_chars: int, max_tokens: int, tokenizer: TokenEncoder | None = None) -> str:
    kept = _longest_prefix(text[:max_chars], max_tokens, tokenizer)
    return text if len(kept) == len(text) else f"{kept}… [cut: {len(text) - len(kept):,} more characters]"


def _longest_prefix(text: str, max_tokens: int, tokenizer: TokenEncoder | None) -> str:
    """The longest prefix of at most `max_tokens` tokens, by bisection: decoded tokens need not be a prefix."""
    if 4 * len(text) <= max_tokens or count_tokens(text, tokenizer) <= max_tokens:  # at most 4 tokens per character
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        if count_tokens(text[:middle], tokenizer) <= max_tokens:
            low = middle
        else:
            high = middle
    return text[:low]


def count_tokens(text: str, tokenizer: TokenEncoder | None) -> int:
    return len(tokenizer.encode(text)) if tokenizer is not None else sum(1 for _ in TOKEN_ESTIMATE.finditer(text))
