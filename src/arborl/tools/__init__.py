"""Tools: plain functions the model may call. What goes wrong with a call is an answer to the model, never an exception.

Start with `tool.py` (`@tool` describes a function), then `toolbox.py` (answers the calls of one message).
`library/` holds those that ship.
"""

from arborl.registry import Registry
from arborl.tools.tool import Tool, tool
from arborl.tools.toolbox import Toolbox

TOOLS = Registry("tool", {"calculator": "arborl.tools.library.calculator:calculator"})

__all__ = ["TOOLS", "Tool", "Toolbox", "tool"]
