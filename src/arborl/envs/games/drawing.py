"""Pictures of the environments, drawn with Pillow: pages of text, FrozenLake, Sokoban, rooms."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from PIL import Image, ImageDraw, ImageFont

from arborl.envs.games.rooms_map import DIRECTIONS, TREASURE, RoomsMap, RoomsState
from arborl.seeds import generator

Color = tuple[int, int, int]
SCALE = 3
"""Oversampling factor: images are drawn larger and then reduced (anti-aliasing)."""

PAPER: Color = (250, 248, 243)
INK: Color = (44, 52, 66)
BLUE_COAT: Color = (66, 104, 178)
BUTTON: Color = (222, 231, 246)
LABEL: Color = (38, 74, 140)
WIDTH, MARGIN, SIZE = 480, 16, 15
MIN_HEIGHT = 240
COLUMNS = 58


@dataclass(frozen=True, slots=True)
class CellCanvas:
    """Draws in one cell of a board, in coordinates from 0 to 1."""

    draw: ImageDraw.ImageDraw
    left: float
    top: float
    side: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + x * self.side, self.top + y * self.side

    def oval(self, x: float, y: float, across: float, down: float, fill: Color) -> None:
        self.draw.ellipse((*self.at(x - across / 2, y - down / 2), *self.at(x + across / 2, y + down / 2)), fill=fill)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: Color, radius: float = 0.0) -> None:
        self.draw.rounded_rectangle((*self.at(x0, y0), *self.at(x1, y1)), radius * self.side, fill=fill)

    def shape(self, points: list[tuple[float, float]], fill: Color) -> None:
        self.draw.polygon([self.at(x, y) for x, y in points], fill=fill)

    def line(self, points: list[tuple[float, float]], fill: Color, width: float) -> None:
        self.draw.line([self.at(x, y) for x, y in points], fill, max(1, round(width * self.side)), joint="curve")


def draw_text_page(text: str, title: str = "") -> Image.Image:
    """A page of text as an image; text in square brackets is drawn as a button."""
    lines = [part for line in text.splitlines() for part in (textwrap.wrap(line, COLUMNS) or [""])]
    step = SIZE + 8
    height = max(MIN_HEIGHT, MARGIN * 2 + step * (len(lines) + (2 if title else 0)))
    image = Image.new("RGB", (WIDTH, height), PAPER)
    draw = ImageDraw.Draw(image)
    top = MARGIN
    if title:
        draw.rectangle((0, 0, WIDTH, MARGIN + step), fill=BLUE_COAT)
        draw.text((MARGIN, MARGIN / 2), title, PAPER, _font(SIZE + 3))
        top += step + MARGIN // 2
    for line in lines:
        _line(draw, line, top)
        top += step
    return image


def _line(draw: ImageDraw.ImageDraw, line: str, top: float) -> None:
    left, font = float(MARGIN), _font(SIZE)
    for part in re.split(r"(\[[^\]]*\])", line):
        button = part.startswith("[") and part.endswith("]")
        text = part[1:-1] if button else part
        width = draw.textlength(text, font)
        if button:
            draw.rounded_rectangle((left - 1, top - 2, left + width + 9, top + SIZE + 4), 5, fill=BUTTON)
            draw.text((left + 4, top), text, LABEL, font)
            width += 8
        else:
            draw.text((left, top), text, INK, font)
        left += width


@lru_cache(maxsize=8)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _equal_rows(board: str) -> list[str]:
    rows = board.strip("\n").splitlines()
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"not a board of equal rows: {board!r}")
    return rows


# ------------------------------------------------------------------------------------------------ FrozenLake

ICE: Color = (222, 238, 247)
FROST: Color = (247, 251, 253)
LAKE_SEAM: Color = (190, 214, 229)
SNOW: Color = (245, 250, 253)
WATER: Color = (24, 56, 102)
DEEP: Color = (13, 34, 70)
SHEEN: Color = (74, 122, 178)
POLE: Color = (92, 74, 60)
FLAG: Color = (226, 76, 66)
LAKE_COAT: Color = (242, 148, 42)
WON: Color = (62, 168, 92)
LOST: Color = (206, 64, 70)
SKIN: Color = (252, 222, 196)
SHADOW: Color = (176, 201, 218)


def draw_frozen_lake(text_grid: str, cell: int = 48) -> Image.Image:
    """The output of `FrozenLake.render` as an image."""
    rows = _equal_rows(text_grid)
    big = cell * SCALE
    image = Image.new("RGB", (big * len(rows[0]), big * len(rows)), LAKE_SEAM)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            canvas = CellCanvas(draw, x * big, y * big, big)
            _ice(canvas, x, y)
            for layer in LAKE_LAYERS.get(symbol, ()):
                layer(canvas)
    return image.resize((cell * len(rows[0]), cell * len(rows)), Image.Resampling.LANCZOS)


def _ice(canvas: CellCanvas, x: int, y: int) -> None:
    """An ice cell; its shade depends on its position, so that frames of an episode match."""
    rng = generator(0, "ice", x, y)
    shade = int(rng.integers(-7, 4))
    canvas.box(0.012, 0.012, 0.988, 0.988, _lighter(ICE, shade), 0.07)
    for _ in range(2):
        start_x, start_y = rng.uniform(0.12, 0.68), rng.uniform(0.2, 0.88)
        long = rng.uniform(0.08, 0.2)
        canvas.line([(start_x, start_y), (start_x + long, start_y - long * 0.7)], FROST, 0.018)


def _hole(canvas: CellCanvas) -> None:
    canvas.oval(0.5, 0.5, 0.84, 0.84, SNOW)
    canvas.oval(0.5, 0.5, 0.74, 0.74, SHADOW)
    canvas.oval(0.5, 0.52, 0.7, 0.7, WATER)
    canvas.oval(0.5, 0.56, 0.58, 0.56, DEEP)
    canvas.draw.arc(
        (*canvas.at(0.22, 0.23), *canvas.at(0.78, 0.79)), 200, 262, SHEEN, max(1, round(0.03 * canvas.side))
    )


def _flag(canvas: CellCanvas, left: float = 0.36, top: float = 0.14) -> None:
    canvas.oval(left + 0.02, 0.85, 0.42, 0.13, SHADOW)
    canvas.oval(left + 0.02, 0.83, 0.32, 0.11, SNOW)
    canvas.box(left, top, left + 0.045, 0.84, POLE, 0.02)
    canvas.oval(left + 0.022, top, 0.085, 0.085, (240, 196, 72))
    wave = [(0.0, 0.03), (0.16, 0.0), (0.28, 0.06), (0.42, 0.03), (0.36, 0.16), (0.42, 0.3), (0.28, 0.33), (0.16, 0.27)]
    canvas.shape([(left + 0.045 + x, top + 0.04 + y) for x, y in [*wave, (0.0, 0.3)]], FLAG)
    dark = [(0.16, 0.0), (0.28, 0.06), (0.28, 0.33), (0.16, 0.27)]
    canvas.shape([(left + 0.045 + x, top + 0.04 + y) for x, y in dark], _lighter(FLAG, -24))


def _figure(canvas: CellCanvas, coat: Color, x: float = 0.5, size: float = 1.0, arms_up: bool = False) -> None:
    def place(dx: float, dy: float) -> tuple[float, float]:
        return x + dx * size, 0.84 + (dy - 0.84) * size

    canvas.oval(*place(0, 0.85), 0.46 * size, 0.12 * size, SHADOW)
    for side in (-1, 1):
        canvas.box(*place(side * 0.085 - 0.06, 0.7), *place(side * 0.085 + 0.06, 0.86), INK, 0.04 * size)
        hand = place(side * 0.3, 0.36) if arms_up else place(side * 0.24, 0.66)
        canvas.line([place(side * 0.12, 0.5), hand], _lighter(coat, -22), 0.095 * size)
        canvas.oval(*hand, 0.11 * size, 0.11 * size, INK)
    canvas.box(*place(-0.185, 0.42), *place(0.185, 0.77), coat, 0.13 * size)
    canvas.box(*place(-0.185, 0.62), *place(0.185, 0.67), _lighter(coat, -30))
    canvas.oval(*place(0, 0.31), 0.4 * size, 0.4 * size, coat)
    canvas.oval(*place(0, 0.325), 0.29 * size, 0.28 * size, SKIN)
    for side in (-1, 1):
        canvas.oval(*place(side * 0.06, 0.315), 0.042 * size, 0.055 * size, INK)
    canvas.oval(*place(0, 0.1), 0.1 * size, 0.1 * size, SNOW)


def _lost_player(canvas: CellCanvas) -> None:
    canvas.oval(0.5, 0.52, 0.7, 0.7, (120, 32, 44))
    canvas.oval(0.5, 0.56, 0.58, 0.56, (78, 20, 34))
    for side in (-1, 1):
        canvas.line([(0.5 + side * 0.12, 0.66), (0.5 + side * 0.23, 0.4)], _lighter(LOST, -22), 0.085)
        canvas.oval(0.5 + side * 0.23, 0.39, 0.1, 0.1, INK)
    canvas.oval(0.5, 0.5, 0.34, 0.36, LOST)
    canvas.oval(0.5, 0.515, 0.245, 0.25, SKIN)
    for side in (-1, 1):
        canvas.line([(0.5 + side * 0.055 - 0.022, 0.485), (0.5 + side * 0.055 + 0.022, 0.53)], INK, 0.018)
        canvas.line([(0.5 + side * 0.055 + 0.022, 0.485), (0.5 + side * 0.055 - 0.022, 0.53)], INK, 0.018)
    canvas.draw.chord((*canvas.at(0.22, 0.28), *canvas.at(0.78, 0.84)), 25, 155, (96, 24, 38))


def _player_at_goal(canvas: CellCanvas) -> None:
    canvas.box(0.012, 0.012, 0.988, 0.988, (200, 236, 206), 0.07)
    _flag(canvas, left=0.51, top=0.12)
    _figure(canvas, WON, x=0.33, size=0.84, arms_up=True)


LAKE_LAYERS: dict[str, tuple[Callable[[CellCanvas], None], ...]] = {
    "P": (partial(_figure, coat=LAKE_COAT),),
    "O": (_hole,),
    "G": (_flag,),
    "X": (_hole, _lost_player),
    "√": (_player_at_goal,),
}


def _lighter(colour: Color, by: int) -> Color:
    red, green, blue = (min(max(part + by, 0), 255) for part in colour)
    return red, green, blue


# ------------------------------------------------------------------------------------------------ Sokoban

BRICK: Color = (112, 86, 78)
MORTAR: Color = (78, 60, 56)
STONE: Color = (226, 218, 204)
SEAM: Color = (205, 196, 180)
MARK: Color = (206, 84, 72)
WOOD: Color = (196, 144, 84)
PLANK: Color = (150, 104, 58)
DONE_WOOD: Color = (104, 168, 96)
DONE_PLANK: Color = (66, 122, 62)


def draw_sokoban(board: str, cell: int = 48) -> Image.Image:
    """The output of `Sokoban.render` as an image."""
    rows = _equal_rows(board)
    image = Image.new("RGB", (cell * len(rows[0]), cell * len(rows)), STONE)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            image.paste(_sokoban_cell(symbol, cell), (x * cell, y * cell))
    return image


@lru_cache(maxsize=64)
def _sokoban_cell(symbol: str, cell: int) -> Image.Image:
    big = cell * SCALE
    image = Image.new("RGB", (big, big), STONE)
    canvas = CellCanvas(ImageDraw.Draw(image), 0, 0, big)
    for layer in SOKOBAN_LAYERS[symbol]:
        layer(canvas)
    return image.resize((cell, cell), Image.Resampling.LANCZOS)


def _stone(canvas: CellCanvas) -> None:
    canvas.box(0, 0, 1, 1, SEAM)
    canvas.box(0.015, 0.015, 0.985, 0.985, STONE)


def _wall(canvas: CellCanvas) -> None:
    canvas.box(0, 0, 1, 1, MORTAR)
    for row in range(4):
        for start in (-0.25, 0.25, 0.75) if row % 2 else (0.0, 0.5):
            left, right = max(start, 0) + 0.02, min(start + 0.5, 1) - 0.02
            canvas.box(left, row / 4 + 0.02, right, (row + 1) / 4 - 0.02, BRICK, 0.02)


def _target(canvas: CellCanvas) -> None:
    canvas.oval(0.5, 0.5, 0.46, 0.46, MARK)
    canvas.oval(0.5, 0.5, 0.32, 0.32, STONE)
    canvas.oval(0.5, 0.5, 0.16, 0.16, MARK)


def _crate(canvas: CellCanvas, wood: Color, plank: Color) -> None:
    canvas.box(0.08, 0.08, 0.92, 0.92, plank, 0.05)
    canvas.box(0.15, 0.15, 0.85, 0.85, wood)
    canvas.line([(0.17, 0.83), (0.83, 0.17)], plank, 0.1)
    canvas.line([(0.17, 0.17), (0.83, 0.83)], plank, 0.1)


def _sokoban_player(canvas: CellCanvas) -> None:
    canvas.box(0.3, 0.5, 0.7, 0.88, BLUE_COAT, 0.12)
    canvas.oval(0.5, 0.33, 0.38, 0.38, SKIN)
    canvas.box(0.3, 0.12, 0.7, 0.25, BLUE_COAT, 0.06)
    for side in (-1, 1):
        canvas.oval(0.5 + side * 0.08, 0.34, 0.05, 0.07, INK)


SOKOBAN_LAYERS: dict[str, tuple[Callable[[CellCanvas], None], ...]] = {
    "#": (_wall,),
    "_": (_stone,),
    "O": (_stone, _target),
    "X": (_stone, partial(_crate, wood=WOOD, plank=PLANK)),
    "√": (_stone, partial(_crate, wood=DONE_WOOD, plank=DONE_PLANK)),
    "P": (_stone, _sokoban_player),
    "S": (_stone, _target, _sokoban_player),
}

# ------------------------------------------------------------------------------------------------ rooms

ROOM_SIDE, ROOM_GAP, ROOM_MARGIN, ROOM_BAR = 92, 14, 14, 30
ROOM_PAPER: Color = (246, 242, 234)
FLOOR: Color = (226, 216, 198)
HERE: Color = (250, 236, 190)
WALL: Color = (120, 106, 92)
ROOM_INK: Color = (52, 48, 46)
GOLD: Color = (232, 178, 46)
DOOR_COLORS: dict[str, Color] = {
    "red": (206, 64, 60),
    "blue": (64, 110, 200),
    "green": (76, 160, 84),
    "yellow": (236, 200, 60),
    "white": (252, 252, 252),
    "black": (36, 36, 40),
    "pink": (236, 140, 178),
    "brown": (132, 86, 52),
}


def draw_rooms(rooms_map: RoomsMap, state: RoomsState) -> Image.Image:
    """Floor plan with doors and keys in their colors, and the player."""
    top = min(row for row, _ in rooms_map.cells)
    left = min(column for _, column in rooms_map.cells)
    rows = max(row for row, _ in rooms_map.cells) - top + 1
    columns = max(column for _, column in rooms_map.cells) - left + 1
    step = ROOM_SIDE + ROOM_GAP
    image = Image.new("RGB", (columns * step + 2 * ROOM_MARGIN, rows * step + 2 * ROOM_MARGIN + ROOM_BAR), ROOM_PAPER)
    draw = ImageDraw.Draw(image)
    corners = [(ROOM_MARGIN + (c - left) * step, ROOM_MARGIN + (r - top) * step) for r, c in rooms_map.cells]
    for room, corner in enumerate(corners):
        _draw_room(draw, rooms_map, state, room, corner)
    for room, corner in enumerate(corners):
        for way, _, door in rooms_map.links[room]:
            _draw_exit(draw, corner, way, door, door in state.unlocked)
    if state.carried:
        carried = "carries: " + ", ".join(sorted(state.carried))
        draw.text((ROOM_MARGIN, image.height - ROOM_BAR), carried, ROOM_INK, ImageFont.load_default(14))
    return image


def _draw_room(
    draw: ImageDraw.ImageDraw, rooms_map: RoomsMap, state: RoomsState, room: int, corner: tuple[int, int]
) -> None:
    x, y = corner
    here = room == state.room
    draw.rounded_rectangle((x, y, x + ROOM_SIDE, y + ROOM_SIDE), 8, fill=HERE if here else FLOOR, outline=WALL, width=3)
    draw.text((x + 9, y + 8), rooms_map.names[room], ROOM_INK, ImageFont.load_default(13))
    for number, thing in enumerate(thing for thing in rooms_map.items[room] if thing not in state.carried):
        _draw_item(draw, thing, x + 14 + 26 * (number % 3), y + 34 + 22 * (number // 3))
    if here:
        draw.rounded_rectangle((x + 58, y + 60, x + 78, y + 86), 7, fill=BLUE_COAT)
        draw.ellipse((x + 58, y + 42, x + 78, y + 62), fill=SKIN, outline=ROOM_INK)


def _draw_item(draw: ImageDraw.ImageDraw, thing: str, x: int, y: int) -> None:
    if thing == TREASURE:
        draw.rectangle((x, y, x + 18, y + 14), fill=GOLD, outline=ROOM_INK)
        draw.line((x, y + 6, x + 18, y + 6), ROOM_INK)
        return
    color = DOOR_COLORS[thing.removesuffix(" key")]
    draw.ellipse((x, y, x + 10, y + 10), outline=ROOM_INK, fill=color)
    draw.rectangle((x + 9, y + 4, x + 20, y + 7), fill=color, outline=ROOM_INK)


def _draw_exit(draw: ImageDraw.ImageDraw, corner: tuple[int, int], way: str, door: str | None, unlocked: bool) -> None:
    """One half of an exit; a locked door is drawn in its color."""
    down, right = DIRECTIONS[way]
    x = corner[0] + ROOM_SIDE // 2 + right * (ROOM_SIDE + ROOM_GAP) // 2
    y = corner[1] + ROOM_SIDE // 2 + down * (ROOM_SIDE + ROOM_GAP) // 2
    wide, tall = (ROOM_GAP // 2 + 2, 12) if right else (12, ROOM_GAP // 2 + 2)
    fill = FLOOR if door is None or unlocked else DOOR_COLORS[door]
    draw.rectangle((x - wide, y - tall, x + wide, y + tall), fill=fill, outline=WALL)
