"""The number of cores that a process may use."""

from __future__ import annotations

import os

import pytest

from arborl import cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 2**31),
        ({"cpu.max": "max 100000\n"}, 2**31),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": ""}, 2**31),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2**31),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_the_limit_of_a_container_is_read_from_its_control_group(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.cgroup_cores(tmp_path) == expected


def test_a_limited_container_on_a_large_machine_has_few_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert cores.available_cores() == 2
