"""First prompts of episodes: the episodes of a group have the same one, which is rendered and tokenised once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from arborl.chat.control import Joined
from arborl.chat.growing import Growing, Talk
from arborl.tokens import Tokens
from arborl.types import Message, ToolSpec

if TYPE_CHECKING:
    from arborl.chat.renderer import Renderer

REMEMBERED, SHORT = 1024, 65_536
"""Openings that are kept, the least recently used leave first; longer ones (in characters) are not kept."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A conversation before the model's first reply."""

    shown: Joined
    tokens: Tokens
    talk: Talk | None
    """What later renders go on from; None where the template is always rendered whole."""


class SameTools:
    """Tools as a key: those of an agent are the same objects in every episode."""

    __slots__ = ("ids", "tools")

    def __init__(self, tools: Sequence[ToolSpec]):
        self.tools, self.ids = tuple(tools), tuple(map(id, tools))  # holding the objects keeps their ids theirs

    def __hash__(self) -> int:
        return hash(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameTools) and self.ids == other.ids


class Openings:
    """The openings of one renderer.

    Example:
        openings = Openings(renderer)
        opening = openings.find(messages, tools)      # None for one that is not kept
    """

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._known = lru_cache(REMEMBERED)(self._make)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Opening | None:
        """The opening with these messages. Calls that were written by hand may change, so they are rendered anew."""
        if any(message.tool_calls for message in messages):
            return None
        if sum([len(message.content) for message in messages]) > SHORT:
            return None
        return self._known(tuple(messages), SameTools(tools))

    def _make(self, messages: tuple[Message, ...], tools: SameTools) -> Opening:
        growing = Growing(self.renderer)
        shown = growing.render(messages, tools.tools)
        return Opening(shown, Tokens(self.renderer.encode(shown.after(0))), growing.latest)
