"""Collective operations over the ranks of a learner. With one rank they do nothing.

Terms carry their share of the whole step's loss, so gradients are summed and never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from arborl.learner.distributed.rank_connections import prove_connections

T = TypeVar("T")

ORDER_TIMEOUT = timedelta(days=30)
"""Timeout of collective operations. Lost ranks are detected by heartbeats, and a rank may wait long for its next
call."""
BUCKET_SIZE = 2**25
"""Numbers that are reduced in one operation."""


class RankGroup:
    """The ranks over which trees are distributed.

    Args:
        group: their process group; None for a single process.
        session: the session key that all of them hold.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, session: str = ""):
        self.group, self.session = group, session
        self.count: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.count > 1

    def new_group(self) -> dist.ProcessGroup:
        """A second process group of the same ranks, for another thread."""
        made = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)
        assert made is not None
        prove_connections(made, self.session)
        return made

    def all_gather(self, value: T) -> list[T]:
        """The value of each rank, in order."""
        if not self.is_distributed:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value, self.group)
        return values  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """On rank 0 the value of each rank; on other ranks an empty list."""
        if not self.is_distributed:
            return [value]
        values: list[T | None] | None = [None] * self.count if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []  # type: ignore[return-value]

    def sum(self, value: float) -> float:
        """The sum over all ranks."""
        return float(sum(self.all_gather(value)))

    def any(self, value: bool) -> bool:
        """Whether it is true on some rank."""
        return any(self.all_gather(value))

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        if self.is_distributed:
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat, group=self.group)
                for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))


SINGLE_RANK = RankGroup()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device with at most `BUCKET_SIZE` numbers, or one larger tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        same = not bucket or (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not same or sum(one.numel() for one in bucket) + tensor.numel() > BUCKET_SIZE):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
