"""Maps of the rooms game: generation, legal commands and the shortest solution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from numpy.random import Generator

from arborl.envs.env import check_split, split_of
from arborl.seeds import generator

DIRECTIONS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
COLORS = ("red", "blue", "green", "yellow", "white", "black", "pink", "brown")
NAMES = (
    "attic", "hall", "kitchen", "cellar", "library", "bedroom", "study", "pantry", "bathroom", "garden", "garage",
    "workshop", "parlor", "nursery", "gallery", "tower", "chapel", "stable", "porch", "closet", "laundry",
    "office", "studio", "vault",
)  # fmt: skip
TREASURE = "treasure"

Cell = tuple[int, int]
RoomExit = tuple[str, int, str | None]
"""Direction, room, and the color of the locked door or None."""


@dataclass(frozen=True, slots=True)
class RoomsMap:
    """Rooms by number; the player starts in room 0."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]
    """Grid cell of each room."""
    links: tuple[tuple[RoomExit, ...], ...]
    """Exits of each room, in the order of `DIRECTIONS`."""
    items: tuple[tuple[str, ...], ...]


def generate_rooms_map(rng: Generator, rooms: int, doors: int) -> RoomsMap:
    """A random map. Doors are opened one by one, and each key is placed in a room that is reachable before its door."""
    cells, parents = _grow(rng, rooms)
    shut_rooms = sorted(int(room) + 1 for room in rng.permutation(rooms - 1)[:doors])
    locked = {room: COLORS[color] for room, color in zip(shut_rooms, rng.permutation(len(COLORS)), strict=False)}
    items: list[list[str]] = [[] for _ in range(rooms)]
    reached = _reachable_rooms(0, parents, locked)
    newest = reached
    shut = set(locked)
    while shut:
        near = [room for room in sorted(shut) if parents[room] in reached]
        opened = near[int(rng.integers(len(near)))]
        items[reached[int(rng.integers(len(reached)))]].append(f"{locked[opened]} key")
        newest = _reachable_rooms(opened, parents, locked)
        reached = sorted({*reached, *newest})
        shut.remove(opened)
    away = [room for room in newest if room] or newest  # not in the first room, if possible
    items[away[int(rng.integers(len(away)))]].append(TREASURE)
    names = tuple(NAMES[i] for i in rng.permutation(len(NAMES))[:rooms])
    return RoomsMap(names, cells, _links(cells, parents, locked), tuple(tuple(sorted(there)) for there in items))


def _grow(rng: Generator, rooms: int) -> tuple[tuple[Cell, ...], list[int]]:
    """Cells of the rooms, and the parent of each room in the tree of exits."""
    cells: list[Cell] = [(0, 0)]
    parents = [-1]
    while len(cells) < rooms:
        parent = int(rng.integers(len(cells)))
        down, right = list(DIRECTIONS.values())[int(rng.integers(4))]
        cell = cells[parent][0] + down, cells[parent][1] + right
        if cell not in cells:
            cells.append(cell)
            parents.append(parent)
    return tuple(cells), parents


def _reachable_rooms(start: int, parents: list[int], locked: dict[int, str]) -> list[int]:
    """Descendants of `start` that are reachable without a locked door."""
    found = [start]
    for room in range(start + 1, len(parents)):  # a parent has a lower number
        if parents[room] in found and room not in locked:
            found.append(room)
    return found


def _links(cells: tuple[Cell, ...], parents: list[int], locked: dict[int, str]) -> tuple[tuple[RoomExit, ...], ...]:
    links: list[dict[str, RoomExit]] = [{} for _ in cells]
    for room in range(1, len(cells)):
        parent = parents[room]
        step = cells[room][0] - cells[parent][0], cells[room][1] - cells[parent][1]
        way = next(name for name, delta in DIRECTIONS.items() if delta == step)
        links[parent][way] = way, room, locked.get(room)
        links[room][BACK[way]] = BACK[way], parent, locked.get(room)
    return tuple(tuple(there[way] for way in DIRECTIONS if way in there) for there in links)


MAX_DRAWS = 2_000
"""Maps drawn before an error."""


@dataclass(frozen=True, slots=True)
class RoomsState:
    """Position, inventory, and unlocked doors."""

    room: int = 0
    carried: frozenset[str] = frozenset()
    unlocked: frozenset[str] = frozenset()
    """Colors of the doors."""

    @property
    def done(self) -> bool:
        return TREASURE in self.carried


def legal_commands(rooms_map: RoomsMap, state: RoomsState) -> dict[str, RoomsState]:
    """Legal commands and their next states."""
    if state.done:
        return {}
    found = {"look": state}
    for way, there, door in rooms_map.links[state.room]:
        if door is None or door in state.unlocked:
            found[f"go {way}"] = replace(state, room=there)
        elif f"{door} key" in state.carried:
            found[f"unlock {way}"] = replace(state, unlocked=state.unlocked | {door})
    for item in rooms_map.items[state.room]:
        if item not in state.carried:
            found[f"take {item}"] = replace(state, carried=state.carried | {item})
    return found


def shortest_solution(rooms_map: RoomsMap, start: RoomsState, within: int = 10_000) -> list[str]:
    """The commands of a shortest solution (breadth-first search); empty when there is none within the limit."""
    predecessors: dict[RoomsState, tuple[RoomsState, str] | None] = {start: None}
    level = [start]
    for _ in range(within + 1):
        ahead = []
        for state in level:
            if state.done:
                return _commands(state, predecessors)
            for command, there in legal_commands(rooms_map, state).items():
                if there not in predecessors:
                    predecessors[there] = state, command
                    ahead.append(there)
        if not ahead:
            break
        level = ahead
    return []


def _commands(end: RoomsState, predecessors: dict[RoomsState, tuple[RoomsState, str] | None]) -> list[str]:
    commands = []
    while (last := predecessors[end]) is not None:
        end, command = last
        commands.append(command)
    return commands[::-1]


@lru_cache(maxsize=8192)
def draw_rooms_map(seed: int, split: str, rooms: int, doors: int, within: int) -> RoomsMap:
    """A map of this split with a solution of at most `within` commands; deterministic on every machine."""
    check_split(split, "rooms")
    rng = generator(seed, "rooms", rooms, doors)
    for _ in range(MAX_DRAWS):
        rooms_map = generate_rooms_map(rng, rooms, doors)
        if split_of((rooms_map.names, rooms_map.links, rooms_map.items)) == split and shortest_solution(
            rooms_map, RoomsState(), within
        ):
            return rooms_map
    raise ValueError(
        f"no map of split {split!r} in {MAX_DRAWS:,} draws with rooms={rooms}, doors={doors}, max_steps={within}: "
        "give fewer doors or more steps"
    )
