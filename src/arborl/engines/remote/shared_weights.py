"""Weights in shared memory for another process of this machine, overwritten at every update.

Where the system supports it the memory has no name in a file system, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64

TableRow = tuple[str, str, list[int], int]
"""Name, dtype, shape, offset in bytes."""


class SharedWeights:
    """Memory that another process may map."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("arborl-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # valid in other processes while this one lives
        else:
            descriptor, name = tempfile.mkstemp(prefix="arborl-weights-")  # readable by this user only
            self.path = Path(name)
        self.file, self.size = os.fdopen(descriptor, "r+b"), 0
        self.memory: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[TableRow]:
        """Copy the tensors, in `dtype` if given; returns their places."""
        table: list[TableRow] = []
        end = 0
        for name, tensor in tensors.items():
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            table.append((name, str(target).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * target.itemsize // ALIGNMENT) * ALIGNMENT
        memory = self._resize(max(end, ALIGNMENT))
        for (_, dtype_name, shape, begin), tensor in zip(table, tensors.values(), strict=True):
            if tensor.numel():
                view = torch.frombuffer(
                    memory, dtype=getattr(torch, dtype_name), count=tensor.numel(), offset=begin
                ).view(shape)
                view.copy_(tensor.detach())
                del view  # the memory cannot be closed while a view exists
        return table

    def _resize(self, size: int) -> mmap.mmap:
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
