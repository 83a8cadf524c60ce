"""Use of CPU, memory and GPU, as a step reports it."""

from __future__ import annotations

import os
import time

import pytest

from arborl.trainer.system_usage import GpuUtilization, SystemUsage

PAGE = os.sysconf("SC_PAGE_SIZE")


def written(proc, busy, idle):
    """A /proc whose machine has been busy and idle for so many ticks, 1 GiB of 4 in use."""
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")
    (proc / "meminfo").write_text("MemTotal: 4194304 kB\nMemFree: 9 kB\nMemAvailable: 3145728 kB\nHugePages_Total: 0\n")
    (proc / "self" / "statm").write_text(f"99 {2**29 // PAGE} 3 4 5 6 7\n")
    return proc


def test_shares_are_means_since_the_previous_call_and_memory_is_that_of_now(tmp_path):
    usage = SystemUsage(written(tmp_path, busy=100, idle=100))
    written(tmp_path, busy=130, idle=170)
    first = usage.metrics()
    written(tmp_path, busy=220, idle=180)
    assert first["system/machine_cpu"] == pytest.approx(0.3)
    assert usage.metrics()["system/machine_cpu"] == pytest.approx(0.9)
    assert first["system/process_memory_gib"] == pytest.approx(0.5, rel=1e-2)
    assert first["system/machine_memory_gib"] == pytest.approx(1.0)


def test_the_share_of_the_process_is_that_of_its_cpu_time():
    usage = SystemUsage()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 0 < usage.metrics()["system/process_cpu"] <= 1


@pytest.mark.parametrize("content", [None, "", "cpu none\n", "cpu  1 2\n"])
def test_what_the_system_does_not_provide_is_left_out(tmp_path, content):
    if content is not None:
        (tmp_path / "stat").write_text(content)
        (tmp_path / "meminfo").write_text(content)
    usage = SystemUsage(tmp_path)
    assert set(usage.metrics()) == {"system/process_cpu"}


def test_without_the_library_of_the_driver_there_is_no_utilization():
    assert GpuUtilization("none", library="libno-such-library.so.1").mean() is None
