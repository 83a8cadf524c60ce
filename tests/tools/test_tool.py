import asyncio
import sys
import threading
import time
from typing import Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.tools import Tool, tool
from arborl.tools.core import background_threads
from arborl.tools.core.arguments import parse_docstring
from arborl.types import ToolResult


@tool
def search(
    query: str,
    limit: int = 3,
    order: Literal["new", "old"] = "new",
    tags: list[str] | None = None,
    near: Optional[float] = None,  # noqa: UP045
    exact: bool = False,
    more: dict[str, int] | None = None,
) -> str:
    """Search the library.

    Finds what is there.

    Args:
        query: what to look for,
            in a few words.
        limit (int): most results: at least 1.

    Returns:
        The results.
    """
    return f"{query}|{limit}|{order}|{tags}|{near}|{exact}|{more}"


def run(made: Tool, arguments: dict) -> ToolResult:
    return asyncio.run(made.run(arguments))


def test_the_schema_comes_from_the_signature_and_the_docstring():
    spec = search.spec
    assert (spec.name, spec.description) == ("search", "Search the library. Finds what is there.")
    assert spec.parameters["required"] == ["query"]
    properties = spec.parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for, in a few words."}
    assert properties["limit"] == {"type": "integer", "default": 3, "description": "most results: at least 1."}
    assert properties["order"] == {"type": "string", "enum": ["new", "old"], "default": "new"}
    assert properties["tags"] == {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert properties["near"] == {"anyOf": [{"type": "number"}, {"type": "null"}]}
    assert properties["exact"] == {"type": "boolean", "default": False}
    assert properties["more"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert "title" not in str(spec.parameters)
    assert list(spec.parameters) == ["type", "properties", "required"]


def test_arguments_arrive_converted_and_a_tool_is_still_its_function():
    assert search("cats", 1) == "cats|1|new|None|None|False|None"
    assert search.__name__ == "search"
    result = run(search, {"query": "cats", "limit": "2", "tags": ["a"]})
    assert result.ok
    assert result.kind == "ok"
    assert result.content == "cats|2|new|['a']|None|False|None"


def test_signatures_are_described_and_parameters_need_a_name():
    @tool(name="look", description="Look it up.", max_chars=5)
    def anything(what):
        return what

    assert (anything.spec.name, anything.spec.description) == ("look", "Look it up.")
    assert anything.spec.parameters == {"type": "object", "properties": {"what": {}}, "required": ["what"]}

    @tool
    def f(x: int | list[int]):
        return x

    assert "argument 'x' should be integer or array of integer" in run(f, {"x": "no"}).content

    @tool
    def f(json: str, copy: int, model_config: bool, _private: str = "p"):
        return [json, copy, model_config, _private]

    assert run(f, {"json": "j", "copy": 1, "model_config": True}).content == '["j", 1, true, "p"]'
    with pytest.raises(TypeError, match=r"tool 'f': parameter '\*args: str'"):

        @tool
        def f(*args: str):
            return args


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "search: argument 'query' is missing; it takes query (string), limit (integer, optional)"),
        ({"query": 3}, "argument 'query' should be a valid string, not 3; it takes"),
        ({"query": "a", "limits": 3}, "argument 'limits' is unknown. Did you mean 'limit'?; it takes"),
        ({"query": "a", "limit": "many"}, "argument 'limit' should be a valid integer"),
        ({"query": "a", "order": "best"}, "argument 'order' should be 'new' or 'old', not 'best'"),
        ({"query": "a", "tags": [1]}, "argument 'tags[0]' should be a valid string, not 1"),
        ({"limit": "many"}, "argument 'query' is missing, argument 'limit' should be"),
        (["a"], "search: the arguments are ['a'], not an object; it takes"),
    ],
)
def test_wrong_arguments_are_an_answer_the_model_can_act_on(arguments, says):
    result = run(search, arguments)
    assert (result.ok, result.kind) == (False, "arguments")
    assert says in result.content


def test_exceptions_timeouts_and_long_output_are_results():
    @tool
    def broken(x: int):
        return x // 0

    result = run(broken, {"x": 1})
    assert (result.ok, result.kind) == (False, "exception")
    assert result.content.startswith("broken: ZeroDivisionError: ")

    @tool(timeout=0.05)
    async def waits(seconds: float):
        await asyncio.sleep(seconds)
        return {"slept": seconds}

    assert run(waits, {"seconds": 0}).content == '{"slept": 0.0}'
    assert run(waits, {"seconds": 5}).kind == "timeout"

    @tool(max_chars=10)
    def long():
        return "x" * 5130

    assert run(long, {}).content == "x" * 10 + "… [cut: 5,120 more characters]"


@pytest.mark.parametrize("raised", [SystemExit(1), StopIteration(), KeyboardInterrupt()])
def test_even_exit_and_stop_iteration_cost_no_more_than_the_call(raised):
    @tool
    def leaves():
        raise raised

    assert run(leaves, {}).kind == "exception"


def test_a_hanging_synchronous_tool_is_abandoned_and_blocks_no_other():
    @tool(timeout=0.05)
    def slow():
        time.sleep(60)

    @tool
    def quick():
        return "here"

    async def many():
        return await asyncio.gather(*(slow.run({}) for _ in range(40)), quick.run({}))

    start = time.perf_counter()
    *hung, last = asyncio.run(many())
    assert time.perf_counter() - start < 40
    assert {result.kind for result in hung} == {"timeout"}
    assert "took longer than 0.05 s" in hung[0].content
    assert last.content == "here"


@given(st.text())
def test_any_docstring_can_be_read(text):
    read = parse_docstring(text)
    assert isinstance(read.description, str)
    assert all(isinstance(name, str) and isinstance(words, str) for name, words in read.arguments.items())


@given(
    st.dictionaries(
        st.text(max_size=5) | st.sampled_from(["query", "limit", "tags"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4),
    )
)
def test_whatever_the_model_writes_is_answered(arguments):
    assert run(search, arguments).kind in ("ok", "arguments")


def test_calls_that_hang_are_counted_by_tool_and_refused_at_the_cap_while_other_tools_go_on(monkeypatch):
    monkeypatch.setattr(background_threads, "MAX_HANGING_CALLS", 2)
    done = threading.Event()

    @tool(timeout=0.1)
    def hanging(seconds: float) -> str:
        done.wait(seconds)
        return "at last"

    async def main():
        late = [await hanging.run({"seconds": 30}) for _ in range(2)]
        assert [result.kind for result in late] == ["timeout", "timeout"]
        assert background_threads.num_hanging_calls("hanging") == 2
        began = time.monotonic()
        refused = await hanging.run({"seconds": 0})
        assert time.monotonic() - began < 20
        assert not refused.ok
        assert "2 calls of tool 'hanging' hang in threads" in refused.content
        assert (await search.run({"query": "cats"})).ok
        done.set()
        while background_threads.num_hanging_calls("hanging"):
            await asyncio.sleep(0.01)
        assert (await hanging.run({"seconds": 0})).content == "at last"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_tool_that_ends_the_process_ends_its_call(kind):
    def leaving() -> str:
        sys.exit("gone")

    async def going() -> str:
        sys.exit("gone")

    result = run(Tool(leaving if kind == "plain" else going), {})
    assert not result.ok
    assert "SystemExit" in result.content
    assert "gone" in result.content
