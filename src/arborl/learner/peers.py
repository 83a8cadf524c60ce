"""Several processes, each with its own trees: sums over all of them. Alone, these do nothing.

Terms carry their share of the whole step's loss, so gradients are summed and never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from arborl.learner.rank_connections import prove_connections

T = TypeVar("T")

PATIENT = timedelta(days=30)
"""What a rank waits for its next order: signs of life say that there is somebody to wait for."""
BUCKET = 2**25
"""Numbers that travel together."""


class Peers:
    """The processes among which trees are spread.

    Args:
        group: theirs; without one, there are no others.
        session: the key that all of them hold.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, session: str = ""):
        self.group, self.session = group, session
        self.count: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    @property
    def together(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    def second_group(self) -> dist.ProcessGroup:
        """Another group of the same processes, for a second thread of each."""
        made = dist.new_group(backend="gloo", timeout=PATIENT)
        assert made is not None
        prove_connections(made, self.session)
        return made

    def gather(self, mine: T) -> list[T]:
        """What each process has, in order of rank."""
        if not self.together:
            return [mine]
        found: list[T | None] = [None] * self.count
        dist.all_gather_object(found, mine, self.group)
        return found  # type: ignore[return-value]

    def collect(self, mine: T) -> list[T]:
        """In rank 0 what each process has; elsewhere nothing."""
        if not self.together:
            return [mine]
        found: list[T | None] | None = [None] * self.count if self.rank == 0 else None
        dist.gather_object(mine, found, dst=0, group=self.group)
        return found or []  # type: ignore[return-value]

    def total(self, mine: float) -> float:
        """The sum over all processes."""
        return float(sum(self.gather(mine)))

    def any(self, mine: bool) -> bool:
        """Whether it is so in some process."""
        return any(self.gather(mine))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all processes, in place."""
        if self.together:
            for some in _buckets(tensors):
                whole = torch.cat([tensor.reshape(-1) for tensor in some])
                dist.all_reduce(whole, group=self.group)
                for tensor, part in zip(some, whole.split([tensor.numel() for tensor in some]), strict=True):
                    tensor.copy_(part.view_as(tensor))


ALONE = Peers()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Some at a time, of one kind and together not larger than `BUCKET`, or one that is."""
    some: list[Tensor] = []
    for tensor in tensors:
        same = not some or (tensor.dtype, tensor.device) == (some[0].dtype, some[0].device)
        if some and (not same or sum(one.numel() for one in some) + tensor.numel() > BUCKET):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
