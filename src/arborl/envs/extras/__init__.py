"""Environments of other packages, each behind an extra of its own: reasoning_gym, textarena, OpenEnv servers.

Start with `reasoning.py`, the smallest.
"""

from __future__ import annotations

import importlib
from typing import Any

from arborl.errors import ConfigError


def package(name: str, extra: str) -> Any:
    """The package, or an error that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the environment {extra!r} needs the package {name!r} ({error}). Write: pip install 'arborl[{extra}]'"
        ) from error
