"""A pool of started sandboxes. Every lease has a new process, which ends with the lease.

Replacement resets variables, files, processes and patched modules; starting the next process overlaps with the lease.
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

from arborl.sandbox.fair_semaphore import FairSemaphore, WaitTimes
from arborl.sandbox.sandbox import Sandbox
from arborl.sandbox.sandbox_process import Level, SandboxError
from arborl.sandbox.sandbox_protocol import SandboxLimits, SandboxResult

T = TypeVar("T")
POOLS: weakref.WeakSet[SandboxPool] = weakref.WeakSet()  # all pools of this process


class SandboxPool:
    """Leases sandboxes.

    Example:
        pool = Pool(Limits(wall_seconds=2), spare=2)
        async with pool.lease() as box:
            await box.run("x = 1")
        (await pool.run("print(6 * 7)")).stdout          # a lease for one run

    Args:
        limits, level, packages: arguments of `Sandbox`.
        size: maximum number of leases; further ones wait. An idle sandbox uses about ten megabytes.
        busy: maximum number of concurrent runs; by default four per core.
        spare: sandboxes started in advance.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        size: int = 128,
        busy: int | None = None,
        spare: int = 2,
        level: Level | None = None,
        packages: Sequence[str | Path] = (),
    ):
        busy = busy if busy is not None else 4 * (os.cpu_count() or 1)
        if size < 1 or busy < 1 or spare < 0:
            raise ValueError(f"size={size}, busy={busy}, spare={spare}: give at least 1, 1 and 0")
        self.limits, self.level, self.packages = limits or SandboxLimits(), level, packages
        self.size, self.busy, self.spare = size, busy, min(spare, size)
        self.started = 0  # number of started sandboxes
        self._leases, self._runs = FairSemaphore(size), FairSemaphore(busy)
        self._ready: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._filling = False
        self._open = True
        POOLS.add(self)

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a lease or a run."""
        return self._leases.waiting + self._runs.waiting

    def take_wait_times(self) -> WaitTimes:
        """Wait times of runs since the last call."""
        return self._runs.take_wait_times()

    @contextmanager
    def lease_sync(self) -> Iterator[Sandbox]:
        """A new sandbox for the block."""
        self._leases.acquire_sync()
        try:
            sandbox = self._get()
            try:
                yield sandbox
            finally:
                sandbox.close()
        finally:
            self._leases.release()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """As `lease_sync`, without blocking the event loop."""
        sandbox = await self.acquire()
        try:
            yield sandbox
        finally:
            await asyncio.shield(self.release(sandbox))

    async def acquire(self) -> Sandbox:
        """A new sandbox, to be released. Prefer `lease`."""
        await self._leases.acquire()
        try:
            return await _in_executor(self._get)
        except BaseException:
            self._leases.release()
            raise

    async def release(self, sandbox: Sandbox) -> None:
        """End a lease."""
        self._leases.release()
        await _in_executor(sandbox.close)

    @asynccontextmanager
    async def run_slot(self) -> AsyncIterator[None]:
        """Wait for one of the concurrent runs; for the holder of a lease, around each `run`."""
        await self._runs.acquire()
        try:
            yield
        finally:
            self._runs.release()

    async def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Run code in a new sandbox."""
        async with self.run_slot(), self.lease() as sandbox:
            return await sandbox.run(code, stdin, files)

    def run_sync(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """As `run`, without an event loop."""
        self._runs.acquire_sync()
        try:
            with self.lease_sync() as sandbox:
                return sandbox.run_sync(code, stdin, files)
        finally:
            self._runs.release()

    def close(self) -> None:
        """End the idle sandboxes. Running leases continue."""
        with self._lock:
            self._open = False
            ready = list(self._ready)
            self._ready.clear()
        for sandbox in ready:
            sandbox.close()

    def _get(self) -> Sandbox:
        sandbox = None
        with self._lock:
            if not self._open:
                raise SandboxError("the pool is closed")
            while self._ready and (sandbox is None or not sandbox.alive):
                sandbox = self._ready.popleft()
        self._fill()
        return sandbox if sandbox is not None and sandbox.alive else self._make()

    def _make(self) -> Sandbox:
        sandbox = Sandbox(self.limits, self.level, self.packages)
        self.started += 1
        return sandbox

    def _fill(self) -> None:
        """Start spare sandboxes in a thread; one such thread at a time."""
        with self._lock:
            if self._filling or len(self._ready) >= self.spare:
                return
            self._filling = True
        threading.Thread(target=self._start_spares, name="arborl-sandbox-pool", daemon=True).start()

    def _start_spares(self) -> None:
        try:
            while self._open and len(self._ready) < self.spare:
                sandbox = self._make()
                with self._lock:
                    if self._open:
                        self._ready.append(sandbox)
                        continue
                sandbox.close()
        except (OSError, SandboxError):
            pass  # the next lease raises the error
        finally:
            self._filling = False


def sandbox_metrics() -> dict[str, float]:
    """Number of runs and their wait times in all pools since the last call; empty without runs."""
    waits = sum((pool.take_wait_times() for pool in list(POOLS)), WaitTimes())
    if not waits.count:
        return {}
    return {
        "sandbox/runs": float(waits.count),
        "sandbox/queue_seconds": waits.seconds / waits.count,
        "sandbox/queue_seconds_max": waits.longest,
    }


async def _in_executor(function: Callable[[], T]) -> T:
    """Run a short function in asyncio's thread pool."""
    return await asyncio.get_running_loop().run_in_executor(None, function)
