"""Weights on their way to a process of this machine: one piece of shared memory, written over at every update.

It has no name in a file system where that can be had: whoever is killed leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 64

Row = tuple[str, str, list[int], int]
"""Name, dtype, shape, where it begins."""


class SharedMemory:
    """Memory that another process may map.

    Example:
        memory = SharedMemory()
        table = memory.write(model.state_dict())      # the other side reads memory.path by the table
        memory.close()
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("arborl-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # as others see it, while this process lives
        else:
            descriptor, name = tempfile.mkstemp(prefix="arborl-weights-")  # nobody else may read it
            self.path = Path(name)
        self.file, self.size = os.fdopen(descriptor, "r+b"), 0
        self.memory: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[Row]:
        """Copy them in, in `dtype` where it is given; returns what lies where."""
        table: list[Row] = []
        end = 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            table.append((name, str(kind).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * kind.itemsize // ALIGNED) * ALIGNED
        memory = self._of_size(max(end, ALIGNED))
        for (_, kind_name, shape, begin), tensor in zip(table, tensors.values(), strict=True):
            if tensor.numel():
                there = torch.frombuffer(
                    memory, dtype=getattr(torch, kind_name), count=tensor.numel(), offset=begin
                ).view(shape)
                there.copy_(tensor.detach())
                del there  # or the memory could not be closed
        return table

    def _of_size(self, size: int) -> mmap.mmap:
        if self.memory is None or self.size < size:
            if self.memory is not None:
                self.memory.close()
            self.file.truncate(size)
            self.memory, self.size = mmap.mmap(self.file.fileno(), size), size
        return self.memory

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self.file.close()
        if not hasattr(os, "memfd_create"):
            self.path.unlink(missing_ok=True)
