"""A FrozenLake grid as a picture: drawn, not pasted, so it needs no files and any size of cell will do."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageDraw

from arborl.seeds import generator

Colour = tuple[int, int, int]

SCALE = 3
"""Drawn this much larger and then shrunk: that is the anti-aliasing."""

ICE: Colour = (222, 238, 247)
FROST: Colour = (255, 255, 255)
SEAM: Colour = (190, 214, 229)
SNOW: Colour = (245, 250, 253)
WATER: Colour = (24, 56, 102)
DEEP: Colour = (13, 34, 70)
SHEEN: Colour = (74, 122, 178)
POLE: Colour = (92, 74, 60)
FLAG: Colour = (226, 76, 66)
COAT: Colour = (242, 148, 42)
WON: Colour = (62, 168, 92)
LOST: Colour = (206, 64, 70)
SKIN: Colour = (252, 222, 196)
INK: Colour = (44, 52, 66)
SHADOW: Colour = (176, 201, 218)


def paint(text_grid: str, cell: int = 48) -> Image.Image:
    """Draw the grid that `FrozenLake.render` wrote.

    Args:
        text_grid: rows of P (player), _ (ice), O (hole), G (goal), X (player in a hole), √ (player at the goal).
        cell: pixels a side of one cell.

    Example:
        paint("P_\\nOG").save("lake.png")
    """
    rows = text_grid.strip("\n").splitlines()
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"not a grid of equal rows: {text_grid!r}")
    big = cell * SCALE
    image = Image.new("RGB", (big * len(rows[0]), big * len(rows)), SEAM)
    brush = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            pen = Pen(brush, x * big, y * big, big)
            _ice(pen, x, y)
            for layer in LAYERS.get(symbol, ()):
                layer(pen)
    return image.resize((cell * len(rows[0]), cell * len(rows)), Image.Resampling.LANCZOS)


@dataclass(frozen=True, slots=True)
class Pen:
    """Draws in one cell, in coordinates from 0 to 1."""

    brush: ImageDraw.ImageDraw
    left: float
    top: float
    side: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + x * self.side, self.top + y * self.side

    def oval(self, x: float, y: float, across: float, down: float, fill: Colour) -> None:
        self.brush.ellipse((*self.at(x - across / 2, y - down / 2), *self.at(x + across / 2, y + down / 2)), fill=fill)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: Colour, round_by: float = 0.0) -> None:
        self.brush.rounded_rectangle((*self.at(x0, y0), *self.at(x1, y1)), round_by * self.side, fill=fill)

    def shape(self, points: list[tuple[float, float]], fill: Colour) -> None:
        self.brush.polygon([self.at(x, y) for x, y in points], fill=fill)

    def line(self, points: list[tuple[float, float]], fill: Colour, width: float) -> None:
        self.brush.line([self.at(x, y) for x, y in points], fill, max(1, round(width * self.side)), joint="curve")


def _ice(pen: Pen, x: int, y: int) -> None:
    """A slab of ice; its shade and scratches follow from its place, so frames of an episode match."""
    chance = generator(0, "ice", x, y)
    shade = int(chance.integers(-7, 4))
    pen.box(0.012, 0.012, 0.988, 0.988, _lighter(ICE, shade), 0.07)
    for _ in range(2):
        start_x, start_y = chance.uniform(0.12, 0.68), chance.uniform(0.2, 0.88)
        long = chance.uniform(0.08, 0.2)
        pen.line([(start_x, start_y), (start_x + long, start_y - long * 0.7)], _mix(ICE, FROST, 0.75), 0.018)


def _hole(pen: Pen) -> None:
    pen.oval(0.5, 0.5, 0.84, 0.84, SNOW)
    pen.oval(0.5, 0.5, 0.74, 0.74, SHADOW)
    pen.oval(0.5, 0.52, 0.7, 0.7, WATER)
    pen.oval(0.5, 0.56, 0.58, 0.56, DEEP)
    pen.brush.arc((*pen.at(0.22, 0.23), *pen.at(0.78, 0.79)), 200, 262, SHEEN, max(1, round(0.03 * pen.side)))


def _flag(pen: Pen, left: float = 0.36, top: float = 0.14) -> None:
    pen.oval(left + 0.02, 0.85, 0.42, 0.13, SHADOW)
    pen.oval(left + 0.02, 0.83, 0.32, 0.11, SNOW)
    pen.box(left, top, left + 0.045, 0.84, POLE, 0.02)
    pen.oval(left + 0.022, top, 0.085, 0.085, (240, 196, 72))
    wave = [(0.0, 0.03), (0.16, 0.0), (0.28, 0.06), (0.42, 0.03), (0.36, 0.16), (0.42, 0.3), (0.28, 0.33), (0.16, 0.27)]
    pen.shape([(left + 0.045 + x, top + 0.04 + y) for x, y in [*wave, (0.0, 0.3)]], FLAG)
    dark = [(0.16, 0.0), (0.28, 0.06), (0.28, 0.33), (0.16, 0.27)]
    pen.shape([(left + 0.045 + x, top + 0.04 + y) for x, y in dark], _lighter(FLAG, -24))


def _figure(pen: Pen, coat: Colour, x: float = 0.5, size: float = 1.0, arms_up: bool = False) -> None:
    """Someone in a hooded coat, feet at the lower edge."""

    def place(dx: float, dy: float) -> tuple[float, float]:
        return x + dx * size, 0.84 + (dy - 0.84) * size

    pen.oval(*place(0, 0.85), 0.46 * size, 0.12 * size, SHADOW)
    for side in (-1, 1):
        pen.box(*place(side * 0.085 - 0.06, 0.7), *place(side * 0.085 + 0.06, 0.86), INK, 0.04 * size)
        hand = place(side * 0.3, 0.36) if arms_up else place(side * 0.24, 0.66)
        pen.line([place(side * 0.12, 0.5), hand], _lighter(coat, -22), 0.095 * size)
        pen.oval(*hand, 0.11 * size, 0.11 * size, INK)
    pen.box(*place(-0.185, 0.42), *place(0.185, 0.77), coat, 0.13 * size)
    pen.box(*place(-0.185, 0.62), *place(0.185, 0.67), _lighter(coat, -30))
    pen.oval(*place(0, 0.31), 0.4 * size, 0.4 * size, coat)
    pen.oval(*place(0, 0.325), 0.29 * size, 0.28 * size, SKIN)
    for side in (-1, 1):
        pen.oval(*place(side * 0.06, 0.315), 0.042 * size, 0.055 * size, INK)
    pen.oval(*place(0, 0.1), 0.1 * size, 0.1 * size, SNOW)


def _player(pen: Pen) -> None:
    _figure(pen, COAT)


def _drowned(pen: Pen) -> None:
    """The water has turned red around them; head and raised arms are all that shows."""
    pen.oval(0.5, 0.52, 0.7, 0.7, (120, 32, 44))
    pen.oval(0.5, 0.56, 0.58, 0.56, (78, 20, 34))
    for side in (-1, 1):
        pen.line([(0.5 + side * 0.12, 0.66), (0.5 + side * 0.23, 0.4)], _lighter(LOST, -22), 0.085)
        pen.oval(0.5 + side * 0.23, 0.39, 0.1, 0.1, INK)
    pen.oval(0.5, 0.5, 0.34, 0.36, LOST)
    pen.oval(0.5, 0.515, 0.245, 0.25, SKIN)
    for side in (-1, 1):
        pen.line([(0.5 + side * 0.055 - 0.022, 0.485), (0.5 + side * 0.055 + 0.022, 0.53)], INK, 0.018)
        pen.line([(0.5 + side * 0.055 + 0.022, 0.485), (0.5 + side * 0.055 - 0.022, 0.53)], INK, 0.018)
    pen.brush.chord((*pen.at(0.22, 0.28), *pen.at(0.78, 0.84)), 25, 155, (96, 24, 38))


def _arrived(pen: Pen) -> None:
    """A green slab, the flag, and someone glad beside it."""
    pen.box(0.012, 0.012, 0.988, 0.988, (200, 236, 206), 0.07)
    _flag(pen, left=0.51, top=0.12)
    _figure(pen, WON, x=0.33, size=0.84, arms_up=True)


LAYERS = {"P": (_player,), "O": (_hole,), "G": (_flag,), "X": (_hole, _drowned), "√": (_arrived,)}


def _lighter(colour: Colour, by: int) -> Colour:
    red, green, blue = (min(max(part + by, 0), 255) for part in colour)
    return red, green, blue


def _mix(one: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue
