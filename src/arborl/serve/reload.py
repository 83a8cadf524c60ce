"""Following a run that is being trained: each new checkpoint is served as soon as it is whole.

Requests that are under way lose nothing: the engine reads what they have so far with the new weights, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from arborl import checkpoint
from arborl.errors import ArborError
from arborl.serve.speaker import Speaker

log = logging.getLogger(__name__)


class Follower:
    """Looks for checkpoints and loads them.

    Args:
        speaker: what serves.
        root: the run's folder of checkpoints.
        read: the weights in a model's folder.
        seconds: between two looks.
    """

    def __init__(self, speaker: Speaker, root: Path, read: Callable[[Path], Mapping[str, Any]], seconds: float = 2.0):
        self.speaker, self.root, self.read, self.seconds = speaker, root, read, seconds
        self._bad: set[tuple[Path, float]] = set()
        """Checkpoints that could not be used, as they were then: they are told of once."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self.seconds)
            await self.look()

    async def look(self) -> bool:
        """Serve the newest checkpoint, if it is newer than what is served; whether it was. What goes wrong leaves the
        weights that there are."""
        newest = next(reversed(await asyncio.to_thread(checkpoint.complete_checkpoints, self.root)), None)
        step = int(newest.name.removeprefix("step-")) if newest is not None else -1
        if newest is None or step <= self.speaker.version:
            return False
        try:
            mark = newest, newest.stat().st_mtime
            if mark in self._bad:
                return False
            weights = await asyncio.to_thread(self.read, newest / "model")
            await self.speaker.engine.load(weights, step)
        except (ArborError, OSError, KeyError, RuntimeError) as error:  # pruned meanwhile, damaged, or of another shape
            self._bad.add(mark)
            log.warning("%s is not served: %s", newest, error)
            return False
        self.speaker.version = step
        log.info("serving %s", newest)
        return True
