"""The form of what an agent wrote: an answer where one is expected, and no call that could not be read."""

from __future__ import annotations

import re

from arborl.types import Episode

BROKEN = ("tool/malformed", "tool/unknown_tool", "tool/arguments")
"""Calls that failed because of how they were written."""


class Format:
    """`good` where the form is right, else `bad`.

    Give it little weight beside a reward for being right: form alone is easily learned, and is not the point.

    Example:
        rewards: [equal, {name: format, weight: 0.1, args: {pattern: "<think>.*</think>\\\\s*<answer>.*</answer>"}}]

    Args:
        pattern: a regular expression that the whole last message must match, white space around it aside; a dot is any
            character. Without one, the message must have one `<answer>…</answer>`, closed and not empty.
        tools: a tool call that was malformed, unknown or had wrong arguments, anywhere in the episode, spoils it.
        good, bad: what is given.
    """

    name = "format"

    def __init__(self, pattern: str | None = None, tools: bool = True, good: float = 1.0, bad: float = 0.0):
        try:
            self.pattern = re.compile(pattern, re.DOTALL) if pattern is not None else None
        except re.error as error:
            raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
        self.tools, self.good, self.bad = tools, good, bad

    async def __call__(self, episode: Episode) -> float:
        broken = self.tools and any(episode.metrics.get(name, 0.0) > 0 for name in BROKEN)
        return self.good if not broken and self._fits(episode.answer.strip()) else self.bad

    def _fits(self, text: str) -> bool:
        if self.pattern is not None:
            return self.pattern.fullmatch(text) is not None
        inside = text.partition("<answer>")[2].partition("</answer>")[0]
        return text.count("<answer>") == text.count("</answer>") == 1 and bool(inside.strip())
