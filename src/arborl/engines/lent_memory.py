"""Memory of a GPU that can be given back and taken again at the same address, so that recorded graphs go on with it.

The driver keeps addresses and memory apart: a range of addresses is reserved once, memory is created and mapped into
it, and may be unmapped and released while the range stays. torch has no call for this; it is asked of the driver itself
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

DEVICE_MEMORY, PINNED, READ_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2
"""Of the driver's enumerations: a location that is a device, an allocation that stays, access, and what fails."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class LentMemory:
    """A number of bytes on a GPU, whose contents are lost while they are given back.

    Example:
        memory = LentMemory(2**30, torch.device("cuda", 0))
        cache = memory.tensor().view(torch.bfloat16)
        memory.give_back()
        ...                 # whoever needs it
        memory.take()       # the tensor's memory is there again, at the same address
    """

    def __init__(self, size: int, device: torch.device):
        torch.zeros(1, device=device)  # the device's context is there, and is the current one
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self.own = _Properties(type=PINNED, location=_Location(DEVICE_MEMORY, self.device))
        unit = ctypes.c_size_t()
        self._ask("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.own), 0)
        self.size, self.wanted = -(-size // unit.value) * unit.value, size
        self.address, self.handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._ask("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)
        self.here = False
        self.take()
        weakref.finalize(self, _let_go, self.driver, self.address.value, self.size).atexit = False

    def take(self) -> None:
        """Memory for the whole range. What torch keeps for later is given up for it where there is no other."""
        if self.here:
            return
        try:
            self._create()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._create()
        access = _Access(_Location(DEVICE_MEMORY, self.device), READ_WRITE)
        self._ask("cuMemMap", self.address, self.size, 0, self.handle, 0)
        self._ask("cuMemSetAccess", self.address, self.size, ctypes.byref(access), 1)
        self._ask("cuMemRelease", self.handle)  # it lives while it is mapped
        self.here = True

    def give_back(self) -> None:
        """The range is empty; nobody may look at it until `take`."""
        if self.here:
            torch.cuda.synchronize(self.device)
            self._ask("cuMemUnmap", self.address, self.size)
            self.here = False

    def tensor(self) -> Tensor:
        """All of it, as bytes. It keeps the memory alive."""
        return torch.as_tensor(_Bytes(self), device=f"cuda:{self.device}")

    def _create(self) -> None:
        self._ask("cuMemCreate", ctypes.byref(self.handle), self.size, ctypes.byref(self.own), 0)

    def _ask(self, name: str, *given: Any) -> None:
        wide = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in given]
        code = getattr(self.driver, name)(*wide)
        if code == OUT_OF_MEMORY:
            raise torch.cuda.OutOfMemoryError(f"{name}: no {self.size / 2**30:.1f} GiB are free")
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


class _Bytes:
    """What torch makes a tensor of."""

    def __init__(self, memory: LentMemory):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.wanted,), "typestr": "|u1", "data": (memory.address.value, False), "version": 2,
        }  # fmt: skip


def _let_go(driver: Any, address: int, size: int) -> None:
    driver.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_uint64(size))  # where it is mapped
    driver.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_uint64(size))
