"""Escaping of control tokens in messages: only the template writes control tokens.

A template renders one text, in which a `<|im_end|>` of the template and one from a tool result look alike. Before
rendering, a divider character is therefore inserted into every control text of a message. After rendering the dividers
are removed and their positions kept: control text at these positions is tokenised as text. Messages without control
text are rendered and tokenised as usual.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from arborl.fast_init import fast_init
from arborl.types import Message, ToolCall, ToolSpec

DIVIDER = "\U000f0000"  # A private-use character. In messages it is doubled, so an odd number of them is a divider.
DIVIDERS = re.compile(f"{DIVIDER}+")
THINKING = ("<think>", "</think>", "[THINK]", "[/THINK]")  # written by models; some tokenizers list them as special

CACHED_MESSAGES, MAX_CACHED_CHARS = 8192, 2048
"""Escaped messages in the cache, and their maximum length; the episodes of a group share messages."""
CACHED_TOOLS, MAX_TOOLS_CHARS = 64, 65_536  # escaped tool lists in the cache, and their maximum length as text


@fast_init
@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered text and the positions where control text is quoted."""

    text: str
    quoted: tuple[int, ...] = ()  # positions in order; control text that covers one of them is text

    def starts_with(self, beginning: Rendered) -> bool:
        if not self.text.startswith(beginning.text):
            return False
        if not self.quoted and not beginning.quoted:
            return True
        count, size = len(beginning.quoted), len(beginning.text)
        return self.quoted[:count] == beginning.quoted and all(place >= size for place in self.quoted[count:])

    def until(self, size: int) -> Rendered:
        return Rendered(self.text[:size], self.quoted[: bisect_left(self.quoted, size)])

    def after(self, size: int, before: str = "") -> Rendered:
        if not self.quoted:
            return Rendered(before + self.text[size:])
        shift = len(before) - size
        return Rendered(before + self.text[size:], tuple(at + shift for at in self.quoted if at >= size))

    def __add__(self, other: Rendered) -> Rendered:
        return join_rendered((self, other))


class TextParts:
    """A text in parts. Conversations that extend each other share the leading objects, so comparing them costs only the
    rest."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Iterable[Rendered]):
        self.parts = tuple([part for part in parts if part.text])
        self.size = sum([len(part.text) for part in self.parts])

    @property
    def joined(self) -> Rendered:
        return join_rendered(self.parts)

    def starts_with(self, beginning: TextParts) -> bool:
        if beginning.size > self.size:
            return False
        at = 0
        for one, other in zip(self.parts, beginning.parts, strict=False):
            if one is not other:
                break
            at += 1
        rest, others = self.parts[at:], beginning.parts[at:]
        if rest and others:
            size = min(len(rest[0].text), len(others[0].text))
            if rest[0].text[:size] != others[0].text[:size]:  # most differences are here
                return False
        return join_rendered(rest).starts_with(join_rendered(others))

    def after(self, size: int, before: str = "") -> Rendered:
        at, count = self.size, len(self.parts)
        while at > size:
            count -= 1
            at -= len(self.parts[count].text)
        return join_rendered(self.parts[count:]).after(size - at, before)

    def extended(self, *more: Rendered) -> TextParts:
        """The text with further parts; the present ones are shared."""
        made = TextParts.__new__(TextParts)
        made.parts = (*self.parts, *[part for part in more if part.text])
        made.size = self.size + sum([len(part.text) for part in more])
        return made


def join_rendered(parts: Sequence[Rendered]) -> Rendered:
    if len(parts) == 1:
        return parts[0]
    if not any(part.quoted for part in parts):
        return Rendered("".join([part.text for part in parts]))
    ends = accumulate(len(part.text) for part in parts)
    quoted = (end - len(part.text) + place for end, part in zip(ends, parts, strict=True) for place in part.quoted)
    return Rendered("".join(part.text for part in parts), tuple(quoted))


def remove_dividers(text: str) -> Rendered:
    """The text without dividers, and their positions."""
    if DIVIDER not in text:
        return Rendered(text)
    parts, quoted, size, at = [], [], 0, 0
    for found in DIVIDERS.finditer(text):
        size += found.start() - at
        if len(found.group()) % 2:
            quoted.append(max(size - 1, 0))
        parts += [text[at : found.start()], DIVIDER * (len(found.group()) // 2)]
        size, at = size + len(parts[-1]), found.end()
    return Rendered("".join((*parts, text[at:])), tuple(quoted))


class ControlTextDivider:
    """Inserts a divider behind the first character of every control text. An incomplete control text at the end of the
    text is divided too: the template may write its other half behind it."""

    def __init__(self, controls: Iterable[str]):
        controls = frozenset(controls)
        self._pattern = re.compile("|".join([DIVIDER, *([alternation(controls)] if controls else [])]))
        self._prefixes = frozenset(control[:size] for control in controls for size in range(1, len(control)))
        self._first = sorted({control[0] for control in controls})
        stems = {control[:2] for control in controls}
        self._stems = (DIVIDER, *(stems if len(stems) <= 16 else self._first))
        self._longest = max(map(len, controls), default=1) - 1

    def __call__(self, text: str) -> str:
        for sign in self._stems:
            if sign in text:
                text = self._pattern.sub(lambda found: found[0][0] + DIVIDER + found[0][1:], text)
                break
        end = len(text.rstrip())
        for first in self._first:
            at = text.find(first, max(0, end - self._longest), end)
            while at >= 0:
                if text[at:end] in self._prefixes:
                    return text[: at + 1] + DIVIDER + text[at + 1 :]
                at = text.find(first, at + 1, end)
        return text


class MessageEscaper:
    """Converts messages and tools to the dicts that templates read, with escaped control text.

    Args:
        control: texts of control tokens.
        spoken: control tokens that the model writes too, such as the one in front of tool calls.
        tags: other tokens that the template writes around tools, calls and results. Prompts and replies may contain
            them; inside such tags they are escaped.
    """

    def __init__(self, control: Iterable[str] = (), spoken: Iterable[str] = (), tags: Iterable[str] = ()):
        control = frozenset(control)
        self.prompt = ControlTextDivider(control)
        self.spoken = ControlTextDivider(control - {*spoken})
        self.tagged = ControlTextDivider(control | {*tags})
        self._cached = lru_cache(CACHED_MESSAGES)(self._escape)
        self._tools: dict[tuple[int, ...], tuple[Sequence[ToolSpec], list[dict[str, Any]]]] = {}

    def message(self, message: Message) -> dict[str, Any]:
        """A message as a dict. A sampled one has its text alone, so the model sees what it wrote."""
        size = len(message.content) + len(message.tool_call_id or "") + len(message.name or "")
        escape = self._cached if size <= MAX_CACHED_CHARS else self._escape
        escaped = escape(message.role, message.content, message.tool_call_id, message.name)
        if not message.tool_calls or message.sampled:
            return escaped
        return {**escaped, "tool_calls": [self._call(call) for call in message.tool_calls]}

    def _escape(self, role: str, content: str, tool_call_id: str | None, name: str | None) -> dict[str, Any]:
        divide = self.spoken if role == "assistant" else self.tagged if role == "tool" else self.prompt
        escaped = {"role": self.tagged(role), "content": divide(content)}
        if tool_call_id is not None:
            escaped["tool_call_id"] = self.tagged(tool_call_id)
        if name is not None:
            escaped["name"] = self.tagged(name)
        return escaped

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = _map_texts({"name": call.name, "arguments": call.arguments}, self.tagged)
        return {"id": self.tagged(call.id), "type": "function", "function": function}

    def tools(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """Tools as dicts, cached by identity: an agent uses the same objects in every episode."""
        key = tuple(map(id, tools))
        if (cached := self._tools.get(key)) is not None:
            return cached[1]
        escaped = [self._tool(tool) for tool in tools]
        if len(repr(escaped)) <= MAX_TOOLS_CHARS:
            if len(self._tools) >= CACHED_TOOLS:
                self._tools.clear()
            self._tools[key] = (tuple(tools), escaped)  # the reference keeps the ids valid
        return escaped

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: _map_texts(value, self.prompt) for name, value in values.items()} if values else values

    def _tool(self, tool: ToolSpec) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": _map_texts(function, self.tagged)}


NO_ESCAPING = MessageEscaper()


def _map_texts(value: Any, divide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return divide(value)
    if isinstance(value, dict):
        return {_map_texts(key, divide): _map_texts(item, divide) for key, item in value.items()}
    return [_map_texts(item, divide) for item in value] if isinstance(value, list | tuple) else value


def alternation(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of `texts`, as a prefix tree: some models have thousands."""
    heads: dict[str, list[str]] = {}
    for text in sorted(texts):
        heads.setdefault(text[:1], []).append(text)
    may_end = heads.pop("", None) is not None
    parts = "|".join(_branches(heads.values()))
    return f"(?:{parts}){'?' if may_end else ''}" if parts else ""


def _branches(groups: Iterable[list[str]]) -> Iterator[str]:
    for group in groups:
        least, most = min(group), max(group)  # their common prefix is that of all
        common = least[: next((i for i, letter in enumerate(least) if letter != most[i]), len(least))]
        yield re.escape(common) + alternation(text[len(common) :] for text in group)
