"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores of the process's affinity, at most as many as its container may keep busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cgroup_cores(CGROUP)))


@cache
def cgroup_cores(root: Path) -> int:
    """The limit of the control group (`docker run --cpus`, a Kubernetes limit), rounded up; a large number without
    one."""
    for quota_file, period_file in (("cpu.max", "cpu.max"), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota = (root / quota_file).read_text(encoding="ascii").split()[0]
            period = (root / period_file).read_text(encoding="ascii").split()[-1]
            if int(quota) > 0 and int(period) > 0:
                return math.ceil(int(quota) / int(period))
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
    return 2**31
