"""What a GPU does during a piece of work: its kernels, and the moments at which it computes nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

NUM_KERNELS = 30
NUM_GAPS = 12


class GpuProfile:
    """A context manager. Afterwards `row` has the seconds of the block, the seconds in which the GPU computed, the
    kernels that took most of them, and the longest gaps between kernels, with the time at which each begins."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.profile = torch.profiler.profile(activities=[ProfilerActivity.CUDA])

    def __enter__(self) -> GpuProfile:
        torch.cuda.synchronize()
        self.profile.__enter__()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        self.profile.__exit__(*error)
        on_gpu = [one for one in self.profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
        spans = sorted((one.time_range.start, one.time_range.end) for one in on_gpu)
        busy, gaps = busy_time_and_gaps(spans)
        kernels = sorted(self.profile.key_averages(), key=lambda one: -one.self_device_time_total)
        self.row = {
            "seconds": round(seconds, 3),
            "gpu_seconds": round(busy / 1e6, 3),
            "gaps_ms": [{"at": round(at / 1e3, 1), "length": round(length / 1e3, 2)} for at, length in gaps[:NUM_GAPS]],
            "kernels": [
                {"ms": round(one.self_device_time_total / 1e3, 1), "count": one.count, "kernel": one.key[:100]}
                for one in kernels[:NUM_KERNELS]
            ],
        }


def busy_time_and_gaps(spans: list[tuple[float, float]]) -> tuple[float, list[tuple[float, float]]]:
    """The length of the union of ordered spans, and the gaps between them as (start relative to the first span,
    length), the longest first."""
    busy, gaps = 0.0, list[tuple[float, float]]()
    until = first = spans[0][0] if spans else 0.0
    for start, end in spans:
        if start > until:
            gaps.append((until - first, start - until))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, sorted(gaps, key=lambda gap: -gap[1])
