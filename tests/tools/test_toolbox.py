import asyncio
import threading
import time

import pytest

from arborl.errors import ConfigError
from arborl.tools import TOOLS, Toolbox, tool
from arborl.types import ToolCall


@tool
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


BOTH = threading.Barrier(2)


@tool
def meet() -> str:
    """Wait until both are there."""
    BOTH.wait(40)
    return "met"


@tool
def nap() -> str:
    """Sleep."""
    time.sleep(0.1)
    return "slept"


def answers(box: Toolbox, *calls: ToolCall):
    return asyncio.run(box.run(calls))


def test_calls_are_answered_in_order_and_at_once():
    results = answers(
        Toolbox([double, meet, nap]),
        ToolCall("1", "meet"),
        ToolCall("2", "double", {"x": 4}),
        ToolCall("3", "meet"),
        ToolCall("4", "nap"),
    )
    assert [result.content for result in results] == ["met", "8", "met", "slept"]
    assert results[3].seconds >= 0.09


def test_every_kind_of_bad_call_is_an_answer():
    results = answers(
        Toolbox([double]),
        ToolCall("1", "doubel", {"x": 4}),
        ToolCall("2", "double", error="not JSON: {x"),
        ToolCall("3", "double", {"y": 4}),
    )
    assert [result.kind for result in results] == ["unknown_tool", "malformed", "arguments"]
    assert results[0].content == "there is no tool 'doubel'. Did you mean 'double'? Known: double."
    assert results[1].content == "not JSON: {x"
    assert not any(result.ok for result in results)


def test_a_toolbox_takes_functions_of_different_names():
    assert answers(Toolbox(), ToolCall("1", "double"))[0].content.endswith("There are no tools.")

    def triple(x: int) -> int:
        return 3 * x

    box = Toolbox([triple])
    assert box.specs[0].name == "triple"
    assert answers(box, ToolCall("1", "triple", {"x": 3}))[0].content == "9"
    with pytest.raises(ConfigError, match="two tools have the name 'double'"):
        Toolbox([double, double])


def test_every_tool_of_the_library_can_be_described():
    for name in TOOLS:
        found = TOOLS[name]
        assert found.__doc__ if isinstance(found, type) else found.spec.description
