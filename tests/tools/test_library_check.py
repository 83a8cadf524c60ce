"""The tool that knows the answer says whether the model's is right."""

import asyncio

import pytest

from arborl.tools import TOOLS, ToolContext, as_tool
from arborl.types import Task


@pytest.mark.parametrize(
    ("given", "right", "says"),
    [
        ("42", "42", "right"),
        (" 1,200. ", 1200, "right"),
        ("42.0", "42", "right"),
        ("43", "42", "wrong"),
        ("Oslo", ["Bergen", "oslo"], "right"),
    ],
)
def test_an_answer_is_compared_with_the_tasks(given, right, says):
    tool = as_tool(TOOLS["check"], {"name": "calc_reward", "description": "Grades."}, "agent.tool_args.check")
    assert (tool.name, tool.spec.description) == ("calc_reward", "Grades.")
    assert list(tool.spec.parameters["properties"]) == ["answer"]  # the right one is not for the model to see

    async def requested():
        async with ToolContext(Task("t", fields={"answer": right})) as context:
            return await tool.run({"answer": given}, context)

    assert asyncio.run(requested()).content == says
