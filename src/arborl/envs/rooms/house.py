"""A house: rooms on a grid, ways between them, locked doors, keys, and a treasure.

Rooms grow from the first one, each onto a neighbour. Some ways are then locked, and the doors opened one by one: the
key of each is put where the player has been able to go before, so every house can be solved.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

WAYS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
COLORS = ("red", "blue", "green", "yellow", "white", "black", "pink", "brown")
NAMES = (
    "attic", "hall", "kitchen", "cellar", "library", "bedroom", "study", "pantry", "bathroom", "garden", "garage",
    "workshop", "parlor", "nursery", "gallery", "tower", "chapel", "stable", "porch", "closet", "laundry",
    "office", "studio", "vault",
)  # fmt: skip
TREASURE = "treasure"

Cell = tuple[int, int]
Link = tuple[str, int, str | None]
"""Way, the room it leads to, and the color of the door there is in it."""


@dataclass(frozen=True, slots=True)
class House:
    """Rooms by number; room 0 is where the player starts."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]
    """Where each room lies on the grid."""
    links: tuple[tuple[Link, ...], ...]
    """The ways out of each room, north first."""
    things: tuple[tuple[str, ...], ...]
    """What lies in each room."""


def draw(chance: Generator, rooms: int, doors: int) -> House:
    """A house with this many rooms and locked doors."""
    cells, parents = _grow(chance, rooms)
    locked = {int(room): color for room, color in zip(_choose(chance, rooms, doors), _colors(chance), strict=False)}
    things: list[list[str]] = [[] for _ in range(rooms)]
    reached = _region(0, parents, locked)
    newest = reached
    shut = set(locked)
    while shut:
        near = [room for room in sorted(shut) if parents[room] in reached]
        opened = near[int(chance.integers(len(near)))]
        things[reached[int(chance.integers(len(reached)))]].append(f"{locked[opened]} key")
        newest = _region(opened, parents, locked)
        reached = sorted({*reached, *newest})
        shut.remove(opened)
    away = [room for room in newest if room] or newest  # not at the player's feet, where that can be helped
    things[away[int(chance.integers(len(away)))]].append(TREASURE)
    names = tuple(NAMES[i] for i in chance.permutation(len(NAMES))[:rooms])
    return House(names, cells, _links(cells, parents, locked), tuple(tuple(sorted(there)) for there in things))


def _grow(chance: Generator, rooms: int) -> tuple[tuple[Cell, ...], list[int]]:
    """Cells of the rooms, and the room that each was built onto (the first one onto none)."""
    cells: list[Cell] = [(0, 0)]
    parents = [-1]
    while len(cells) < rooms:
        parent = int(chance.integers(len(cells)))
        down, right = list(WAYS.values())[int(chance.integers(4))]
        cell = cells[parent][0] + down, cells[parent][1] + right
        if cell not in cells:
            cells.append(cell)
            parents.append(parent)
    return tuple(cells), parents


def _choose(chance: Generator, rooms: int, doors: int) -> list[int]:
    """Rooms whose way in is locked."""
    return sorted(int(room) + 1 for room in chance.permutation(rooms - 1)[:doors])


def _colors(chance: Generator) -> list[str]:
    return [COLORS[i] for i in chance.permutation(len(COLORS))]


def _region(start: int, parents: list[int], locked: dict[int, str]) -> list[int]:
    """The rooms one can go to from `start` outwards without a locked door."""
    found = [start]
    for room in range(start + 1, len(parents)):  # a room comes after the one it was built onto
        if parents[room] in found and room not in locked:
            found.append(room)
    return found


def _links(cells: tuple[Cell, ...], parents: list[int], locked: dict[int, str]) -> tuple[tuple[Link, ...], ...]:
    links: list[dict[str, Link]] = [{} for _ in cells]
    for room in range(1, len(cells)):
        parent = parents[room]
        step = cells[room][0] - cells[parent][0], cells[room][1] - cells[parent][1]
        way = next(name for name, delta in WAYS.items() if delta == step)
        links[parent][way] = way, room, locked.get(room)
        links[room][BACK[way]] = BACK[way], parent, locked.get(room)
    return tuple(tuple(there[way] for way in WAYS if way in there) for there in links)
