"""Text between tags, found in one pass: a model may open a tag ten thousand times and close none."""

from __future__ import annotations

import re


def last_tagged(text: str, *names: str) -> str | None:
    """What stands in the last of these tags that is closed; None where none is.

    Example:
        last_tagged("<answer>1</answer> or <answer>2</answer>", "answer")      # '2'
    """
    marks = list(re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text))
    closes = {mark[2]: mark.start() for mark in marks if mark[1]}  # the last close of each
    found, opened = None, None
    for mark in marks:
        if opened is None and not mark[1] and closes.get(mark[2], -1) > mark.start():
            opened = mark
        elif opened is not None and mark[1] and mark[2] == opened[2]:
            found, opened = text[opened.end() : mark.start()], None
    return found
