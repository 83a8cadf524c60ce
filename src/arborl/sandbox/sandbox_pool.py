"""A pool of started sandboxes. Every lease has a new process, which ends with the lease.

Replacement resets variables, files, processes and patched modules; starting the next process overlaps with the lease.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from arborl.sandbox.fair_semaphore import FairSemaphore, WaitTimes
from arborl.sandbox.sandbox import Level, Sandbox, SandboxError
from arborl.sandbox.sandbox_protocol import SandboxLimits, SandboxResult

POOLS: weakref.WeakSet[SandboxPool] = weakref.WeakSet()


class SandboxPool:
    """Leases sandboxes.

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
        self.started = 0
        self._leases, self.runs = FairSemaphore(size), FairSemaphore(busy)
        """Limits of leases and of concurrent runs; the holder of a lease takes `runs` around each `run`."""
        self._ready: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._filling = False
        self._open = True
        POOLS.add(self)

    @property
    def waiting(self) -> int:
        return self._leases.waiting + self.runs.waiting

    @contextmanager
    def lease_sync(self) -> Iterator[Sandbox]:
        with self._leases, self._get() as sandbox:
            yield sandbox

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        sandbox = await self.acquire()
        try:
            yield sandbox
        finally:
            await asyncio.shield(self.release(sandbox))

    async def acquire(self) -> Sandbox:
        """A new sandbox, to be released. Prefer `lease`."""
        await self._leases.acquire()
        try:
            return await asyncio.to_thread(self._get)
        except BaseException:
            self._leases.release()
            raise

    async def release(self, sandbox: Sandbox) -> None:
        self._leases.release()
        await asyncio.to_thread(sandbox.close)

    async def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        async with self.runs, self.lease() as sandbox:
            return await sandbox.run(code, stdin, files)

    def run_sync(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        with self.runs, self.lease_sync() as sandbox:
            return sandbox.run_sync(code, stdin, files)

    def close(self) -> None:
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
    waits = sum((pool.runs.take_wait_times() for pool in list(POOLS)), WaitTimes())
    if not waits.count:
        return {}
    return {
        "sandbox/runs": float(waits.count),
        "sandbox/queue_seconds": waits.seconds / waits.count,
        "sandbox/queue_seconds_max": waits.longest,
    }
