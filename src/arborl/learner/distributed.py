"""Several processes, each with its own trees: sums over all of them. In one process these do nothing.

Terms carry their share of the whole step's loss, so gradients are summed and never averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def together() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Which of the processes this is."""
    return dist.get_rank() if together() else 0


def add_up(tensors: Sequence[Tensor]) -> None:
    """Each tensor becomes its sum over all processes, in place."""
    if together():
        for waiting in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            waiting.wait()


def gather(mine: T) -> list[T]:
    """What each process has, in order of rank."""
    if not together():
        return [mine]
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found  # type: ignore[return-value]


def total(mine: float) -> float:
    """The sum over all processes."""
    return float(sum(gather(mine)))
