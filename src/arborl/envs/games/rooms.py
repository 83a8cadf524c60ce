"""Rooms: find the treasure in connected rooms; keys open locked doors. Long horizons, short texts.

    You are in the attic. Exits: north, east (red door). You see: blue key. You carry: red key.
    -> go north | take blue key | unlock east

A door that is named is locked; its key opens it. A command is read from `<answer>…</answer>`, or from the whole message
without such a tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborl.envs.env import Observation, Step, format_answer, parse_answer, task_split
from arborl.envs.games.rooms_map import (
    COLORS,
    DIRECTIONS,
    NAMES,
    RoomsMap,
    RoomsState,
    draw_rooms_map,
    legal_commands,
    shortest_solution,
)
from arborl.envs.games.text_game import TextGame, require
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

RULES = (
    "Find the treasure and take it. A door is locked; the key of its color unlocks it. Each turn, answer with one "
    "command, for example <answer>go north</answer>, <answer>take red key</answer> or <answer>unlock north</answer>."
)


@dataclass(eq=False)
class Rooms(TextGame):
    """Find the treasure behind locked doors."""

    blocking = False
    rules, invalid = RULES, "You cannot do that."

    rooms: int = 6
    """Number of rooms."""
    doors: int = 2
    """Number of locked doors; each key is reachable before its door."""
    max_steps: int = 30
    """The episode is truncated after this many steps; every map is solvable within them."""
    step_reward: float = 0.0
    """Reward of every command."""
    key_reward: float = 0.0
    """Reward of taking a key."""
    format_penalty: float = -0.01
    """Additional reward of an illegal command."""

    def __post_init__(self) -> None:
        most = min(self.rooms - 1, len(COLORS))
        require(2 <= self.rooms <= len(NAMES), f"rooms={self.rooms}: give a number from 2 to {len(NAMES)}")
        require(0 <= self.doors <= most, f"doors={self.doors}: give a number from 0 to {most} with rooms={self.rooms}")
        self.check_limits()
        self.map: RoomsMap | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "rooms")
        self.map = draw_rooms_map(task.seed, split, self.rooms, self.doors, self.max_steps)
        self.state = RoomsState()
        self.seen = frozenset({0})
        return self.opening(self.render())

    async def step(self, action: Message) -> Step:
        rooms_map = self._current_map()
        command = parse_answer(action.content)
        after = legal_commands(rooms_map, self.state).get(" ".join((command or action.content).lower().split()))
        valid, keys = after is not None, len(self.state.carried)
        effective = valid and after != self.state
        self.state = after or self.state
        self.seen |= {self.state.room}
        reward = self.step_reward + (0.0 if valid else self.format_penalty) + float(self.state.done)
        if not self.state.done:
            reward += self.key_reward * (len(self.state.carried) - keys)
        return self.next_step(valid, effective, reward, self.state.done, self.render())

    def _current_map(self) -> RoomsMap:
        if self.map is None:
            raise RuntimeError("no episode: call reset() first")
        return self.map

    def render(self) -> str:
        """The observation text."""
        if self.state.done:
            return "You have the treasure."
        rooms_map, state = self._current_map(), self.state
        exits = [
            f"{way} ({door} door)" if door and door not in state.unlocked else way
            for way, _, door in rooms_map.links[state.room]
        ]
        items = [item for item in rooms_map.items[state.room] if item not in state.carried]
        seen = f" You see: {', '.join(items)}." if items else ""
        carried = f" You carry: {', '.join(sorted(state.carried))}." if state.carried else ""
        return f"You are in the {rooms_map.names[state.room]}. Exits: {', '.join(exits)}.{seen}{carried}"

    def metrics(self) -> Metrics:
        return {"success": float(self.state.done), "explored": len(self.seen) / self.rooms, **self.shares()}

    def actions(self) -> list[str]:
        if self.map is None:
            return [format_answer(f"go {way}") for way in DIRECTIONS]
        return [format_answer(command) for command in legal_commands(self.map, self.state)]

    def oracle(self) -> str:
        """The first command of a shortest solution."""
        way = shortest_solution(self._current_map(), self.state)
        return format_answer(way[0] if way else "look")

    def state_key(self) -> str:
        state = self.state
        return "/".join(
            (self._current_map().names[state.room], ",".join(sorted(state.carried)), ",".join(sorted(state.unlocked)))
        )

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_rooms

        return draw_rooms(self._current_map(), self.state)
