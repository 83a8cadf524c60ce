"""The learner's thread: while it computes, the event loop serves environments, tools, rewards and the engine."""

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
    """Runs functions one at a time, always in the same thread."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function. A cancellation takes effect when it has returned: an update is never half done."""
        return await self._run(torch.get_num_threads(), lambda: function(*args, **kwargs))

    async def run_beside_engine(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same while the event loop's thread computes too: each gets half of torch's threads. Two computations that
        both use all cores are slower than one after the other."""
        num_threads = torch.get_num_threads()
        num_learner_threads = max(1, num_threads // 2)
        torch.set_num_threads(max(1, num_threads - num_learner_threads))
        try:
            return await self._run(num_learner_threads, lambda: function(*args, **kwargs))
        finally:
            torch.set_num_threads(num_threads)

    async def _run(self, num_threads: int, function: Callable[[], T]) -> T:
        # A CPU computes denormal numbers (below 1e-38) a hundred times slower, and a diverged or very certain model
        # has millions of them in its gradients. In this thread they are flushed to zero.
        self.pool = self.pool or ThreadPoolExecutor(1, "arborl-learner", torch.set_flush_denormal, (True,))
        context, loop, is_cancelled = contextvars.copy_context(), asyncio.get_running_loop(), False

        def run_in_thread() -> T:
            torch.set_num_threads(num_threads)  # per thread: a new thread does not inherit it
            return context.run(function)

        future: asyncio.Future[Any] = loop.run_in_executor(self.pool, run_in_thread)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                is_cancelled = True
        task = asyncio.current_task()
        if is_cancelled and task is not None:
            task.cancel()  # again: it takes effect at the next await
        return future.result()  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
