"""A house as a picture: a plan with doors and keys in their colors, and the player where they are."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from arborl.envs.rooms.house import TREASURE, WAYS, House
from arborl.envs.rooms.walk import Place
from arborl.envs.tiles import Colour

SIDE, GAP, MARGIN, BAR = 92, 14, 14, 30
PAPER: Colour = (246, 242, 234)
FLOOR: Colour = (226, 216, 198)
HERE: Colour = (250, 236, 190)
WALL: Colour = (120, 106, 92)
INK: Colour = (52, 48, 46)
COAT: Colour = (66, 104, 178)
SKIN: Colour = (252, 222, 196)
GOLD: Colour = (232, 178, 46)
PAINT: dict[str, Colour] = {
    "red": (206, 64, 60),
    "blue": (64, 110, 200),
    "green": (76, 160, 84),
    "yellow": (236, 200, 60),
    "white": (252, 252, 252),
    "black": (36, 36, 40),
    "pink": (236, 140, 178),
    "brown": (132, 86, 52),
}


def paint(house: House, place: Place) -> Image.Image:
    """Draw the plan of the house as it stands."""
    top = min(row for row, _ in house.cells)
    left = min(column for _, column in house.cells)
    rows = max(row for row, _ in house.cells) - top + 1
    columns = max(column for _, column in house.cells) - left + 1
    step = SIDE + GAP
    image = Image.new("RGB", (columns * step + 2 * MARGIN, rows * step + 2 * MARGIN + BAR), PAPER)
    brush = ImageDraw.Draw(image)
    corners = [(MARGIN + (c - left) * step, MARGIN + (r - top) * step) for r, c in house.cells]
    for room, corner in enumerate(corners):
        _room(brush, house, place, room, corner)
    for room, corner in enumerate(corners):
        for way, _, door in house.links[room]:
            _way(brush, corner, way, door, door in place.unlocked)
    if place.carried:
        carried = "carries: " + ", ".join(sorted(place.carried))
        brush.text((MARGIN, image.height - BAR), carried, INK, ImageFont.load_default(14))
    return image


def _room(brush: ImageDraw.ImageDraw, house: House, place: Place, room: int, corner: tuple[int, int]) -> None:
    x, y = corner
    here = room == place.room
    brush.rounded_rectangle((x, y, x + SIDE, y + SIDE), 8, fill=HERE if here else FLOOR, outline=WALL, width=3)
    brush.text((x + 9, y + 8), house.names[room], INK, ImageFont.load_default(13))
    for number, thing in enumerate(thing for thing in house.things[room] if thing not in place.carried):
        _thing(brush, thing, x + 14 + 26 * (number % 3), y + 34 + 22 * (number // 3))
    if here:
        brush.rounded_rectangle((x + 58, y + 60, x + 78, y + 86), 7, fill=COAT)
        brush.ellipse((x + 58, y + 42, x + 78, y + 62), fill=SKIN, outline=INK)


def _thing(brush: ImageDraw.ImageDraw, thing: str, x: int, y: int) -> None:
    if thing == TREASURE:
        brush.rectangle((x, y, x + 18, y + 14), fill=GOLD, outline=INK)
        brush.line((x, y + 6, x + 18, y + 6), INK)
        return
    color = PAINT[thing.removesuffix(" key")]
    brush.ellipse((x, y, x + 10, y + 10), outline=INK, fill=color)
    brush.rectangle((x + 9, y + 4, x + 20, y + 7), fill=color, outline=INK)


def _way(brush: ImageDraw.ImageDraw, corner: tuple[int, int], way: str, door: str | None, unlocked: bool) -> None:
    """Half of a passage, up to the middle of the gap; a locked door stands across it."""
    down, right = WAYS[way]
    x = corner[0] + SIDE // 2 + right * (SIDE + GAP) // 2
    y = corner[1] + SIDE // 2 + down * (SIDE + GAP) // 2
    wide, tall = (GAP // 2 + 2, 12) if right else (12, GAP // 2 + 2)
    fill = FLOOR if door is None or unlocked else PAINT[door]
    brush.rectangle((x - wide, y - tall, x + wide, y + tall), fill=fill, outline=WALL)
