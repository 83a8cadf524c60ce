"""A page of text as a picture, for environments that have no board: headline, lines, and brackets as buttons."""

from __future__ import annotations

import re
import textwrap
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from arborl.envs.tiles import Colour

PAPER: Colour = (250, 248, 243)
INK: Colour = (44, 52, 66)
HEAD: Colour = (66, 104, 178)
BUTTON: Colour = (222, 231, 246)
LABEL: Colour = (38, 74, 140)
WIDTH, MARGIN, SIZE = 480, 16, 15
"""Pixels; height follows from the text, and is never below `LEAST`."""
LEAST = 240
COLUMNS = 58


def write(text: str, title: str = "") -> Image.Image:
    """Draw the text; what stands in square brackets is drawn as a button.

    Example:
        write("Find me a shirt.\\n[Search]", "Shop").save("page.png")
    """
    lines = [part for line in text.splitlines() for part in (textwrap.wrap(line, COLUMNS) or [""])]
    step = SIZE + 8
    height = max(LEAST, MARGIN * 2 + step * (len(lines) + (2 if title else 0)))
    image = Image.new("RGB", (WIDTH, height), PAPER)
    brush = ImageDraw.Draw(image)
    top = MARGIN
    if title:
        brush.rectangle((0, 0, WIDTH, MARGIN + step), fill=HEAD)
        brush.text((MARGIN, MARGIN / 2), title, PAPER, _font(SIZE + 3))
        top += step + MARGIN // 2
    for line in lines:
        _line(brush, line, top)
        top += step
    return image


def _line(brush: ImageDraw.ImageDraw, line: str, top: float) -> None:
    left, font = float(MARGIN), _font(SIZE)
    for part in re.split(r"(\[[^\]]*\])", line):
        button = part.startswith("[") and part.endswith("]")
        text = part[1:-1] if button else part
        width = brush.textlength(text, font)
        if button:
            brush.rounded_rectangle((left - 1, top - 2, left + width + 9, top + SIZE + 4), 5, fill=BUTTON)
            brush.text((left + 4, top), text, LABEL, font)
            width += 8
        else:
            brush.text((left, top), text, INK, font)
        left += width


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
