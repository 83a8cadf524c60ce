"""Memory layout of the inputs and outputs of a GPU step.

Triton compiles a kernel separately for pointers that are multiples of 16 bytes. Every vector therefore begins at such a
multiple, in any bucket and at any step, and one compilation serves all of them.

R rows, S sequences, M prefix groups of at most B rows.
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

from arborl.engines.local.shared_prefix import max_groups

BUCKETS = (*(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256), *range(320, 1025, 64))
"""Numbers of rows of CUDA graphs; a step uses the next larger one."""


def reachable_buckets(buckets: Sequence[int], tokens: int) -> list[int]:
    """Those of the ordered `buckets` that steps of at most so many tokens use."""
    return [bucket for bucket, before in zip(buckets, [0, *buckets], strict=False) if before < tokens]


def aligned_size(count: int) -> int:
    """`count` rounded up so that int32 values behind it begin at a multiple of 16 bytes."""
    return -(-count // 4) * 4


def copy_to_device(columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each column as int32 on the device, in one transfer."""
    ends = list(accumulate((aligned_size(len(column)) for column in columns), initial=0))
    flat = np.zeros(ends[-1], dtype=np.int32)
    for begin, column in zip(ends, columns, strict=False):
        flat[begin : begin + len(column)] = column
    copied = torch.from_numpy(flat).to(device)
    return [copied[begin : begin + len(column)] for begin, column in zip(ends, columns, strict=False)]


class StepInputs(NamedTuple):
    """Inputs of a step of R rows, views of one flat array."""

    tokens: Any
    position: Any
    slot: Any
    sequence: Any
    """`[R]`, as the ones before it: the row of `table`."""
    shared: Any
    """`[R]`: blocks at a row's start that its prefix group covers."""
    greedy: Any
    last: Any
    """`[S]`: the row that each is sampled from."""
    group_blocks: Any
    """`[M]`: shared blocks of a prefix group; 0 where there is none."""
    group_rows: Any
    """`[M, B]`: rows of the group."""
    table: Any

    @staticmethod
    def shapes(rows: int, sequences: int, members: int, num_blocks: int) -> list[tuple[int, ...]]:
        groups = max_groups(rows)
        return [*[(rows,)] * 5, *[(sequences,)] * 2, (groups,), (groups, members), (sequences, num_blocks)]

    @classmethod
    def size(cls, rows: int, sequences: int, members: int, num_blocks: int) -> int:
        return sum(aligned_size(math.prod(shape)) for shape in cls.shapes(rows, sequences, members, num_blocks))

    @classmethod
    def of(cls, flat: Any, rows: int, sequences: int, members: int, num_blocks: int) -> StepInputs:
        shapes = cls.shapes(rows, sequences, members, num_blocks)
        begins = accumulate((aligned_size(math.prod(shape)) for shape in shapes), initial=0)
        return cls(*(flat[a : a + math.prod(shape)].reshape(shape) for a, shape in zip(begins, shapes, strict=False)))


@dataclass(slots=True)
class StepBuffers:
    """Fixed device memory of inputs and outputs, each with two pinned host buffers used alternately: one is filled
    while the other is copied."""

    inputs: Tensor
    """int32, on the device; see `StepInputs`."""
    floats: Tensor
    """`[2, S]`, float64: temperatures and uniform numbers."""
    token: Tensor
    logprob: Tensor
    host_inputs: list[tuple[Tensor, Tensor]]
    host_outputs: list[tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, size: int, sequences: int, device: torch.device) -> StepBuffers:
        def pair(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
            return [tuple(torch.empty_like(x, device="cpu").pin_memory() for x in (first, second)) for _ in range(2)]  # type: ignore[misc]

        inputs = torch.zeros(size, dtype=torch.int32, device=device)
        floats = torch.ones(2, aligned_size(sequences), dtype=torch.float64, device=device)
        token = torch.zeros(sequences, dtype=torch.int64, device=device)
        logprob = torch.zeros(sequences, dtype=torch.float32, device=device)
        return cls(inputs, floats, token, logprob, pair(inputs, floats), pair(token, logprob))
