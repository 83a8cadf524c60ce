"""Parameters of tests."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

IS_ARM = platform.machine() in ("aarch64", "arm64")
"""Matrix products of its BLAS depend on the number of threads, and round differently from those of x86."""

HAS_BFLOAT16 = not IS_ARM or "bf16" in (cpu.read_text() if (cpu := Path("/proc/cpuinfo")).exists() else "bf16")
"""Arm processors without these instructions take minutes for a small model."""


def slow_cases(*cases: Any) -> list[Any]:
    """Cases that quicker ones cover nearly; `make test-slow` runs them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
