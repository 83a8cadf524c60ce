"""Parameters of tests."""

from __future__ import annotations

import platform
from typing import Any

import pytest

IS_ARM = platform.machine() in ("aarch64", "arm64")
"""Matrix products of its BLAS depend on the number of threads, and round differently from those of x86."""


def slow_cases(*cases: Any) -> list[Any]:
    """Cases that quicker ones cover nearly; `make test-slow` runs them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
