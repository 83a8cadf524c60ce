"""Code fences: a code block calls the tool that runs it."""

from __future__ import annotations

import re

from arborl.chat.formats.tool_parser import ToolCallParser
from arborl.types import ToolCall

OPENING = re.compile(r"^ {0,3}(`{3,})[ \t]*([\w+-]*)[ \t]*\r?$", re.MULTILINE)


class FenceParser(ToolCallParser):
    """A fenced block in one of `languages` is `TOOL(code=…)`; other fences are text.

    Example:
        FenceParser().parse("Let me see.\\n```python\\nprint(6 * 7)\\n```")
        # (ToolCall("call_0", "python", {"code": "print(6 * 7)"}),)

    Args:
        tool: name of the tool that runs code.
        argument: its argument for the code.
        languages: accepted language names; `format` writes the first.
    """

    def __init__(self, tool: str = "python", argument: str = "code", languages: tuple[str, ...] = ("python", "py")):
        self.tool, self.argument = tool, argument
        self.languages = languages

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        at = 0
        while found := OPENING.search(text, at):
            # A fence is closed by one at least as long, alone on its line.
            closing = re.compile(rf"^ {{0,3}}`{{{len(found[1])},}}[ \t]*\r?$", re.MULTILINE).search(text, found.end())
            if found[2].lower() in self.languages:
                calls.append(self._call(f"call_{len(calls)}", text, found, closing))
            if closing is None:  # the rest is inside the fence
                break
            at = closing.end()
        return tuple(calls)

    def _call(self, call_id: str, text: str, opening: re.Match[str], closing: re.Match[str] | None) -> ToolCall:
        if closing is None:
            return ToolCall(call_id, self.tool, error=f"the code is not closed. End it with a line {opening[1]}")
        inside = text[opening.end() : closing.start()].removeprefix("\n").removesuffix("\n")
        return ToolCall(call_id, self.tool, {self.argument: inside})

    def format(self, *calls: ToolCall) -> str:
        return "\n".join(map(self._write, calls))

    def _write(self, call: ToolCall) -> str:
        code = call.arguments.get(self.argument)
        if call.name != self.tool or set(call.arguments) != {self.argument} or not isinstance(code, str):
            raise ValueError(f"a fence expresses {self.tool}({self.argument}=TEXT) only")
        longest = max((len(run) for run in re.findall("`+", code)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}{self.languages[0]}\n{code}\n{fence}"
