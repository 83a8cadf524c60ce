"""Which call of an episode is which, when several are asked at once: their chance and their order.

An agent is one program, whose calls come one after the other; it may start others beside itself (`asyncio.gather`, a
`TaskGroup`), and these ask whenever their tools have answered. Nothing recorded may depend on the clock. So the agent's
own calls are numbered; those of a task it started draw by what they ask, and by how often that was asked before. And in
the episode, the calls of a task stand together, behind the agent's last call before them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from arborl.seeds import derive


class Place(NamedTuple):
    """Where a call stands among the others of its episode."""

    turn: int
    """Of the agent, when it was asked."""
    after: int
    """How many calls the agent itself had asked; its own count themselves."""
    task: int
    """0 for the agent itself; those it started are counted as each asks for the first time."""
    number: int
    """Among the calls of that task."""


class Asking:
    """Numbers the calls of an episode as they are asked, before anything is waited for.

    A call that fails or is cancelled keeps its number, so the others' stay what they are.

    Args:
        seed: of the episode.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.agent = _task()
        self.own = 0
        self.tasks: dict[Any, int] = {}
        self.counts: Counter[int] = Counter()
        self.asked: Counter[bytes] = Counter()

    def next(self, prompt: Sequence[int], turn: int) -> tuple[int, Place]:
        """The seed and the place of the call that is asked now."""
        task = _task()
        if task is self.agent:
            self.own += 1
            return derive(self.seed, "sampling", self.own - 1), Place(turn, self.own, 0, 0)
        rank = self.tasks.setdefault(task, len(self.tasks) + 1)
        self.counts[rank] += 1
        content = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        self.asked[content] += 1
        seed = derive(self.seed, "sampling", content.hex(), self.asked[content])
        return seed, Place(turn, self.own, rank, self.counts[rank])


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
