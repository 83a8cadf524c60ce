"""Every example in a docstring of the algorithms is run; every pure function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

MODULES = (
    "statistics", "episode_advantages", "turn_advantages", "importance_weights", "loss_table", "token_losses",
    "preference_losses",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_the_stated_results(name):
    result = doctest.testmod(importlib.import_module(f"arborl.algorithms.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("loss_table", "statistics")])
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(f"arborl.algorithms.{name}")
    own = [f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    public = [f for f in own if not f.__name__.startswith(("_", "<"))]
    assert public
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []
