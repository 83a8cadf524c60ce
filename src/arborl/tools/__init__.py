"""Tools: functions that the model can call. A failed call is a tool result, never an exception.

In reading order:

    core/           The tool object, its arguments and context, the toolbox, rate limits
    library/        Tools of this library, by the names in `arborl.tools.TOOLS`
    remote/         The tool server, its client, and MCP
    tool_loader.py  The tools that a configuration names
"""

from arborl.registry import Registry
from arborl.tools.core.rate_limit import RateLimit
from arborl.tools.core.tool import AnyTool, Tool, tool
from arborl.tools.core.tool_context import EpisodeState, TaskField, ToolContext
from arborl.tools.core.toolbox import Toolbox, as_tool

TOOLS = Registry(
    "tool",
    {
        "answer": "arborl.tools.library.finish:answer",
        "calculator": "arborl.tools.library.calculator:calculator",
        "check": "arborl.tools.library.finish:Check",
        "fetch": "arborl.tools.library.fetch:Fetch",
        "finish": "arborl.tools.library.finish:finish",
        "python": "arborl.tools.library.python:Python",
        "retrieve": "arborl.tools.library.search:Retrieve",
        "search": "arborl.tools.library.search:Search",
    },
)
"""A tool, or a class that makes one from its arguments."""

__all__ = [
    "TOOLS", "AnyTool", "EpisodeState", "RateLimit", "TaskField", "Tool", "ToolContext", "Toolbox", "as_tool", "tool",
]  # fmt: skip
