"""Rooms: find the treasure in a house of rooms, with keys for locked doors on the way. Long horizons, short texts.

    You are in the attic. Exits: north, east (red door). You see: blue key. You carry: red key.
    -> go north | take blue key | unlock east

A door that is named is locked; whoever carries its key can unlock it.

A command is read from `<answer>…</answer>`, or from the whole message where there is no such tag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborl.envs.answers import answer, read_answer
from arborl.envs.env import Env, Observation, Step
from arborl.envs.rooms.house import COLORS, NAMES, WAYS, House
from arborl.envs.rooms.walk import Place, draw_house, possible, shortest
from arborl.envs.splits import wanted_split
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

RULES = (
    "Find the treasure and take it. A door is locked; the key of its color unlocks it. Each turn, answer with one "
    "command, for example <answer>go north</answer>, <answer>take red key</answer> or <answer>unlock north</answer>."
)
INVALID = "You cannot do that."


class Rooms(Env):
    """Find the treasure in a house with locked doors.

    Args:
        rooms: how many.
        doors: locked doors on the way, each with a key somewhere before it.
        max_steps: the episode is truncated after this many; every house can be solved within them.
        step_reward: of every command.
        key_reward: of each key that is taken, for a shorter way to the first reward.
        format_penalty: of a command that is not possible, on top; nothing changes.
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
        self.house: House | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        split = wanted_split(task, "rooms")
        self.house = draw_house(task.seed, split, self.rooms, self.doors, self.max_steps)
        self.place = Place()
        self.seen = frozenset({0})
        self.steps = self.valid = self.effective = 0
        return Observation((Message("system", RULES), Message("user", self.view())), state_key=self.state_key())

    async def step(self, action: Message) -> Step:
        house = self._open()
        command = read_answer(action.content)
        after = possible(house, self.place).get(" ".join((command or action.content).lower().split()))
        valid, keys = after is not None, len(self.place.carried)
        effective = valid and after != self.place
        self.place = after or self.place
        self.seen |= {self.place.room}
        self.steps += 1
        self.valid += valid
        self.effective += effective
        reward = self.step_reward + (0.0 if valid else self.format_penalty) + float(self.place.done)
        if not self.place.done:
            reward += self.key_reward * (len(self.place.carried) - keys)
        text = self.view() if valid else f"{INVALID}\n{self.view()}"
        return Step(
            Observation((Message("user", text),), state_key=self.state_key()),
            reward=reward,
            terminated=self.place.done,
            truncated=not self.place.done and self.steps >= self.max_steps,
            info={"valid": float(valid), "effective": float(effective)},
        )

    def _open(self) -> House:
        if self.house is None:
            raise RuntimeError("the house is closed: call reset() first")
        return self.house

    def view(self) -> str:
        """What the player sees."""
        if self.place.done:
            return "You have the treasure."
        house, place = self._open(), self.place
        exits = [
            f"{way} ({door} door)" if door and door not in place.unlocked else way
            for way, _, door in house.links[place.room]
        ]
        things = [thing for thing in house.things[place.room] if thing not in place.carried]
        seen = f" You see: {', '.join(things)}." if things else ""
        carried = f" You carry: {', '.join(sorted(place.carried))}." if place.carried else ""
        return f"You are in the {house.names[place.room]}. Exits: {', '.join(exits)}.{seen}{carried}"

    def metrics(self) -> Metrics:
        played = max(self.steps, 1)
        return {
            "success": float(self.place.done),
            "explored": len(self.seen) / self.rooms,
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

    def actions(self) -> list[str]:
        if self.house is None:
            return [answer(f"go {way}") for way in WAYS]
        return [answer(command) for command in possible(self.house, self.place)]

    def oracle(self) -> str:
        """The first command of a shortest way to the treasure."""
        way = shortest(self._open(), self.place)
        return answer(way[0] if way else "look")

    def state_key(self) -> str:
        place = self.place
        return "/".join(
            (self._open().names[place.room], ",".join(sorted(place.carried)), ",".join(sorted(place.unlocked)))
        )

    def render(self) -> str:
        return self.view()

    def picture(self) -> Image:
        from arborl.envs.rooms.picture import paint

        return paint(self._open(), self.place)
