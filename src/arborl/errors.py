"""What can go wrong, and where it is caught.

Four families. `ConfigError` ends a run before anything starts, with one line that says where, what and what to write
instead. `RunStopped` ends one that has started and cannot work. An `EpisodeError` costs one episode: `boundary()`
attributes it, once, to the border it crossed, and the runner turns it into a `Failure`. Everything else is a defect and
propagates.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from types import TracebackType


class ArborError(Exception):
    """Root of everything Arbor raises on purpose."""


class ConfigError(ArborError):
    """The run as described cannot start."""


class UnknownName(ConfigError):
    """A part was asked for by a name nobody has."""


class RunStopped(ArborError):
    """The run goes on no more because there is no point in it; the message says why and what to do."""


class EpisodeOver(ArborError):
    """A limit ended the episode from inside; it has not failed. `stop` is a value of `arborl.types.Stop`."""

    stop = "done"


class ContextFull(EpisodeOver):
    """The next prompt leaves no room to sample."""

    stop = "context_full"


class MaxTurns(EpisodeOver):
    """The agent used up its turns."""

    stop = "max_turns"


class EngineError(ArborError):
    """The engine refused or lost one request."""


class EpisodeError(ArborError):
    """Costs one episode. `where` names the border that was crossed; the cause is chained."""

    def __init__(self, where: str, cause: BaseException):
        super().__init__(f"{where}: {type(cause).__name__}: {cause}")
        self.where = where
        self.cause = cause

    @property
    def kind(self) -> str:
        return "timeout" if isinstance(self.cause, TimeoutError) else type(self.cause).__name__


class boundary:
    """Whatever fails inside belongs to `where`; with `seconds`, so does taking longer than that.

    Somebody else's `sys.exit` is a failure of theirs too; `KeyboardInterrupt` is the user's and goes through.

    A class and no generator: every model call and environment step passes one.

    Example:
        async with boundary("tool 'search'", seconds=5):
            content = await tool(query="…")
        # -> EpisodeError: tool 'search': TimeoutError: took longer than 5 s
    """

    __slots__ = ("limit", "seconds", "where")

    def __init__(self, where: str, seconds: float | None = None):
        self.where, self.seconds = where, seconds
        self.limit = None if seconds is None else asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        if self.limit is not None:
            await self.limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.limit is not None:
            try:
                await self.limit.__aexit__(kind, error, trace)
            except TimeoutError as expired:
                struck = getattr(expired.__cause__, "__notes__", [self.where])[0]
                whose = "" if struck == self.where else f"{self.where} "
                raise EpisodeError(struck, TimeoutError(f"{whose}took longer than {self.seconds:g} s")) from expired
        if isinstance(error, asyncio.CancelledError):
            error.add_note(self.where)  # so that an outer deadline can say where it struck
        elif isinstance(error, Exception | SystemExit) and not isinstance(error, EpisodeError | EpisodeOver):
            raise EpisodeError(self.where, error) from error  # those two are attributed already, or no failure


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
