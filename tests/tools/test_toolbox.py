import asyncio
import time

import pytest

from arborl.errors import ConfigError
from arborl.tools import TOOLS, Toolbox, tool
from arborl.types import ToolCall


@tool
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@tool
def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def answers(box: Toolbox, *calls: ToolCall):
    return asyncio.run(box.run(calls))


def test_calls_are_answered_in_order_and_at_once():
    start = time.perf_counter()
    results = answers(
        Toolbox([double, nap]),
        ToolCall("1", "nap", {"seconds": 0.5}),
        ToolCall("2", "double", {"x": 4}),
        ToolCall("3", "nap", {"seconds": 0.5}),
    )
    assert [result.content for result in results] == ["slept", "8", "slept"]
    assert time.perf_counter() - start < 0.95
    assert results[0].seconds >= 0.49


def test_every_kind_of_bad_call_is_an_answer():
    results = answers(
        Toolbox([double]),
        ToolCall("1", "doubel", {"x": 4}),
        ToolCall("2", "double", error="not JSON: {x"),
        ToolCall("3", "double", {"y": 4}),
    )
    assert [result.kind for result in results] == ["unknown_tool", "malformed", "arguments"]
    assert results[0].content == "no tool is called 'doubel'. Did you mean 'double'? Known: double."
    assert results[1].content == "not JSON: {x"
    assert not any(result.ok for result in results)


def test_an_empty_toolbox_says_so():
    assert answers(Toolbox(), ToolCall("1", "double"))[0].content.endswith("There are no tools.")


def test_a_plain_function_is_taken_as_a_tool():
    def triple(x: int) -> int:
        return 3 * x

    box = Toolbox([triple])
    assert box.specs[0].name == "triple"
    assert answers(box, ToolCall("1", "triple", {"x": 3}))[0].content == "9"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are called 'double'"):
        Toolbox([double, double])


def test_every_tool_of_the_library_can_be_described():
    for name in TOOLS:
        found = TOOLS[name]
        assert found.__doc__ if isinstance(found, type) else found.spec.description
