"""A Sokoban board as a picture, drawn with the pen that draws the lake."""

from __future__ import annotations

from functools import lru_cache

from PIL import Image, ImageDraw

from arborl.envs.tiles import SCALE, Colour, Pen

BRICK: Colour = (112, 86, 78)
MORTAR: Colour = (78, 60, 56)
STONE: Colour = (226, 218, 204)
SEAM: Colour = (205, 196, 180)
MARK: Colour = (206, 84, 72)
WOOD: Colour = (196, 144, 84)
PLANK: Colour = (150, 104, 58)
HOME: Colour = (104, 168, 96)
HOME_PLANK: Colour = (66, 122, 62)
COAT: Colour = (66, 104, 178)
SKIN: Colour = (252, 222, 196)
INK: Colour = (44, 52, 66)


def paint(board: str, cell: int = 48) -> Image.Image:
    """Draw the board that `Sokoban.render` wrote.

    Example:
        paint("####\\n#PX#\\n#_O#\\n####").save("level.png")
    """
    rows = board.splitlines()
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"not a board of equal rows: {board!r}")
    image = Image.new("RGB", (cell * len(rows[0]), cell * len(rows)), STONE)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            image.paste(_tile(symbol, cell), (x * cell, y * cell))
    return image


@lru_cache(maxsize=64)
def _tile(symbol: str, cell: int) -> Image.Image:
    """One cell, drawn larger and then shrunk."""
    big = cell * SCALE
    image = Image.new("RGB", (big, big), STONE)
    pen = Pen(ImageDraw.Draw(image), 0, 0, big)
    for layer in LAYERS[symbol]:
        layer(pen)
    return image.resize((cell, cell), Image.Resampling.LANCZOS)


def _floor(pen: Pen) -> None:
    pen.box(0, 0, 1, 1, SEAM)
    pen.box(0.015, 0.015, 0.985, 0.985, STONE)


def _wall(pen: Pen) -> None:
    pen.box(0, 0, 1, 1, MORTAR)
    for row in range(4):
        for start in (-0.25, 0.25, 0.75) if row % 2 else (0.0, 0.5):
            left, right = max(start, 0) + 0.02, min(start + 0.5, 1) - 0.02
            pen.box(left, row / 4 + 0.02, right, (row + 1) / 4 - 0.02, BRICK, 0.02)


def _target(pen: Pen) -> None:
    pen.oval(0.5, 0.5, 0.46, 0.46, MARK)
    pen.oval(0.5, 0.5, 0.32, 0.32, STONE)
    pen.oval(0.5, 0.5, 0.16, 0.16, MARK)


def _crate(pen: Pen, wood: Colour, plank: Colour) -> None:
    pen.box(0.08, 0.08, 0.92, 0.92, plank, 0.05)
    pen.box(0.15, 0.15, 0.85, 0.85, wood)
    pen.line([(0.17, 0.83), (0.83, 0.17)], plank, 0.1)
    pen.line([(0.17, 0.17), (0.83, 0.83)], plank, 0.1)


def _box(pen: Pen) -> None:
    _crate(pen, WOOD, PLANK)


def _box_home(pen: Pen) -> None:
    _crate(pen, HOME, HOME_PLANK)


def _player(pen: Pen) -> None:
    pen.box(0.3, 0.5, 0.7, 0.88, COAT, 0.12)
    pen.oval(0.5, 0.33, 0.38, 0.38, SKIN)
    pen.box(0.3, 0.12, 0.7, 0.25, COAT, 0.06)
    for side in (-1, 1):
        pen.oval(0.5 + side * 0.08, 0.34, 0.05, 0.07, INK)


LAYERS = {
    "#": (_wall,),
    "_": (_floor,),
    "O": (_floor, _target),
    "X": (_floor, _box),
    "√": (_floor, _box_home),
    "P": (_floor, _player),
    "S": (_floor, _target, _player),
}
