"""Sandbox: untrusted code in a process without access to files, network and other processes, within resource limits.

In reading order:

    sandbox.py           The best isolation level of this machine, and `Sandbox`, a process at that level
    sandbox_protocol.py  Limits, results, and the messages between host and sandboxed process
    sandbox_pool.py      A pool of started sandboxes
    fair_semaphore.py    A semaphore for threads and event loops, first come first served
    process_usage.py     Memory, processor time and files of a process tree, and its freezing
    guest_process/       The code of the sandboxed process: standard library only, started by path
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from arborl.sandbox.sandbox import (
    LEVELS,
    ActiveLevel,
    Level,
    Sandbox,
    SandboxError,
    active_level,
    allow_unsafe,
    best_level,
    try_level,
    unsafe_allowed,
)
from arborl.sandbox.sandbox_pool import POOLS, SandboxPool, sandbox_metrics
from arborl.sandbox.sandbox_protocol import SandboxLimits, SandboxResult

__all__ = [
    "LEVELS", "POOLS", "ActiveLevel", "Level", "Sandbox", "SandboxError", "SandboxLimits", "SandboxPool",
    "SandboxResult", "active_level", "allow_unsafe", "best_level", "run_code", "run_code_sync", "sandbox_metrics",
    "shared_pool", "try_level", "unsafe_allowed",
]  # fmt: skip

DEFAULT_LIMITS = SandboxLimits()


@functools.lru_cache(maxsize=8)
def shared_pool(limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxPool:
    """The process's pool for these limits."""
    return SandboxPool(limits)


async def run_code(
    code: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: SandboxLimits = DEFAULT_LIMITS
) -> SandboxResult:
    """Run Python in a new sandbox.

    Example:
        (await run_code("print(int(input()) * 2)", stdin="21")).stdout      # '42\\n'
    """
    return await shared_pool(limits).run(code, stdin, files)


def run_code_sync(
    code: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: SandboxLimits = DEFAULT_LIMITS
) -> SandboxResult:
    """As `run_code`, without an event loop."""
    return shared_pool(limits).run_sync(code, stdin, files)
