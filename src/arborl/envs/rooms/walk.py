"""What can be done in a house, and the shortest way to its treasure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from arborl.envs.rooms.house import TREASURE, House, draw
from arborl.envs.splits import check_split, split_of
from arborl.seeds import generator

TRIES = 2_000
"""Houses drawn before giving up: a small one may have none of a split within the step limit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the player is, what they carry, and which doors they have unlocked."""

    room: int = 0
    carried: frozenset[str] = frozenset()
    unlocked: frozenset[str] = frozenset()
    """Colors of the doors."""

    @property
    def done(self) -> bool:
        return TREASURE in self.carried


def possible(house: House, place: Place) -> dict[str, Place]:
    """Every command that is possible here, and where it leads."""
    if place.done:
        return {}
    found = {"look": place}
    for way, there, door in house.links[place.room]:
        if door is None or door in place.unlocked:
            found[f"go {way}"] = replace(place, room=there)
        elif f"{door} key" in place.carried:
            found[f"unlock {way}"] = replace(place, unlocked=place.unlocked | {door})
    for thing in house.things[place.room]:
        if thing not in place.carried:
            found[f"take {thing}"] = replace(place, carried=place.carried | {thing})
    return found


def shortest(house: House, start: Place, within: int = 10_000) -> list[str]:
    """The commands of a shortest way to the treasure; empty where there is none this short, or it is in hand."""
    came: dict[Place, tuple[Place, str] | None] = {start: None}
    level = [start]
    for _ in range(within + 1):
        ahead = []
        for place in level:
            if place.done:
                return _commands(place, came)
            for command, there in possible(house, place).items():
                if there not in came:
                    came[there] = place, command
                    ahead.append(there)
        if not ahead:
            break
        level = ahead
    return []


def _commands(end: Place, came: dict[Place, tuple[Place, str] | None]) -> list[str]:
    commands = []
    while (last := came[end]) is not None:
        end, command = last
        commands.append(command)
    return commands[::-1]


@lru_cache(maxsize=8192)
def draw_house(seed: int, split: str, rooms: int, doors: int, within: int) -> House:
    """A house of this split that `within` commands solve. The same arguments give the same one on every machine."""
    check_split(split, "rooms")
    chance = generator(seed, "rooms", rooms, doors)
    for _ in range(TRIES):
        house = draw(chance, rooms, doors)
        if split_of((house.names, house.links, house.things)) == split and shortest(house, Place(), within):
            return house
    raise ValueError(
        f"no house of split {split!r} in {TRIES:,} draws with rooms={rooms}, doors={doors}, max_steps={within}: "
        "give fewer doors or more steps"
    )
