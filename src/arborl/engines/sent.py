"""What a step on a GPU is sent and gives back: how many rows it has, and where each number lies.

Kernels are compiled for whether a pointer is a multiple of 16 bytes. So every vector that is sent begins at one, in any
bucket and at any step: what has been compiled once serves all of them.

R rows, S sequences, M bundles of at most B rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.engines.shared_prefix import room_for

BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *range(320, 1025, 64),
)
"""Rows a graph may have; a step takes the next larger one."""


def reachable(buckets: Sequence[int], tokens: int) -> list[int]:
    """Of the ordered `buckets`, those that a step of at most so many tokens may take."""
    return [bucket for bucket, before in zip(buckets, [0, *buckets], strict=False) if before < tokens]


def aligned(count: int) -> int:
    """As many numbers of four bytes, or more, so that what comes after them begins at a multiple of 16."""
    return -(-count // 4) * 4


def sent_at_once(columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each as int32 on the device, in one transfer."""
    ends = list(accumulate((aligned(len(column)) for column in columns), initial=0))
    flat = np.zeros(ends[-1], dtype=np.int32)
    for begin, column in zip(ends, columns, strict=False):
        flat[begin : begin + len(column)] = column
    there = torch.from_numpy(flat).to(device)
    return [there[begin : begin + len(column)] for begin, column in zip(ends, columns, strict=False)]


class Sent(NamedTuple):
    """What the host sends for a step of R rows, parts of one flat array; M bundles of at most B rows."""

    fed: Any
    position: Any
    slot: Any
    sequence: Any
    """`[R]`, as the ones before it: which line of `table` is the row's."""
    own: Any
    """`[R]`: pages at a row's beginning that its bundle looks at."""
    greedy: Any
    """`[S]`, for the sequences that get a token."""
    last: Any
    """`[S]`: the row that each of those is sampled from."""
    shared: Any
    """`[M]`: pages that the rows of a bundle share; 0 where there is no bundle."""
    member: Any
    """`[M, B]`: its rows."""
    table: Any
    """`[S, pages]`."""

    @staticmethod
    def shapes(rows: int, sequences: int, members: int, pages: int) -> list[tuple[int, ...]]:
        bundles = room_for(rows)
        return [*[(rows,)] * 5, *[(sequences,)] * 2, (bundles,), (bundles, members), (sequences, pages)]

    @classmethod
    def size(cls, rows: int, sequences: int, members: int, pages: int) -> int:
        return sum(aligned(math.prod(shape)) for shape in cls.shapes(rows, sequences, members, pages))

    @classmethod
    def of(cls, flat: Any, rows: int, sequences: int, members: int, pages: int) -> Sent:
        shapes = cls.shapes(rows, sequences, members, pages)
        begins = accumulate((aligned(math.prod(shape)) for shape in shapes), initial=0)
        return cls(*(flat[a : a + math.prod(shape)].reshape(shape) for a, shape in zip(begins, shapes, strict=False)))


@dataclass(slots=True)
class Buffers:
    """Fixed memory that the host's numbers for a step arrive in, and its outcome leaves from; each with two stations on
    the host's side, used in turn, so that one can be filled while the other travels."""

    whole: Tensor
    """int32, on the device; see `Sent`."""
    real: Tensor
    """`[2, S]`, float64: temperatures, and chances."""
    token: Tensor
    logprob: Tensor
    sent: list[tuple[Tensor, Tensor]]
    taken: list[tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, size: int, sequences: int, device: torch.device) -> Buffers:
        def pair(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
            return [tuple(torch.empty_like(x, device="cpu").pin_memory() for x in (first, second)) for _ in range(2)]  # type: ignore[misc]

        whole = torch.zeros(size, dtype=torch.int32, device=device)
        real = torch.ones(2, aligned(sequences), dtype=torch.float64, device=device)
        token = torch.zeros(sequences, dtype=torch.int64, device=device)
        logprob = torch.zeros(sequences, dtype=torch.float32, device=device)
        return cls(whole, real, token, logprob, pair(whole, real), pair(token, logprob))
