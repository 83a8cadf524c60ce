"""Formats without JSON objects around a call: code fences, tags (Qwen Coder), a Python list, and ReAct."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Iterator
from typing import Any

from arborl.chat.formats import ToolCallParser, numbered
from arborl.chat.formats.json_formats import call_with_arguments, dumps, parse_json_at, shorten, unique_pairs
from arborl.types import ToolCall

FENCE = re.compile(r"^ {0,3}(`{3,})[ \t]*([\w+-]*)[ \t]*\r?$", re.MULTILINE)

XML_SHAPE = "<tool_call>\n<function=TOOL>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>"
XML_FUNCTION = re.compile(r"<function=([^>\n]*)>")
XML_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)
XML_NAME = re.compile(r"[^>\s](?:[^>\n]*[^>\s])?")
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"

LIST_SHAPE = '[TOOL(NAME="VALUE")]'
LIST_START = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")
LONGEST, DEEPEST = 50_000, 60
WORDS = {"true": True, "false": False, "null": None}  # JSON constants, which models also write

REACT_SHAPE = 'Action: TOOL\nAction Input: {"NAME": "VALUE"}'
REACT_LINE = re.compile(r"^[ \t]*(Action Input|Action|Observation|Final Answer)[ \t]*:[ \t]*", re.M | re.IGNORECASE)
REACT_NAME = re.compile(r"\S(?:[^\n]*\S)?")


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
        while found := FENCE.search(text, at):
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


class QwenXmlParser(ToolCallParser):
    """`<function=add><parameter=a>1</parameter></function>`, within `<tool_call>` tags. Values are text: `1` is read as
    `"1"`, and the tool's signature converts it. Numbers, lists and objects therefore return as JSON text."""

    tokens = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>", "<function=")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        openings = list(XML_FUNCTION.finditer(text))
        limits = [*(following.start() for following in openings[1:]), len(text)]
        for found, limit in zip(openings, limits, strict=False):
            calls.append(_read_function(f"call_{len(calls)}", found[1].strip(), text[found.end() : limit]))
        if not calls and "<tool_call>" in text:
            calls.append(ToolCall("call_0", "", error=f"there is no function in the tool call. Write {XML_SHAPE}"))
        return tuple(calls)

    def format(self, *calls: ToolCall) -> str:
        return "\n".join(_write_function(call) for call in calls)


def _read_function(call_id: str, name: str, body: str) -> ToolCall:
    end = body.find(END_FUNCTION)
    if not name:
        return ToolCall(call_id, "", error=f"the function has no name. Write {XML_SHAPE}")
    if end < 0:
        return ToolCall(call_id, name, error=f"the tool call is not closed. Write {XML_SHAPE.replace('TOOL', name)}")
    inside, _, behind = body[:end].rpartition(END_PARAMETER)  # no parameter ends behind the last closing tag
    inside += END_PARAMETER if body[:end] != behind else ""
    left = (XML_PARAMETER.sub("", inside) + behind).strip()
    if left:
        shape = XML_SHAPE.replace("TOOL", name)
        return ToolCall(call_id, name, error=f"there is text outside parameters: {left[:40]!r}. Write {shape}")
    try:
        pairs = [(key.strip(), _parameter_value(text)) for key, text in XML_PARAMETER.findall(inside)]
        return ToolCall(call_id, name, unique_pairs(pairs))
    except ValueError as error:
        return ToolCall(call_id, name, error=f"{error}. Write {XML_SHAPE.replace('TOOL', name)}")


def _parameter_value(text: str) -> str:
    """The value without one line end behind the opening and before the closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


def _write_function(call: ToolCall) -> str:
    lines = ["<tool_call>", f"<function={_tag_name(call.name)}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else dumps(value)
        if END_PARAMETER in text or END_FUNCTION in text or XML_FUNCTION.search(text):
            raise ValueError(f"argument {key!r} holds a tag of this format, which has no way to escape one")
        lines += [f"<parameter={_tag_name(key)}>", text, END_PARAMETER]
    return "\n".join([*lines, END_FUNCTION, "</tool_call>"])


def _tag_name(name: str) -> str:
    if not XML_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not valid in a tag")
    return name


class PythonicParser(ToolCallParser):
    """`[add(a=1, b=2), now()]`, between other text."""

    tokens = ("<|python_start|>", "<|python_end|>")
    opens = ("<|python_start|>", "[")

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        calls: list[ToolCall] = []
        at = 0
        while found := LIST_START.search(text, at):
            end = _closing(text, found.start())
            if end is None:  # the rest is inside the list
                calls.append(ToolCall("", "", error=f"the list of tool calls is not closed. Write {LIST_SHAPE}"))
                break
            calls += _read_list(text[found.start() : end])
            at = end
        return numbered(calls)

    def format(self, *calls: ToolCall) -> str:
        return f"[{', '.join(map(_write_python, calls))}]" if calls else ""


def _closing(text: str, start: int) -> int | None:
    """Index behind the bracket that closes the one at `start`; brackets in strings do not count."""
    depth, quote, at = 0, "", start
    while at < min(len(text), start + LONGEST):
        here = text[at]
        if quote:
            at += here == "\\"
            quote = "" if here == quote else quote
        elif here in "'\"":
            quote = here
        elif here in "([{":
            depth += 1
            if depth > DEEPEST:
                return None
        elif here in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return None


def _read_list(source: str) -> Iterator[ToolCall]:
    """The calls of one list. An invalid call affects no other, unless the list is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        yield ToolCall("", "", error=f"{shorten(source)} is not a list of calls ({why}). Write {LIST_SHAPE}")
        return
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        name = _dotted_name(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name:
            yield ToolCall("", "", error=f"{shorten(ast.unparse(node))} is not a call. Write {LIST_SHAPE}")
            continue
        try:
            yield ToolCall("", name, _arguments(node))
        except ValueError as error:
            yield ToolCall("", name, error=f"{error}. Write {LIST_SHAPE.replace('TOOL', name)}")


def _dotted_name(node: ast.expr) -> str:
    """The dotted name of a node; empty if it is none."""
    if isinstance(node, ast.Attribute):
        before = _dotted_name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(node: ast.Call) -> dict[str, Any]:
    if node.args:
        raise ValueError(f"{shorten(ast.unparse(node.args[0]))} has no name: every argument is written NAME=VALUE")
    read: list[tuple[str, Any]] = []
    for word in node.keywords:
        value = _literal(word.value)
        if word.arg is not None:
            read.append((word.arg, value))
        elif isinstance(value, dict):  # **{"not a name": 1}
            read += value.items()
        else:
            raise ValueError("only an object can follow **")
    return unique_pairs(read)


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON could hold."""
    match node:
        case ast.Constant(value=str(text)):
            try:
                text.encode()
            except UnicodeError:
                raise ValueError("a string holds half of a surrogate pair") from None
            return text
        case ast.Constant(value=bool() | None | int() as value):
            return value
        case ast.Constant(value=float(value)) if abs(value) != float("inf"):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -_number(value) if isinstance(sign, ast.USub) else _number(value)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return unique_pairs([(_object_key(key), _literal(value)) for key, value in zip(keys, values, strict=True)])
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
    raise ValueError(f"{shorten(ast.unparse(node))} is not a number, a string, a list or an object")


def _number(value: float) -> float:
    if isinstance(value, bool) or abs(value) == float("inf"):
        raise ValueError(f"{value} is not a number to be signed")
    return value


def _object_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object are strings")


def _write_python(call: ToolCall) -> str:
    parts = call.name.split(".")
    if not all(map(_is_name, parts)):
        raise ValueError(f"{call.name!r} is not a name in Python")
    dumps(call.arguments)  # refuses what JSON does not have
    named = [f"{key}={value!r}" for key, value in call.arguments.items() if _is_name(key)]
    rest = {key: value for key, value in call.arguments.items() if not _is_name(key)}
    return f"{call.name}({', '.join([*named, *([f'**{rest!r}'] if rest else [])])})"


def _is_name(text: str) -> bool:
    # Python normalises other spellings of letters, which would not round-trip.
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


class ReactParser(ToolCallParser):
    """`Action: add` and, below it, `Action Input: {"a": 1}`. Text behind a line `Observation:` is ignored: the
    environment writes observations, so the model invented it. `Final Answer:` ends the calls too; `final_answer` reads
    it."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return numbered(_actions(text))

    def format(self, *calls: ToolCall) -> str:
        return "\n".join(map(_write_action, calls))


def final_answer(text: str) -> str | None:
    """Text behind `Final Answer:`, unless an action or an observation precedes it."""
    found = REACT_LINE.search(text)
    if found is None or _word(found) != "final answer":
        return None
    after = re.compile(r"^[ \t]*Observation[ \t]*:", re.MULTILINE | re.IGNORECASE).search(text, found.end())
    return text[found.end() : after.start() if after else len(text)].strip()


def _actions(text: str) -> Iterator[ToolCall]:
    at = 0
    while (found := REACT_LINE.search(text, at)) and _word(found) in ("action", "action input"):
        if _word(found) == "action input":
            yield ToolCall("", "", error=f"there is an input but no action before it. Write {REACT_SHAPE}")
            at = found.end()
            continue
        ends = text.find("\n", found.end())
        name = text[found.end() : ends if ends >= 0 else len(text)].strip()
        following = REACT_LINE.search(text, max(ends, found.end()))
        if not name:
            yield ToolCall("", "", error=f"the action has no name. Write {REACT_SHAPE}")
            at = following.end() if following and _word(following) == "action input" else found.end()
        elif following is None or _word(following) != "action input":
            shape = REACT_SHAPE.replace("TOOL", name)
            yield ToolCall("", name, error=f"the action has no input. Write {shape}")
            at = max(ends, found.end())
        else:
            call, at = _with_input(name, text, following.end())
            yield call


def _with_input(name: str, text: str, at: int) -> tuple[ToolCall, int]:
    """The call and the index behind it. JSON decides where its input ends."""
    shape = REACT_SHAPE.replace("TOOL", name)
    fence = re.compile(r"\s*```(?:json)?\s*").match(text, at)
    value, end = parse_json_at(text, fence.end() if fence else at, shape)
    if isinstance(value, ValueError):
        return ToolCall("", name, error=str(value)), at
    assert end is not None
    line_end = text.find("\n", end)
    extra = text[end : line_end if line_end >= 0 else len(text)].strip().strip("`")
    if extra:
        return ToolCall("", name, error=f"there is text after the input: {shorten(extra)}. Write {shape}"), end
    return call_with_arguments("", name, value, "Action Input", shape), end


def _word(found: re.Match[str]) -> str:
    return found[1].lower()


def _write_action(call: ToolCall) -> str:
    if not REACT_NAME.fullmatch(call.name) or call.name != call.name.strip():
        raise ValueError(f"{call.name!r} is not valid on a line")
    return f"Action: {call.name}\nAction Input: {dumps(call.arguments)}"
