"""Sokoban as an environment: the board as text, one `<answer>Up</answer>` a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborl.envs.answers import answer, read_choice
from arborl.envs.env import Env, Observation, Step
from arborl.envs.sokoban.board import MOVES, BoardState, move, write
from arborl.envs.sokoban.levels import draw_level, pick_level
from arborl.envs.sokoban.solver import GaveUp, solve
from arborl.envs.splits import wanted_split
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

RULES = (
    "Push every box X onto a target O. P is you, # wall, _ floor, √ a box on a target, S you on a target; "
    "beyond the edge is wall. Boxes are pushed, never pulled. "
    "Each turn, answer with one move: <answer>Up</answer>, <answer>Down</answer>, <answer>Left</answer> "
    "or <answer>Right</answer>."
)
INVALID = "Not a move."


@dataclass(frozen=True, slots=True)
class Preset:
    """A kind of level."""

    size: int
    """Cells a side, the wall around included."""
    boxes: int
    walls: float
    """Chance of an inner cell being wall."""
    pulls: int
    """At most so many boxes' steps lie between the level and its solution."""
    max_steps: int


PRESETS = {"6x6": Preset(6, 1, 0.1, 5, 12), "10x10": Preset(10, 2, 0.15, 16, 50)}


class Sokoban(Env):
    """Push every box of a warehouse onto a target.

    Args:
        preset: `6x6` (one box) or `10x10` (two boxes); what follows changes parts of it.
        size: cells a side, the wall around included.
        boxes: how many.
        walls: chance of an inner cell being wall.
        pulls: boxes are pulled off their targets by at most so many steps when a level is made; more is harder.
        max_steps: the episode is truncated after this many; every made level can be solved within them.
        levels: a Boxoban level file, or a folder of them, to be played instead of made levels.
        step_reward: of every step.
        box_reward: of pushing a box onto a target; pushing one off costs as much.
        done_reward: of the last box on the last target, on top.
        format_penalty: of a message that is not a move, on top of the step; nothing moves.
        border: show the wall around the board as well.
    """

    blocking = False
    tagged = True

    def __init__(
        self,
        preset: str = "6x6",
        size: int | None = None,
        boxes: int | None = None,
        walls: float | None = None,
        pulls: int | None = None,
        max_steps: int | None = None,
        levels: str | None = None,
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        done_reward: float = 10.0,
        format_penalty: float = -0.1,
        border: bool = False,
    ):
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r}: give one of {', '.join(PRESETS)}")
        base = PRESETS[preset]
        self.size = base.size if size is None else size
        self.boxes = base.boxes if boxes is None else boxes
        self.walls = base.walls if walls is None else walls
        self.pulls = base.pulls if pulls is None else pulls
        self.max_steps = base.max_steps if max_steps is None else max_steps
        self.levels, self.border = levels, border
        self.step_reward, self.box_reward, self.done_reward = step_reward, box_reward, done_reward
        self.format_penalty = format_penalty
        self._check()

    def _check(self) -> None:
        if self.size < 5:
            raise ValueError(f"size={self.size}: give 5 or more; the wall around takes two")
        if self.boxes < 1:
            raise ValueError(f"boxes={self.boxes}: give at least 1")
        if not 0 <= self.walls < 1:
            raise ValueError(f"walls={self.walls}: give a chance from 0, below 1")
        if self.pulls < 1 or self.max_steps < 1:
            raise ValueError(f"pulls={self.pulls}, max_steps={self.max_steps}: give at least 1 of each")
        if self.format_penalty > 0:
            raise ValueError(f"format_penalty={self.format_penalty}: a penalty is negative or zero")

    async def reset(self, task: Task, seed: int) -> Observation:
        split = wanted_split(task, "sokoban")
        if self.levels is not None:
            self.level, self.state = pick_level(task.seed, split, self.levels)
        else:
            self.level, self.state = draw_level(
                task.seed, split, self.size, self.boxes, self.walls, self.pulls, self.max_steps
            )
        self.steps = self.valid = self.effective = 0
        self.route: dict[BoardState, str] = {}
        board = self.board()
        return Observation((Message("system", RULES), Message("user", board)), state_key=board)

    async def step(self, action: Message) -> Step:
        name = read_choice(action.content, MOVES)
        before = self.state
        if name is not None:
            self.state = move(self.level, before, name)
        effective = self.state != before
        self.steps += 1
        self.valid += name is not None
        self.effective += effective
        solved = self.state.solved(self.level)
        board = self.board()
        return Step(
            Observation((Message("user", board if name else f"{INVALID}\n{board}"),), state_key=board),
            reward=self._reward(before, name is not None),
            terminated=solved,
            truncated=not solved and self.steps >= self.max_steps,
            info={"valid": float(name is not None), "effective": float(effective), "boxes_home": float(self._home())},
        )

    def _reward(self, before: BoardState, valid: bool) -> float:
        gained = self._home() - len(before.boxes & self.level.targets)
        reward = self.step_reward + self.box_reward * gained
        if self.state.solved(self.level):
            reward += self.done_reward
        return reward if valid else reward + self.format_penalty

    def _home(self) -> int:
        return len(self.state.boxes & self.level.targets)

    def board(self) -> str:
        """What the agent is shown."""
        return write(self.level, self.state, self.border)

    def metrics(self) -> Metrics:
        played = max(self.steps, 1)
        return {
            "success": float(self.state.solved(self.level)),
            "boxes_home": self._home() / len(self.level.targets),
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

    def actions(self) -> list[str]:
        return [answer(name) for name in MOVES]

    def oracle(self) -> str:
        """The next move of a shortest solution; just a move where a box is stuck for good."""
        if self.state not in self.route:
            self._plan()
        return answer(self.route.get(self.state, "Up"))

    def _plan(self) -> None:
        """Remember a shortest solution from here, state by state."""
        try:
            solution = solve(self.level, self.state)
        except GaveUp:
            solution = None
        here = self.state
        for name in solution or ():
            self.route[here] = name
            here = move(self.level, here, name)

    def state_key(self) -> str:
        return self.board()

    def render(self) -> str:
        return write(self.level, self.state)

    def picture(self) -> Image:
        from arborl.envs.sokoban.tiles import paint

        return paint(self.render())
