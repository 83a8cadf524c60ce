"""Guests kept ready: a lease is an interpreter nobody has used, and its end is the end of that interpreter.

Reset by replacement. Whatever a reset inside a guest could forget (variables, files, processes, patched modules) is
gone with the process, and making the next one overlaps with the work of this one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from arborl.sandbox.limits import Limits, Outcome
from arborl.sandbox.process import Level, SandboxError
from arborl.sandbox.sandbox import Sandbox
from arborl.sandbox.slots import Slots, Waits

T = TypeVar("T")
POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
"""All of this process."""


class Pool:
    """Leases sandboxes.

    Example:
        pool = Pool(Limits(wall_seconds=2), spare=2)
        async with pool.lease() as box:
            await box.run("x = 1")
        (await pool.run("print(6 * 7)")).stdout          # a lease for one piece of code

    Args:
        limits, level, packages: as of `Sandbox`.
        size: most leases at a time; further ones wait. An idle guest costs some ten megabytes and no time.
        busy: most that run code at a time; by default four a core. More would only make each other late.
        spare: guests started ahead.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        size: int = 128,
        busy: int | None = None,
        spare: int = 2,
        level: Level | None = None,
        packages: Sequence[str | Path] = (),
    ):
        busy = busy if busy is not None else 4 * (os.cpu_count() or 1)
        if size < 1 or busy < 1 or spare < 0:
            raise ValueError(f"size={size}, busy={busy}, spare={spare}: give at least 1, 1 and 0")
        self.limits, self.level, self.packages = limits or Limits(), level, packages
        self.size, self.busy, self.spare = size, busy, min(spare, size)
        self.started = 0
        """Guests made so far."""
        self._leases, self._turns = Slots(size), Slots(busy)
        self._ready: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._filling = False
        self._open = True
        POOLS.add(self)

    @property
    def waiting(self) -> int:
        """How many wait for a lease or for their turn."""
        return self._leases.waiting + self._turns.waiting

    def waits(self) -> Waits:
        """What the pieces of code run since the last call had waited for their turn."""
        return self._turns.waits()

    @contextmanager
    def lease_sync(self) -> Iterator[Sandbox]:
        """A fresh sandbox for the length of the block."""
        self._leases.take_sync()
        try:
            box = self._take()
            try:
                yield box
            finally:
                box.close()
        finally:
            self._leases.give()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """As `lease_sync`; the waiting is the event loop's."""
        box = await self.take()
        try:
            yield box
        finally:
            await asyncio.shield(self.give(box))

    async def take(self) -> Sandbox:
        """A fresh sandbox, to be given back. A lease whose end is no block's: `lease` is the safer form."""
        await self._leases.take()
        try:
            return await _beside(self._take)
        except BaseException:
            self._leases.give()
            raise

    async def give(self, box: Sandbox) -> None:
        """The end of a lease."""
        self._leases.give()
        await _beside(box.close)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One of those that run code; for the holder of a lease, around each `run`."""
        await self._turns.take()
        try:
            yield
        finally:
            self._turns.give()

    async def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """One piece of code in a sandbox of its own."""
        async with self.turn(), self.lease() as box:
            return await box.run(code, stdin, files)

    def run_sync(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """As `run`, for callers without an event loop."""
        self._turns.take_sync()
        try:
            with self.lease_sync() as box:
                return box.run_sync(code, stdin, files)
        finally:
            self._turns.give()

    def close(self) -> None:
        """End the guests that nobody leased. Leases under way end by themselves."""
        with self._lock:
            self._open = False
            ready = list(self._ready)
            self._ready.clear()
        for box in ready:
            box.close()

    def _take(self) -> Sandbox:
        box = None
        with self._lock:
            if not self._open:
                raise SandboxError("the pool is closed")
            while self._ready and (box is None or not box.alive):
                box = self._ready.popleft()
        self._fill()
        return box if box is not None and box.alive else self._make()

    def _make(self) -> Sandbox:
        box = Sandbox(self.limits, self.level, self.packages)
        self.started += 1
        return box

    def _fill(self) -> None:
        """Start spare guests in a thread of their own; one such thread at a time."""
        with self._lock:
            if self._filling or len(self._ready) >= self.spare:
                return
            self._filling = True
        threading.Thread(target=self._filler, name="arborl-sandbox-pool", daemon=True).start()

    def _filler(self) -> None:
        try:
            while self._open and len(self._ready) < self.spare:
                box = self._make()
                with self._lock:
                    if self._open:
                        self._ready.append(box)
                        continue
                box.close()
        except (OSError, SandboxError):
            pass  # who asks next is told why
        finally:
            self._filling = False


def metrics() -> dict[str, float]:
    """Of all pools since the last call: pieces of code run, and what they waited for their turn. Empty without any."""
    waits = sum((pool.waits() for pool in list(POOLS)), Waits())
    if not waits.count:
        return {}
    return {
        "sandbox/runs": float(waits.count),
        "sandbox/queue_seconds": waits.seconds / waits.count,
        "sandbox/queue_seconds_max": waits.longest,
    }


async def _beside(function: Callable[[], T]) -> T:
    """`function()` in a thread of asyncio's; none of those here takes long."""
    return await asyncio.get_running_loop().run_in_executor(None, function)
