"""How much of a tool's answer the model reads: a limit in characters and in tokens, and a cut that can be seen."""

from __future__ import annotations

import re

from arborl.tools.injection import Tokens

PIECE = re.compile(r"[^\W\d_]{1,4}|\s+|.", re.DOTALL)
"""What counts as a token where no tokenizer is known: up to four letters, a run of white space, or any one sign."""


def cut(text: str, max_chars: int, max_tokens: int, tokenizer: Tokens | None = None) -> str:
    """As much of `text` as fits both limits, and then a word on how many characters are gone.

    Example:
        cut("x" * 5130, 10, 512)      # 'xxxxxxxxxx… [cut: 5,120 more characters]'
    """
    kept = within(text[:max_chars], max_tokens, tokenizer)
    return text if len(kept) == len(text) else f"{kept}… [cut: {len(text) - len(kept):,} more characters]"


def within(text: str, max_tokens: int, tokenizer: Tokens | None) -> str:
    """The longest beginning of `text` of at most `max_tokens` tokens.

    Found by halving, since no tokenizer promises that the text of its first tokens is the beginning of the text.
    """
    if 4 * len(text) <= max_tokens or count(text, tokenizer) <= max_tokens:  # a character is four tokens at most
        return text
    fits, over = 0, len(text)
    while over - fits > 1:
        middle = (fits + over) // 2
        if count(text[:middle], tokenizer) <= max_tokens:
            fits = middle
        else:
            over = middle
    return text[:fits]


def count(text: str, tokenizer: Tokens | None) -> int:
    """Tokens of `text`; a careful guess without a tokenizer."""
    return len(tokenizer.encode(text)) if tokenizer is not None else sum(1 for _ in PIECE.finditer(text))
