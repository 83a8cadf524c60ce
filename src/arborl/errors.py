"""What can go wrong, and where it is caught.

Three families. `ConfigError` ends a run before anything starts, with one line that says where, what and what to write
instead. An `EpisodeError` costs one episode: `boundary()` attributes it, once, to the border it crossed, and the runner
turns it into a `Failure`. Everything else is a defect and propagates.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class ArborError(Exception):
    """Root of everything Arbor raises on purpose."""


class ConfigError(ArborError):
    """The run as described cannot start."""


class UnknownName(ConfigError):
    """A part was asked for by a name nobody has."""


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


@asynccontextmanager
async def boundary(where: str, seconds: float | None = None) -> AsyncIterator[None]:
    """Whatever fails inside belongs to `where`; with `seconds`, so does taking longer than that.

    Example:
        async with boundary("tool 'search'", seconds=5):
            content = await tool(query="…")
        # -> EpisodeError: tool 'search': TimeoutError: took longer than 5 s
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except (EpisodeError, EpisodeOver):  # already attributed, or not a failure
        raise
    except asyncio.CancelledError as cancelled:
        cancelled.add_note(where)  # so that an outer deadline can say where it struck
        raise
    except TimeoutError as error:
        if limit.expired():
            struck = getattr(error.__cause__, "__notes__", [where])[0]
            late = TimeoutError(f"{'' if struck == where else where + ' '}took longer than {seconds:g} s")
            raise EpisodeError(struck, late) from error
        raise EpisodeError(where, error) from error
    except Exception as error:
        raise EpisodeError(where, error) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
