"""Rooms: find the treasure in connected rooms; keys open locked doors. Long horizons, short texts.

    You are in the attic. Exits: north, east (red door). You see: blue key. You carry: red key.
    -> go north | take blue key | unlock east

A door that is named is locked; its key opens it. A command is read from `<answer>…</answer>`, or from the whole message
without such a tag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborl.envs.env import Env, Observation, Step, format_answer, parse_answer, task_split
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
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

RULES = (
    "Find the treasure and take it. A door is locked; the key of its color unlocks it. Each turn, answer with one "
    "command, for example <answer>go north</answer>, <answer>take red key</answer> or <answer>unlock north</answer>."
)
INVALID = "You cannot do that."


class Rooms(Env):
    """Find the treasure behind locked doors.

    Args:
        rooms: number of rooms.
        doors: number of locked doors; each key is reachable before its door.
        max_steps: the episode is truncated after this many steps; every map is solvable within them.
        step_reward: reward of every command.
        key_reward: reward of taking a key.
        format_penalty: additional reward of an illegal command.
    """

    blocking = False

    def __init__(
        self,
        rooms: int = 6,
        doors: int = 2,
        max_steps: int = 30,
        step_reward: float = 0.0,
        key_reward: float = 0.0,
        format_penalty: float = -0.01,
    ):
        if not 2 <= rooms <= len(NAMES):
            raise ValueError(f"rooms={rooms}: give a number from 2 to {len(NAMES)}")
        if not 0 <= doors <= min(rooms - 1, len(COLORS)):
            raise ValueError(f"doors={doors}: give a number from 0 to {min(rooms - 1, len(COLORS))} with rooms={rooms}")
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: give at least 1")
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        self.rooms, self.doors, self.max_steps = rooms, doors, max_steps
        self.step_reward, self.key_reward, self.format_penalty = step_reward, key_reward, format_penalty
        self.map: RoomsMap | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "rooms")
        self.map = draw_rooms_map(task.seed, split, self.rooms, self.doors, self.max_steps)
        self.state = RoomsState()
        self.seen = frozenset({0})
        self.steps = self.valid = self.effective = 0
        return Observation((Message("system", RULES), Message("user", self.view())), state_key=self.state_key())

    async def step(self, action: Message) -> Step:
        rooms_map = self._current_map()
        command = parse_answer(action.content)
        after = legal_commands(rooms_map, self.state).get(" ".join((command or action.content).lower().split()))
        valid, keys = after is not None, len(self.state.carried)
        effective = valid and after != self.state
        self.state = after or self.state
        self.seen |= {self.state.room}
        self.steps += 1
        self.valid += valid
        self.effective += effective
        reward = self.step_reward + (0.0 if valid else self.format_penalty) + float(self.state.done)
        if not self.state.done:
            reward += self.key_reward * (len(self.state.carried) - keys)
        text = self.view() if valid else f"{INVALID}\n{self.view()}"
        return Step(
            Observation((Message("user", text),), state_key=self.state_key()),
            reward=reward,
            terminated=self.state.done,
            truncated=not self.state.done and self.steps >= self.max_steps,
            info={"valid": float(valid), "effective": float(effective)},
        )

    def _current_map(self) -> RoomsMap:
        if self.map is None:
            raise RuntimeError("no episode: call reset() first")
        return self.map

    def view(self) -> str:
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
        played = max(self.steps, 1)
        return {
            "success": float(self.state.done),
            "explored": len(self.seen) / self.rooms,
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

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

    def render(self) -> str:
        return self.view()

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_rooms

        return draw_rooms(self._current_map(), self.state)
