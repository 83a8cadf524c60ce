"""From tokens to text while they come: no half characters, nothing behind a stop text, no half tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.chat.renderer import Renderer

HALF = "\ufffd"
"""How a decoder writes bytes that are no character yet."""


class Detokenizer:
    """The text of a completion, as far as it is certain.

    Each new text is the difference of two decodings that begin a little earlier, at the last place that was certain: a
    token's text may depend on the one before it. The pieces joined are the decoding of the whole.

    Example:
        words = Detokenizer(renderer)
        words.add([tokens of "caf"]), words.add([first byte of "é"]), words.add([its second]), words.rest()
        # "caf", "", "é", ""
    """

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self._ids: list[int] = []
        self._from, self._told = 0, 0
        """Tokens before the window, and those whose text has been given."""

    def add(self, ids: Sequence[int]) -> str:
        """The text that these make certain."""
        self._ids += ids
        now = self.renderer.decode(self._ids[self._from :])
        if now.endswith(HALF):
            return ""
        return self._tell(now)

    def rest(self) -> str:
        """What was never certain; the completion is over."""
        return self._tell(self.renderer.decode(self._ids[self._from :]))

    def _tell(self, now: str) -> str:
        before = self.renderer.decode(self._ids[self._from : self._told])
        self._from, self._told = self._told, len(self._ids)
        return now[len(before) :]


class Until:
    """Lets text through until one of some texts begins; what may be the beginning of one waits.

    Example:
        until = Until(["</answer>"])
        until.add("42</ans"), until.add("wer> and"), until.found      # "42", "", "</answer>"
    """

    def __init__(self, ends: Sequence[str]):
        self.ends = tuple(ends)
        self.held = ""
        """What waits; once an end was found, the end and all that came after it."""
        self.found: str | None = None

    def add(self, text: str) -> str:
        self.held += text
        if self.found is not None or not self.ends:
            return "" if self.found is not None else self.let_go()
        places = [(at, -len(end), end) for end in self.ends if (at := self.held.find(end)) >= 0]
        if places:
            at, _, self.found = min(places)
        else:
            at = len(self.held) - self._beginning()
        out, self.held = self.held[:at], self.held[at:]
        return out

    def let_go(self) -> str:
        """What waits, as text after all."""
        out, self.held = self.held, ""
        return out

    def _beginning(self) -> int:
        """Characters at the end that may be the beginning of an end."""
        longest = max(map(len, self.ends)) - 1
        sizes = range(min(longest, len(self.held)), 0, -1)
        return next((size for size in sizes if any(end.startswith(self.held[-size:]) for end in self.ends)), 0)
