"""Control tokens belong to the template: what looks like one in a message is text, and stays text.

A template is one Jinja program over strings, and its result is one text, in which a `<|im_end|>` of the template and
one that a tool wrote look alike. So before rendering, a divider is put into every control text that stands in a
message: the template's own are then the only whole ones. Afterwards the dividers are taken out again, and their places
kept. A conversation without control text in it is rendered and tokenised as if none of this existed.
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

DIVIDER = "\U000f0000"
"""Of a private plane. Where a message has this very character it is doubled, so an odd number divides."""
DIVIDERS = re.compile(f"{DIVIDER}+")
THINKING = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""Written by models themselves; some tokenizers call them special."""

REMEMBERED, SHORT_TEXT = 8192, 2048
"""Messages that are kept as templates read them; siblings of a group are shown the same. Longer ones are not."""
KNOWN_TOOLS, SHORT_TOOLS = 64, 65_536
"""Lists of tools that are kept as templates read them; those that are longer as text are not."""


@fast_init
@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and where in it a control token is none."""

    text: str
    quoted: tuple[int, ...] = ()
    """Places, in order; a control token's text that covers one of them is text."""

    def starts_with(self, beginning: Rendered) -> bool:
        """Whether this goes on from `beginning`: the same text, and the same of it quoted."""
        if not self.text.startswith(beginning.text):
            return False
        if not self.quoted and not beginning.quoted:
            return True
        count, size = len(beginning.quoted), len(beginning.text)
        return self.quoted[:count] == beginning.quoted and all(place >= size for place in self.quoted[count:])

    def until(self, size: int) -> Rendered:
        """The first `size` characters."""
        return Rendered(self.text[:size], self.quoted[: bisect_left(self.quoted, size)])

    def after(self, size: int, before: str = "") -> Rendered:
        """What follows the first `size` characters, with `before` in front of it."""
        if not self.quoted:
            return Rendered(before + self.text[size:])
        shift = len(before) - size
        return Rendered(before + self.text[size:], tuple(at + shift for at in self.quoted if at >= size))

    def __add__(self, other: Rendered) -> Rendered:
        return joined((self, other))


class Joined:
    """A text in parts, of which conversations that go on from each other share those at the beginning: they are then
    compared, and what follows them found, at the cost of what is not shared."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Iterable[Rendered]):
        self.parts = tuple([part for part in parts if part.text])
        self.size = sum([len(part.text) for part in self.parts])

    @property
    def whole(self) -> Rendered:
        return joined(self.parts)

    def starts_with(self, beginning: Joined) -> bool:
        """Whether this goes on from `beginning`: the same text, and the same of it quoted."""
        if beginning.size > self.size:
            return False
        at = 0
        for one, other in zip(self.parts, beginning.parts, strict=False):
            if one is not other:
                break
            at += 1
        own, others = self.parts[at:], beginning.parts[at:]
        if own and others:
            size = min(len(own[0].text), len(others[0].text))
            if own[0].text[:size] != others[0].text[:size]:  # most that differ do here
                return False
        return joined(own).starts_with(joined(others))

    def after(self, size: int, before: str = "") -> Rendered:
        """What follows the first `size` characters, with `before` in front of it."""
        at, count = self.size, len(self.parts)
        while at > size:
            count -= 1
            at -= len(self.parts[count].text)
        return joined(self.parts[count:]).after(size - at, before)

    def plus(self, *more: Rendered) -> Joined:
        """The text with these at its end; what is there already is shared."""
        made = Joined.__new__(Joined)
        made.parts = (*self.parts, *[part for part in more if part.text])
        made.size = self.size + sum([len(part.text) for part in more])
        return made


def joined(parts: Sequence[Rendered]) -> Rendered:
    """One text of several."""
    if len(parts) == 1:
        return parts[0]
    if not any(part.quoted for part in parts):
        return Rendered("".join([part.text for part in parts]))
    ends = accumulate(len(part.text) for part in parts)
    quoted = (end - len(part.text) + place for end, part in zip(ends, parts, strict=True) for place in part.quoted)
    return Rendered("".join(part.text for part in parts), tuple(quoted))


def undivided(text: str) -> Rendered:
    """The text without its dividers, and where they stood."""
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


class Divide:
    """Puts a divider behind the first character of every control text in a text.

    A control text of which only the beginning is there is divided too where the text ends with it: a template may write
    the next message, and so its other half, straight behind.
    """

    def __init__(self, controls: Iterable[str]):
        controls = frozenset(controls)
        self._whole = re.compile("|".join([DIVIDER, *([any_of(controls)] if controls else [])]))
        self._begun = frozenset(control[:size] for control in controls for size in range(1, len(control)))
        self._first = sorted({control[0] for control in controls})
        stems = {control[:2] for control in controls}
        self._signs = (DIVIDER, *(stems if len(stems) <= 16 else self._first))
        self._longest = max(map(len, controls), default=1) - 1

    def __call__(self, text: str) -> str:
        for sign in self._signs:
            if sign in text:
                text = self._whole.sub(lambda found: found[0][0] + DIVIDER + found[0][1:], text)
                break
        end = len(text.rstrip())
        for first in self._first:
            at = text.find(first, max(0, end - self._longest), end)
            while at >= 0:
                if text[at:end] in self._begun:
                    return text[: at + 1] + DIVIDER + text[at + 1 :]
                at = text.find(first, at + 1, end)
        return text


class Quoting:
    """What templates are given instead of messages and tools, so that only what they write themselves is control.

    Args:
        control: texts of control tokens; nobody but the template writes them.
        spoken: those among them that the model writes too, such as the mark before its tool calls.
        tags: tokens that are none of the control tokens and that the template puts around tools, calls and results. The
            model writes some of them, and prompts speak of them; but inside such tags they can only be text.
    """

    def __init__(self, control: Iterable[str] = (), spoken: Iterable[str] = (), tags: Iterable[str] = ()):
        control = frozenset(control)
        self.prompt = Divide(control)
        self.spoken = Divide(control - {*spoken})
        self.tagged = Divide(control | {*tags})
        self._known = lru_cache(REMEMBERED)(self._shown)
        self._tools: dict[tuple[int, ...], tuple[Sequence[ToolSpec], list[dict[str, Any]]]] = {}

    def message(self, message: Message) -> dict[str, Any]:
        """A message as templates read it. A sampled one is its text alone, so the model is shown what it wrote."""
        size = len(message.content) + len(message.tool_call_id or "") + len(message.name or "")
        show = self._known if size <= SHORT_TEXT else self._shown
        shown = show(message.role, message.content, message.tool_call_id, message.name)
        if not message.tool_calls or message.sampled:
            return shown
        return {**shown, "tool_calls": [self._call(call) for call in message.tool_calls]}

    def _shown(self, role: str, content: str, tool_call_id: str | None, name: str | None) -> dict[str, Any]:
        divide = self.spoken if role == "assistant" else self.tagged if role == "tool" else self.prompt
        shown = {"role": self.tagged(role), "content": divide(content)}
        if tool_call_id is not None:
            shown["tool_call_id"] = self.tagged(tool_call_id)
        if name is not None:
            shown["name"] = self.tagged(name)
        return shown

    def _call(self, call: ToolCall) -> dict[str, Any]:
        function = _within({"name": call.name, "arguments": call.arguments}, self.tagged)
        return {"id": self.tagged(call.id), "type": "function", "function": function}

    def tools(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """Tools as templates read them; those of an agent stay the same, so they are looked through once."""
        key = tuple(map(id, tools))
        if (known := self._tools.get(key)) is not None:
            return known[1]
        shown = [self._tool(tool) for tool in tools]
        if len(repr(shown)) <= SHORT_TOOLS:
            if len(self._tools) >= KNOWN_TOOLS:
                self._tools.clear()
            self._tools[key] = (tuple(tools), shown)  # holding the objects keeps their ids theirs
        return shown

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """A template's own arguments: texts in them are no more control than those of a prompt."""
        return {name: _within(value, self.prompt) for name, value in given.items()} if given else given

    def _tool(self, tool: ToolSpec) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": _within(function, self.tagged)}


PLAIN = Quoting()
"""Of a model without control tokens: everything stays as it is."""


def _within(value: Any, divide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return divide(value)
    if isinstance(value, dict):
        return {_within(key, divide): _within(item, divide) for key, item in value.items()}
    return [_within(item, divide) for item in value] if isinstance(value, list | tuple) else value


def any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of `texts`. What they begin with is tried once: some models have thousands."""
    heads: dict[str, list[str]] = {}
    for text in sorted(texts):
        heads.setdefault(text[:1], []).append(text)
    may_end = heads.pop("", None) is not None
    parts = "|".join(_branches(heads.values()))
    return f"(?:{parts}){'?' if may_end else ''}" if parts else ""


def _branches(groups: Iterable[list[str]]) -> Iterator[str]:
    for group in groups:
        least, most = min(group), max(group)  # what these share, all share
        common = least[: next((i for i, letter in enumerate(least) if letter != most[i]), len(least))]
        yield re.escape(common) + any_of(text[len(common) :] for text in group)
