"""What tools get besides the model's arguments: fields, the episode, state; and who ends an episode."""

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from arborl.errors import ConfigError, EpisodeError
from arborl.tools import TOOLS, EpisodeState, TaskField, Tool, Toolbox, ToolContext, as_tool, tool
from arborl.tools.core.tool_context import _longest_prefix, count_tokens, truncate
from arborl.types import Task, ToolCall

TASK = Task("t1", fields={"answer": "42", "document": "long"})
Notes = Annotated[list[str], EpisodeState(list)]


@dataclass
class Point:
    x: int
    y: int = 0


class Box(BaseModel):
    """A box on the plane."""

    corner: Point
    size: float = Field(gt=0, description="side length")
    inside: list["Box"] = []


@tool(stateful=True)
def note(text: str, notes: Notes) -> str:
    """Note something."""
    notes.append(text)
    return f"{len(notes)} notes"


@tool(stateful=True)
def recall(notes: Notes) -> list[str]:
    """Read the notes."""
    return notes


def run(made, arguments, context=None):
    return asyncio.run(made.run(arguments, context))


def played(box, *rounds, task=TASK):
    """The texts of several rounds of calls in one episode."""

    async def play():
        async with ToolContext(task) as context:
            calls = [[ToolCall(str(i), name, given) for i, (name, given) in enumerate(one)] for one in rounds]
            return [[result.content for result in await box.run(one, context)] for one in calls]

    return asyncio.run(play())


def test_task_fields_and_the_context_are_injected():
    @tool
    def check(
        guess: str,
        right: Annotated[str, TaskField("answer")],
        document: Annotated[str, TaskField],
        lang: Annotated[str, TaskField()] = "en",
    ):
        """Check a guess."""
        return [guess == right, document, lang]

    assert list(check.spec.parameters["properties"]) == ["guess"]
    assert run(check, {"guess": "42"}, ToolContext(TASK)).content == '[true, "long", "en"]'
    assert "argument 'right' is unknown" in run(check, {"guess": "42", "right": "x"}, ToolContext(TASK)).content

    @tool
    def check(guess: str, gold: Annotated[str, TaskField()]):
        return guess == gold

    with pytest.raises(EpisodeError, match=r"tool 'check'.*needs the field 'gold'; task 't1' has: answer, document"):
        run(check, {"guess": "x"}, ToolContext(TASK))

    @tool
    def who(context: ToolContext) -> str:
        return f"{context.task.id} {context.fields['answer']}"

    assert run(who, {}, ToolContext(TASK)).content == "t1 42"
    assert who.spec.parameters == {"type": "object", "properties": {}}


def test_state_lasts_an_episode_and_is_shared_through_the_annotation():
    box = Toolbox([note, recall])
    assert played(box, [("note", {"text": "a"})], [("note", {"text": "b"}), ("recall", {})]) == [
        ["1 notes"],
        ["2 notes", '["a", "b"]'],
    ]
    assert played(box, [("recall", {})]) == [["[]"]]


def test_calls_of_stateful_tools_run_in_the_order_written():
    @tool(stateful=True)
    async def append(text: str, seconds: float, notes: Notes):
        await asyncio.sleep(seconds)
        notes.append(text)
        return "".join(notes)

    calls = [("append", {"text": "a", "seconds": 0.05}), ("append", {"text": "b", "seconds": 0})]
    assert played(Toolbox([append]), calls) == [["a", "ab"]]


def test_states_are_closed_with_the_episode_even_when_one_fails():
    closed = []

    class Held:
        def close(self):
            closed.append("plain")

    class HeldToo:
        async def close(self):
            closed.append("async")
            raise OSError("stuck")

    @tool(stateful=True)
    def hold(a: Annotated[Any, EpisodeState(Held)], b: Annotated[Any, EpisodeState(HeldToo)]):
        return "held"

    with pytest.raises(EpisodeError, match="closing the state of a tool: OSError: stuck"):
        played(Toolbox([hold]), [("hold", {})], [("hold", {})])
    assert sorted(closed) == ["async", "plain"]


def test_a_state_that_cannot_be_made_costs_the_episode():
    def broken():
        raise OSError("no sandbox here")

    @tool(stateful=True)
    def use(x: Annotated[Any, EpisodeState(broken)]):
        return x

    with pytest.raises(EpisodeError, match="state of tool 'use': OSError: no sandbox here"):
        run(use, {})


class Notebook:
    def __init__(self, lines=()):
        self.lines = list(lines)

    @tool(stateful=True)
    def write(self, line: str) -> int:
        """Write a line.

        Args:
            line: what to write.
        """
        self.lines.append(line)
        return len(self.lines)

    @tool(stateful=True)
    async def read(self) -> str:
        """Read all lines."""
        return " ".join(self.lines)

    @tool
    def size(self) -> int:
        """Count the lines."""
        return len(self.lines)


def test_methods_are_tools_of_an_object_or_of_an_episode():
    mine, yours = Notebook(["a"]), Notebook()
    assert mine.write("b") == 2  # still the method
    box = Toolbox([mine.write, mine.read, mine.size])
    assert [spec.name for spec in box.specs] == ["write", "read", "size"]
    assert list(mine.write.spec.parameters["properties"]) == ["line"]
    assert played(box, [("write", {"line": "c"}), ("read", {})]) == [["3", "a b c"]]
    assert yours.lines == []
    box = Toolbox([Notebook.write, Notebook.read])
    for _ in range(2):
        assert played(box, [("write", {"line": "x"})], [("read", {})]) == [["1"], ["x"]]

    with pytest.raises(ConfigError, match=r"Give Notebook\(\)\.size, .* @tool\(stateful=True\)"):
        Toolbox([Notebook.size])


def test_dataclasses_and_pydantic_models_are_described_in_place_and_arrive_as_themselves():
    seen = []

    @tool
    def place(box: Box, at: Point | None = None, tags: dict[str, list[int]] = {}):  # noqa: B006
        seen.append((box, at, tags))
        return {"box": box, "at": at}

    properties = place.spec.parameters["properties"]
    assert properties["at"]["anyOf"][0]["properties"] == {
        "x": {"type": "integer"},
        "y": {"type": "integer", "default": 0},
    }
    assert properties["box"]["description"] == "A box on the plane."
    assert properties["box"]["properties"]["size"]["description"] == "side length"
    assert "title" not in json.dumps(place.spec.parameters)
    assert "$defs" in place.spec.parameters  # a box holds boxes
    result = run(place, {"box": {"corner": {"x": "1"}, "size": 2, "inside": []}, "at": {"x": 3}, "tags": {"a": [1]}})
    assert result.ok, result.content
    assert seen == [(Box(corner=Point(1), size=2.0), Point(3, 0), {"a": [1]})]
    assert json.loads(result.content) == {
        "box": {"corner": {"x": 1, "y": 0}, "size": 2.0, "inside": []},
        "at": {"x": 3, "y": 0},
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"point": {}}, "argument \"point['x']\" is missing"),
        ({"point": 3}, "argument 'point'"),
        ({"point": {"x": 1}, "way": "up"}, "'left' or 'right'"),
        ({"point": {"x": 1}, "either": "q"}, "argument 'either' should be integer or array of integer"),
        ({"point": {"x": 1}, "pairs": [["a"]]}, "argument 'pairs[0]["),
    ],
)
def test_errors_name_the_place_inside_a_value(arguments, says):
    @tool
    def go(
        point: Point,
        way: Optional[Literal["left", "right"]] = None,  # noqa: UP045
        either: Union[int, list[int]] = 0,  # noqa: UP007
        pairs: list[tuple[str, int]] = [],  # noqa: B006
    ):
        return "went"

    result = run(go, arguments)
    assert (result.kind, says in result.content) == ("arguments", True), result.content
    assert "it takes point (object with x, y), way (" in result.content


def test_arguments_are_read_by_their_types():
    @tool
    def go(point: Point, steps: list[int], name: str):
        return [point, steps, name]

    result = run(go, {"point": '{"x": 1}', "steps": "[1, 2]", "name": "[3]"})
    assert result.content == '[{"x": 1, "y": 0}, [1, 2], "[3]"]'
    assert run(go, {"point": "{x}", "steps": "[]", "name": ""}).kind == "arguments"
    with pytest.raises(TypeError, match="tool 'f': a type in its signature has no JSON form"):

        @tool
        def f(lock: threading.Lock().__class__):
            return lock

    from pydantic import AfterValidator

    def bad(value):
        raise KeyError("oops")

    @tool
    def f(x: Annotated[int, AfterValidator(bad)]):
        return x

    assert run(f, {"x": 1}).kind == "arguments"


def test_a_terminal_tool_ends_only_when_it_works():
    box = Toolbox([TOOLS["finish"], TOOLS["calculator"]])
    good, bad = ToolCall("1", "finish", {"answer": "42"}), ToolCall("2", "finish", {"answr": "42"})
    other = ToolCall("3", "calculator", {"expression": "1"})
    results = asyncio.run(box.run([good, bad, other]))
    assert [box.ends(call, result) for call, result in zip([good, bad, other], results, strict=True)] == [
        True,
        False,
        False,
    ]
    assert results[0].content == "42"


def test_calls_beyond_the_most_a_message_may_hold_are_answered_and_not_run():
    ran = []

    @tool
    def touch(x: int):
        ran.append(x)

    results = asyncio.run(Toolbox([touch], max_calls=3).run([ToolCall(str(i), "touch", {"x": i}) for i in range(5)]))
    assert [result.kind for result in results] == ["ok"] * 3 + ["too_many"] * 2
    assert sorted(ran) == [0, 1, 2]


def test_a_limit_is_waited_for_and_its_wait_is_no_part_of_the_timeout():
    class Slow:
        taken = 0

        async def acquire(self):
            Slow.taken += 1
            await asyncio.sleep(0.1)

    @tool(timeout=0.05, limit=Slow())
    async def quick():
        return "here"

    assert run(quick, {}).content == "here"
    assert Slow.taken == 1


def test_tools_of_another_process_need_only_the_same_shape():
    class Remote:
        name, spec, stateful, terminal = "far", TOOLS["calculator"].spec, False, False

        async def run(self, arguments, context=None):
            return await TOOLS["calculator"].run(arguments, context)

    (result,) = asyncio.run(Toolbox([Remote()]).run([ToolCall("1", "far", {"expression": "6*7"})]))
    assert result.content == "42"
    with pytest.raises(ConfigError, match="3 is not a tool"):
        as_tool(3)
    with pytest.raises(ConfigError, match="takes no arguments"):
        as_tool(note, {"x": 1})


def test_an_async_callable_and_a_function_that_returns_an_awaitable_are_awaited():
    class Asks:
        """Ask."""

        async def __call__(self, x: int):
            return x + 1

    async def inner(x):
        return x + 2

    assert run(Tool(Asks()), {"x": 1}).content == "2"
    assert run(Tool(lambda x: inner(x), name="f"), {"x": 1}).content == "3"


def test_blocking_functions_do_not_block_each_other():
    all_here = threading.Barrier(10)

    @tool
    def meet() -> str:
        all_here.wait(40)
        return "met"

    async def ten():
        return await Toolbox([meet]).run([ToolCall(str(i), "meet") for i in range(10)])

    assert {result.content for result in asyncio.run(ten())} == {"met"}


class Letters:
    """A tokenizer: every three letters are a token."""

    def encode(self, text):
        return [0] * -(-len(text) // 3)


def test_the_limit_in_tokens_is_the_tokenizers_and_the_cut_is_seen():
    @tool(max_tokens=4)
    def long():
        return "abcdefghijklmnopqrstuvwxyz"

    context = ToolContext(TASK, tokenizer=Letters())
    assert run(long, {}, context).content == "abcdefghijkl… [cut: 14 more characters]"


@given(st.text(max_size=60), st.integers(1, 30), st.sampled_from([None, Letters()]))
def test_what_is_kept_is_the_longest_beginning_that_fits(text, limit, tokenizer):
    kept = _longest_prefix(text, limit, tokenizer)
    assert text.startswith(kept)
    assert count_tokens(kept, tokenizer) <= limit
    assert kept == text or count_tokens(text[: len(kept) + 1], tokenizer) > limit
    assert truncate(text, 10**6, limit, tokenizer).startswith(kept)
