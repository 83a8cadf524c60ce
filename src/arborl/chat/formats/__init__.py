"""Tool-call formats, one file each: text to calls, and calls to text. `tool_parser.py` has the interface."""

from arborl.chat.formats.tool_parser import PARSERS, ToolCallParser, detect_format, make_parser

__all__ = ["PARSERS", "ToolCallParser", "detect_format", "make_parser"]
