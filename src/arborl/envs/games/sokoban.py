"""Sokoban: push every box onto a target. The board as text, one `<answer>Up</answer>` per turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborl.envs.env import Env, Observation, Step, format_answer, parse_choice, task_split
from arborl.envs.games.sokoban_levels import (
    MOVES,
    BoardState,
    SolverLimitExceeded,
    apply_move,
    choose_level,
    draw_level,
    format_board,
    solve,
)
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
class SokobanPreset:
    """Default arguments of `Sokoban`."""

    size: int
    boxes: int
    walls: float
    pulls: int
    max_steps: int


PRESETS = {"6x6": SokobanPreset(6, 1, 0.1, 5, 12), "10x10": SokobanPreset(10, 2, 0.15, 16, 50)}


class Sokoban(Env):
    """Push every box onto a target.

    Args:
        preset: `6x6` (one box) or `10x10` (two boxes); the next five arguments override it.
        size: cells per side, including the outer wall.
        boxes: number of boxes.
        walls: probability that an inner cell is wall.
        pulls: maximum number of reverse-play steps of level generation; more is harder.
        max_steps: the episode is truncated after this many steps; every generated level is solvable within them.
        levels: a Boxoban level file, or a folder of them, instead of generated levels.
        step_reward: reward of every step.
        box_reward: reward of pushing a box onto a target; pushing one off gives the negative.
        done_reward: additional reward when the level is solved.
        format_penalty: additional reward of an illegal message.
        border: show the outer wall.
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
            raise ValueError(f"size={self.size}: give 5 or more; the outer wall takes two")
        if self.boxes < 1:
            raise ValueError(f"boxes={self.boxes}: give at least 1")
        if not 0 <= self.walls < 1:
            raise ValueError(f"walls={self.walls}: give a probability from 0, below 1")
        if self.pulls < 1 or self.max_steps < 1:
            raise ValueError(f"pulls={self.pulls}, max_steps={self.max_steps}: give at least 1 of each")
        if self.format_penalty > 0:
            raise ValueError(f"format_penalty={self.format_penalty}: a penalty is negative or zero")

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "sokoban")
        if self.levels is not None:
            self.level, self.state = choose_level(task.seed, split, self.levels)
        else:
            self.level, self.state = draw_level(
                task.seed, split, self.size, self.boxes, self.walls, self.pulls, self.max_steps
            )
        self.steps = self.valid = self.effective = 0
        self.solution: dict[BoardState, str] = {}
        board = self.board()
        return Observation((Message("system", RULES), Message("user", board)), state_key=board)

    async def step(self, action: Message) -> Step:
        name = parse_choice(action.content, MOVES)
        before = self.state
        if name is not None:
            self.state = apply_move(self.level, before, name)
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
            info={
                "valid": float(name is not None),
                "effective": float(effective),
                "boxes_home": float(self._boxes_on_targets()),
            },
        )

    def _reward(self, before: BoardState, valid: bool) -> float:
        gained = self._boxes_on_targets() - len(before.boxes & self.level.targets)
        reward = self.step_reward + self.box_reward * gained
        if self.state.solved(self.level):
            reward += self.done_reward
        return reward if valid else reward + self.format_penalty

    def _boxes_on_targets(self) -> int:
        return len(self.state.boxes & self.level.targets)

    def board(self) -> str:
        """The board in the agent's observation."""
        return format_board(self.level, self.state, self.border)

    def metrics(self) -> Metrics:
        played = max(self.steps, 1)
        return {
            "success": float(self.state.solved(self.level)),
            "boxes_home": self._boxes_on_targets() / len(self.level.targets),
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

    def actions(self) -> list[str]:
        return [format_answer(name) for name in MOVES]

    def oracle(self) -> str:
        """The next move of a shortest solution; `Up` when the level can no longer be solved."""
        if self.state not in self.solution:
            self._solve()
        return format_answer(self.solution.get(self.state, "Up"))

    def _solve(self) -> None:
        """Store a shortest solution from the current state."""
        try:
            solution = solve(self.level, self.state)
        except SolverLimitExceeded:
            solution = None
        here = self.state
        for name in solution or ():
            self.solution[here] = name
            here = apply_move(self.level, here, name)

    def state_key(self) -> str:
        return self.board()

    def render(self) -> str:
        return format_board(self.level, self.state)

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_sokoban

        return draw_sokoban(self.render())
