"""What a tool gets besides what the model wrote: the task's fields, the episode, and state of the episode's own.

A parameter says by its annotation that it is filled here. Such parameters are no part of the schema: the model neither
sees nor writes them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Protocol, Self, get_args, get_origin

from arborl.errors import EpisodeError
from arborl.types import Task


@dataclass(frozen=True, slots=True)
class Given:
    """Marks a parameter that is a field of the task: `answer: Annotated[str, Given()]`.

    Example:
        @tool
        def check(guess: str, right: Annotated[str, Given("answer")]) -> bool: ...
    """

    field: str | None = None
    """Name of the field; the parameter's own by default."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Marks a parameter that lives as long as the episode: `notes: Annotated[list[str], State(list)]`.

    It is made when first asked for, and closed with the episode where it has a `close` (plain or async). Tools that
    share the annotation share the object:

    Example:
        Notes = Annotated[list[str], State(list)]

        @tool(stateful=True)
        def note(text: str, notes: Notes) -> str: ...

        @tool(stateful=True)
        def recall(notes: Notes) -> list[str]: ...
    """

    make: Callable[[], Any]
    """Called without arguments, once an episode."""


class Tokens(Protocol):
    """The part of a tokenizer that counts."""

    def encode(self, text: str) -> list[int]: ...


_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Context:
    """One episode as its tools see it. A parameter annotated `Context` gets it whole.

    Example:
        async with Context(task) as context:      # the end closes every state
            await toolbox.run(calls, context)
    """

    task: Task = field(default_factory=lambda: Task(""))
    tokenizer: Tokens | None = None
    """The model's, where known: output limits are then counted in its tokens."""
    id: str = field(default_factory=lambda: f"episode-{next(_numbers)}")
    """Different for every episode of this process."""
    calls: int = 0
    """How many the agent has had answered so far."""
    _states: dict[Any, Any] = field(default_factory=dict)

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.task.fields

    def state(self, key: Any, make: Callable[[], Any]) -> Any:
        """The episode's object under `key`, made now if it is asked for the first time."""
        if key not in self._states:
            self._states[key] = make()
        return self._states[key]

    async def close(self) -> None:
        """Close every state, the latest first; one that fails keeps no other from being closed."""
        first: Exception | None = None
        while self._states:
            _, state = self._states.popitem()
            try:
                done = state.close() if callable(getattr(state, "close", None)) else None
                if inspect.isawaitable(done):
                    await done
            except Exception as error:
                first = first or error
        if first is not None:
            raise EpisodeError("closing the state of a tool", first) from first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills the parameters of one tool that the model does not write."""

    tool: str
    marks: Mapping[str, Any]
    """Parameter -> `Given`, `State`, or the class `Context`."""
    optional: frozenset[str]
    """Parameters with a default: a field that the task lacks is then no mistake."""

    def fill(self, context: Context) -> dict[str, Any]:
        """Their values. A field that is missing is the run's mistake and not the model's, so it costs the episode."""
        filled = {}
        for parameter, mark in self.marks.items():
            if mark is Context:
                filled[parameter] = context
            elif isinstance(mark, State):
                filled[parameter] = self.state(context, mark, mark.make)
            elif (name := mark.field or parameter) in context.fields:
                filled[parameter] = context.fields[name]
            elif parameter not in self.optional:
                has = ", ".join(context.fields) or "no fields"
                lacks = LookupError(f"it wants the field {name!r}; task {context.task.id!r} has: {has}")
                raise EpisodeError(f"tool {self.tool!r}", lacks)
        return filled

    def state(self, context: Context, key: Any, make: Callable[[], Any]) -> Any:
        """The episode's object under `key`; where it cannot be made, that costs the episode."""
        try:
            return context.state(key, make)
        except Exception as error:
            raise EpisodeError(f"the state of tool {self.tool!r}", error) from error


def mark_of(annotation: Any) -> Any:
    """`Given`, `State` or `Context` where an annotation asks to be filled; else None."""
    if annotation is Context:
        return Context
    if get_origin(annotation) is Annotated:
        for extra in get_args(annotation)[1:]:
            if isinstance(extra, Given | State):
                return extra
            if extra is Given:  # `Annotated[str, Given]`, without the parentheses
                return Given()
    return None
