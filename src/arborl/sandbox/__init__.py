"""Sandbox: foreign code in a process of its own that can reach nothing and use little.

In reading order:

    sandbox.py   The sandbox: a Python process that can reach nothing
    level.py     Which isolation works on this machine: found by trying, best first
    process.py   One guest, seen from the host: started, given code, watched, ended
    protocol.py  What host and guest say to each other, read by a host that believes nothing before it is whole
    pool.py      Guests kept ready
    slots.py     A counter that threads and event loops wait for together
    limits.py    What a guest may use, and what became of a piece of code
    watch.py     How much a tree of processes uses
    inside/      What runs on the other side: standard library only, started by path, with an empty environment
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from arborl.sandbox.level import Found, allow_unsafe, best_level, level_in_force, try_level, unsafe_allowed
from arborl.sandbox.limits import Limits, Outcome
from arborl.sandbox.pool import POOLS, Pool, metrics
from arborl.sandbox.process import LEVELS, Level, SandboxError
from arborl.sandbox.sandbox import Sandbox

__all__ = [
    "LEVELS",
    "POOLS",
    "Found",
    "Level",
    "Limits",
    "Outcome",
    "Pool",
    "Sandbox",
    "SandboxError",
    "allow_unsafe",
    "best_level",
    "level_in_force",
    "metrics",
    "run_code",
    "run_code_sync",
    "shared_pool",
    "try_level",
    "unsafe_allowed",
]

DEFAULT = Limits()


@functools.lru_cache(maxsize=8)
def shared_pool(limits: Limits = DEFAULT) -> Pool:
    """The pool of this process for these limits; guests are kept ready from its first use on."""
    return Pool(limits)


async def run_code(
    code: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits = DEFAULT
) -> Outcome:
    """Run Python in a fresh sandbox.

    Example:
        (await run_code("print(int(input()) * 2)", stdin="21")).stdout      # '42\\n'
    """
    return await shared_pool(limits).run(code, stdin, files)


def run_code_sync(
    code: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits = DEFAULT
) -> Outcome:
    """As `run_code`, for callers without an event loop."""
    return shared_pool(limits).run_sync(code, stdin, files)
