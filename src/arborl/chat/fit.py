"""Whether messages can fit a context at all, told before they are tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from arborl.chat.control import Rendered
from arborl.chat.tokenizer import TextTokenizer
from arborl.types import Message, ToolSpec

if TYPE_CHECKING:
    from arborl.chat.renderer import Renderer

USUAL_CHARS, SLACK = 8, 16
"""Characters of a token that no text has on average, and tokens that a cut may add."""
SHORTER = 4
"""Times that a template's own form of tools may be shorter than JSON."""


def cannot_fit(messages: Sequence[Message], tokenizer: TextTokenizer, most: int) -> bool:
    """Whether what others than the model wrote has more than `most` tokens, found without tokenising all of it."""
    written = [message.content for message in messages if message.role != "assistant"]
    if sum(map(len, written)) <= USUAL_CHARS * most:
        return False
    return has_more_tokens("".join(written), tokenizer.encode, most)


def tools_cannot_fit(
    messages: Sequence[Message], tools: Sequence[ToolSpec], tokenizer: TextTokenizer, most: int
) -> bool:
    """Whether tools and tool calls have far more than `most` tokens in any form that a template may give them."""
    told = tool_text(messages, tools)
    return len(told) > USUAL_CHARS * most and has_more_tokens(told, tokenizer.encode, SHORTER * most)


def tool_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    """Tools and tool calls as JSON."""
    calls = [[call.name, call.arguments] for message in messages for call in message.tool_calls]
    specs = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return json.dumps([calls, specs], ensure_ascii=False, default=str) if calls or specs else ""


def rendered_cannot_fit(shown: Rendered, renderer: Renderer, most: int) -> bool:
    """Whether a rendered conversation has more than `most` tokens, found without tokenising all of it."""
    return has_more_tokens(shown.text, lambda part: renderer.encode(shown.until(len(part))), most)


def has_more_tokens(text: str, encode: Callable[[str], Sequence[int]], most: int) -> bool:
    """Whether a text has more than `most` tokens, found without tokenising all of it.

    A page of megabytes would hold up every other episode for seconds, to find that it does not fit. Its beginning says
    so in milliseconds; only where that is made of long tokens is more of it read, twice as much each time.
    """
    end = USUAL_CHARS * most
    while end < len(text):
        if len(encode(text[:end])) > most + SLACK:
            return True
        end *= 2
    return False
