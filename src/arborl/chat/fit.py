"""Whether messages can fit a context at all, told before they are tokenised."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.chat.tokenizer import TextTokenizer
from arborl.types import Message

USUAL_CHARS, SLACK = 8, 16
"""Characters of a token that no text has on average, and tokens that a cut may add."""


def cannot_fit(messages: Sequence[Message], tokenizer: TextTokenizer, most: int) -> bool:
    """Whether what others than the model wrote has more than `most` tokens, found without tokenising all of it.

    A page of megabytes would hold up every other episode for seconds, to find that it does not fit. Its beginning says
    so in milliseconds; only where that is made of long tokens is more of it read, twice as much each time.
    """
    written = [message.content for message in messages if message.role != "assistant"]
    size, end = sum(map(len, written)), USUAL_CHARS * most
    text = "".join(written) if size > end else ""
    while end < size:
        if len(tokenizer.encode(text[:end])) > most + SLACK:
            return True
        end *= 2
    return False
