"""The times at which a GPU computes, from the spans of its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize(
    ("spans", "busy", "gaps"),
    [
        ([], 0, []),
        ([(5, 9)], 4, []),
        ([(0, 2), (2, 3)], 3, []),
        ([(10, 12), (15, 16), (17, 20)], 6, [(2, 3), (6, 1)]),
        ([(0, 10), (2, 4), (5, 12), (13, 14)], 13, [(12, 1)]),  # two streams at the same time
    ],
)
def test_busy_time_is_the_union_of_spans_and_gaps_are_what_is_between(spans, busy, gaps):
    from gpu_profile import busy_time_and_gaps

    assert busy_time_and_gaps(spans) == (busy, gaps)


@pytest.mark.gpu
def test_a_pause_between_two_products_is_a_gap():
    from time import sleep

    from gpu_profile import GpuProfile

    matrix = torch.ones(512, 512, device="cuda")
    with GpuProfile() as profile:
        matrix @ matrix
        torch.cuda.synchronize()
        sleep(0.05)
        matrix @ matrix
    assert profile.row["gaps_ms"][0]["length"] >= 45
    assert 0 <= profile.row["gpu_seconds"] < profile.row["seconds"]
    assert sum(kernel["count"] for kernel in profile.row["kernels"]) >= 2
