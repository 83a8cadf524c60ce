"""The learner's thread: while it computes, the event loop belongs to environments, tools, rewards and, where it has
weights of its own, the engine."""

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
        metrics = await thread.beside(learner.update, trees, terms, algorithm)      # with half of torch's threads
    """

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None

    async def __call__(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """What `work(*args)` returns. Who is cancelled meanwhile notices when it is done: an update is done, or not
        begun, and never half of each."""
        return await self._run(torch.get_num_threads(), lambda: work(*args, **more))

    async def beside(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """The same while the event loop's thread computes too: each has half of torch's threads, for two that both
        want all cores are slower than one after the other."""
        threads = torch.get_num_threads()
        mine = max(1, threads // 2)
        torch.set_num_threads(max(1, threads - mine))
        try:
            return await self._run(mine, lambda: work(*args, **more))
        finally:
            torch.set_num_threads(threads)

    async def _run(self, threads: int, work: Callable[[], T]) -> T:
        # A processor takes a hundred times as long for a number below 1e-38 as for any other, and a model that is
        # broken or very sure has millions of them in its gradients: here they are zero, and in no thread of others.
        self.pool = self.pool or ThreadPoolExecutor(1, "arborl-learner", torch.set_flush_denormal, (True,))
        context, loop, cancelled = contextvars.copy_context(), asyncio.get_running_loop(), False

        def run() -> T:
            torch.set_num_threads(threads)  # of this thread; another's number is not inherited
            return context.run(work)

        done: asyncio.Future[Any] = loop.run_in_executor(self.pool, run)
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
