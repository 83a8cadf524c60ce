"""GPU memory that is freed and later mapped again at the same address, so that recorded CUDA graphs stay valid.

The CUDA driver separates addresses from memory: a range of addresses is reserved once; memory is created, mapped into
it, and unmapped while the range stays reserved. torch has no API for it, so this module calls the driver
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

DEVICE_MEMORY, PINNED, READ_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2
"""Values of the driver's enumerations: location type, allocation type, access flag, error code."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class SleepableMemory:
    """A range of GPU memory whose contents are lost during sleep."""

    def __init__(self, size: int, device: torch.device):
        torch.zeros(1, device=device)  # creates the CUDA context and makes it current
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.device = device.index if device.index is not None else torch.cuda.current_device()
        self.properties = _Properties(type=PINNED, location=_Location(DEVICE_MEMORY, self.device))
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.properties), 0)
        self.size, self.requested_size = -(-size // unit.value) * unit.value, size
        self.address, self.handle = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)
        self.is_mapped = False
        self.wake_up()
        weakref.finalize(self, _free_range, self.driver, self.address.value, self.size).atexit = False

    def wake_up(self) -> None:
        """Map memory into the range; if the device has none, torch's allocator cache is emptied first."""
        if self.is_mapped:
            return
        try:
            self._create()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._create()
        access = _Access(_Location(DEVICE_MEMORY, self.device), READ_WRITE)
        self._call("cuMemMap", self.address, self.size, 0, self.handle, 0)
        self._call("cuMemSetAccess", self.address, self.size, ctypes.byref(access), 1)
        self._call("cuMemRelease", self.handle)  # the memory lives while it is mapped
        self.is_mapped = True

    def sleep(self) -> None:
        """Free the memory. The range must not be accessed until `wake_up`."""
        if self.is_mapped:
            torch.cuda.synchronize(self.device)
            self._call("cuMemUnmap", self.address, self.size)
            self.is_mapped = False

    def tensor(self) -> Tensor:
        """The range as bytes; the tensor keeps it alive."""
        return torch.as_tensor(_ByteArray(self), device=f"cuda:{self.device}")

    def _create(self) -> None:
        self._call("cuMemCreate", ctypes.byref(self.handle), self.size, ctypes.byref(self.properties), 0)

    def _call(self, name: str, *args: Any) -> None:
        wide = [ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args]
        code = getattr(self.driver, name)(*wide)
        if code == OUT_OF_MEMORY:
            raise torch.cuda.OutOfMemoryError(f"{name}: no {self.size / 2**30:.1f} GiB are free")
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


class _ByteArray:
    def __init__(self, memory: SleepableMemory):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.requested_size,), "typestr": "|u1", "data": (memory.address.value, False), "version": 2,
        }  # fmt: skip


def _free_range(driver: Any, address: int, size: int) -> None:
    driver.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_uint64(size))  # fails without effect where nothing is mapped
    driver.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_uint64(size))
