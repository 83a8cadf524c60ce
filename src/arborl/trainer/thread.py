"""The learner's thread: while it computes, the event loop belongs to environments, tools and rewards."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class LearnerThread:
    """Runs functions, one at a time, always in the same thread.

    Example:
        metrics = await thread(learner.update, trees, terms, algorithm)
    """

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    async def __call__(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """What `work(*args)` returns. Who is cancelled meanwhile notices when it is done: an update is done, or not
        begun, and never half of each."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "arborl-learner", torch.set_num_threads, (torch.get_num_threads(),))
        context, loop, cancelled = contextvars.copy_context(), asyncio.get_running_loop(), False
        done: asyncio.Future[Any] = loop.run_in_executor(self.pool, lambda: context.run(work, *args, **more))
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                cancelled = True
        task = asyncio.current_task()
        if cancelled and task is not None:
            task.cancel()  # again: it is felt where there is next something to wait for
        return done.result()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
