"""Use of CPU, memory and GPU, one value per step.

Read from `/proc` and from NVIDIA's management library, without further packages. What a system does not provide is left
out.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from arborl.cores import available_cores
from arborl.types import Metrics

GIB = 2**30
PROC = Path("/proc")
UTILIZATION_SAMPLES = 1
"""NVML_GPU_UTILIZATION_SAMPLES"""


class SystemUsage:
    """CPU, memory and GPU use of this process and of the machine. Shares are means since the previous call."""

    def __init__(self, proc: Path = PROC):
        self.proc = proc
        self._gpu: GpuUtilization | None = None
        self._process = (time.perf_counter(), time.process_time())
        self._machine = _cpu_ticks(proc)

    def metrics(self) -> Metrics:
        metrics = self._cpu() | dict(_memory(self.proc))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            metrics |= self._gpu_metrics()
        return metrics

    def _cpu(self) -> Metrics:
        (wall, cpu), self._process = self._process, (time.perf_counter(), time.process_time())
        elapsed = max(self._process[0] - wall, 1e-9)
        metrics = {"system/process_cpu": min((self._process[1] - cpu) / (elapsed * available_cores()), 1.0)}
        before, self._machine = self._machine, _cpu_ticks(self.proc)
        if before is not None and self._machine is not None and (total := self._machine[1] - before[1]) > 0:
            metrics["system/machine_cpu"] = min(max((self._machine[0] - before[0]) / total, 0.0), 1.0)
        return metrics

    def _gpu_metrics(self) -> Metrics:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        metrics = {
            "system/gpu_memory_gib": (total - free) / GIB,
            "system/gpu_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
        }
        if self._gpu is None:
            self._gpu = GpuUtilization(str(torch.cuda.get_device_properties(device).uuid))
        share = self._gpu.mean()
        return metrics if share is None else metrics | {"system/gpu_utilization": share}


def _cpu_ticks(proc: Path) -> tuple[int, int] | None:
    """Busy and total ticks of all cores since the machine started."""
    try:
        words = (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]  # user nice system idle iowait irq softirq steal
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    except (OSError, ValueError, IndexError):
        return None


def _memory(proc: Path) -> Iterator[tuple[str, float]]:
    with suppress(OSError, ValueError, IndexError):
        pages = int((proc / "self" / "statm").read_text(encoding="ascii").split()[1])
        yield "system/process_memory_gib", pages * os.sysconf("SC_PAGE_SIZE") / GIB
    with suppress(OSError, ValueError, IndexError, KeyError):
        lines = (line.split() for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
        kib = {words[0]: int(words[1]) for words in lines}
        yield "system/machine_memory_gib", (kib["MemTotal:"] - kib["MemAvailable:"]) * 1024 / GIB


class _Sample(ctypes.Structure):
    """nvmlSample_t; the value is an unsigned int."""

    _fields_ = (("time", ctypes.c_ulonglong), ("value", ctypes.c_uint), ("_rest", ctypes.c_uint))


class GpuUtilization:
    """Share of time in which kernels ran on a GPU, from NVIDIA's management library."""

    def __init__(self, uuid: str, library: str = "libnvidia-ml.so.1"):
        self._handle = ctypes.c_void_p()
        self._last = 0
        self._nvml: ctypes.CDLL | None = None
        with suppress(OSError, AttributeError):
            nvml = ctypes.CDLL(library)
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0:
                self._nvml = nvml

    def mean(self) -> float | None:
        """The mean of the driver's samples since the previous call; None if there are none."""
        if self._nvml is None:
            return None
        kind, count = ctypes.c_int(), ctypes.c_uint(0)
        samples = self._read(kind, count, None) or self._read(kind, count, (_Sample * max(count.value, 1))())
        values = [one.value for one in samples if one.time > self._last]
        self._last = max((one.time for one in samples), default=self._last)
        return sum(values) / len(values) / 100 if values else None

    def _read(self, kind: ctypes.c_int, count: ctypes.c_uint, buffer: ctypes.Array[_Sample] | None) -> list[_Sample]:
        assert self._nvml is not None
        status = self._nvml.nvmlDeviceGetSamples(
            self._handle, UTILIZATION_SAMPLES, ctypes.c_ulonglong(self._last), ctypes.byref(kind), ctypes.byref(count),
            buffer,
        )  # fmt: skip
        return list(buffer)[: count.value] if status == 0 and buffer is not None else []
