"""Parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def slow_cases(*cases: Any) -> list[Any]:
    """Cases that quicker ones cover nearly; `make test-slow` runs them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
