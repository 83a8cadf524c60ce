"""Tools: plain functions the model may call. What goes wrong with a call is an answer to the model, never an exception.

Start with `tool.py` (`@tool` describes a function), then `injection.py` (what a tool gets besides the model's arguments)
and `toolbox.py` (answers the calls of one message). `library/` holds those that ship.
"""

from arborl.registry import Registry
from arborl.tools.injection import Context, Given, State
from arborl.tools.limit import RateLimit
from arborl.tools.tool import AnyTool, Tool, tool
from arborl.tools.toolbox import Toolbox, as_tool

TOOLS = Registry(
    "tool",
    {
        "answer": "arborl.tools.library.finish:answer",
        "calculator": "arborl.tools.library.calculator:calculator",
        "fetch": "arborl.tools.library.fetch:Fetch",
        "finish": "arborl.tools.library.finish:finish",
        "python": "arborl.tools.library.python:python",
        "retrieve": "arborl.tools.library.retrieve:Retrieve",
        "search": "arborl.tools.library.search:Search",
    },
)
"""A tool, or a class that makes one from its arguments."""

__all__ = ["TOOLS", "AnyTool", "Context", "Given", "RateLimit", "State", "Tool", "Toolbox", "as_tool", "tool"]
