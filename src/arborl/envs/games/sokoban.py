"""Sokoban: push every box onto a target. The board as text, one `<answer>Up</answer>` per turn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Observation, Step, format_answer, parse_choice, task_split
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
from arborl.envs.games.text_game import TextGame, chosen_symbols, require
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

SYMBOLS = {
    "player": "P", "box": "X", "target": "O", "wall": "#", "floor": "_", "box_on_target": "√", "player_on_target": "S",
}  # fmt: skip
"""Characters of the board."""
TEMPLATE = (
    "Push every box {box} onto a target {target}. {player} is you, {wall} wall, {floor} floor, "
    "{box_on_target} a box on a target, {player_on_target} you on a target; "
    "beyond the edge is wall. Boxes are pushed, never pulled. "
    "Each turn, answer with one move: <answer>Up</answer>, <answer>Down</answer>, <answer>Left</answer> "
    "or <answer>Right</answer>."
)
RULES = TEMPLATE.format(**SYMBOLS)
PRESETS = {
    "6x6": {"size": 6, "boxes": 1, "walls": 0.1, "pulls": 5, "max_steps": 12},
    "10x10": {"size": 10, "boxes": 2, "walls": 0.15, "pulls": 16, "max_steps": 50},
}


class Sokoban(TextGame):
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
        symbols: other characters for cells, `{wall: W, floor: "."}`; the rules name them too. Kinds: `player`, `box`,
            `target`, `wall`, `floor`, `box_on_target`, `player_on_target`.
    """

    blocking = False
    tagged = True
    rules, invalid = RULES, "Not a move."

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
        symbols: Mapping[str, str] | None = None,
    ):
        require(preset in PRESETS, f"preset={preset!r}: give one of {', '.join(PRESETS)}")
        given = {"size": size, "boxes": boxes, "walls": walls, "pulls": pulls, "max_steps": max_steps}
        chosen: dict[str, Any] = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
        self.size, self.boxes, self.walls, self.pulls = (chosen[name] for name in ("size", "boxes", "walls", "pulls"))
        self.max_steps, self.format_penalty = chosen["max_steps"], format_penalty
        self.check_limits()
        require(self.size >= 5, f"size={self.size}: give 5 or more; the outer wall takes two")
        require(self.boxes >= 1 and self.pulls >= 1, f"boxes={self.boxes}, pulls={self.pulls}: give at least 1 of each")
        require(0 <= self.walls < 1, f"walls={self.walls}: give a probability from 0, below 1")
        self.levels, self.border, self.translation = levels, border, {}
        if symbols:
            chosen_signs = chosen_symbols(symbols, SYMBOLS)
            self.rules = TEMPLATE.format(**chosen_signs)
            self.translation = str.maketrans({SYMBOLS[kind]: sign for kind, sign in chosen_signs.items()})
        self.step_reward, self.box_reward, self.done_reward = step_reward, box_reward, done_reward

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "sokoban")
        if self.levels is not None:
            self.level, self.state = choose_level(task.seed, split, self.levels)
        else:
            self.level, self.state = draw_level(
                task.seed, split, self.size, self.boxes, self.walls, self.pulls, self.max_steps
            )
        self.solution: dict[BoardState, str] = {}
        return self.opening()

    async def step(self, action: Message) -> Step:
        name = parse_choice(action.content, MOVES)
        before, home_before = self.state, self._boxes_on_targets()
        if name is not None:
            self.state = apply_move(self.level, before, name)
        home, solved = self._boxes_on_targets(), self.state.solved(self.level)
        reward = self.step_reward + self.box_reward * (home - home_before)
        reward += self.done_reward if solved else 0.0
        reward += self.format_penalty if name is None else 0.0
        effective = self.state != before
        return self.next_step(name is not None, effective, reward, solved, boxes_home=float(home))

    def _boxes_on_targets(self) -> int:
        return len(self.state.boxes & self.level.targets)

    def metrics(self) -> Metrics:
        home = self._boxes_on_targets() / len(self.level.targets)
        return {"success": float(self.state.solved(self.level)), "boxes_home": home, **self.shares()}

    def actions(self) -> list[str]:
        return [format_answer(name) for name in MOVES]

    def oracle(self) -> str:
        """The next move of a shortest solution; `Up` when the level can no longer be solved."""
        if self.state not in self.solution:
            with suppress(SolverLimitExceeded):
                here = self.state
                for name in solve(self.level, here) or ():
                    self.solution[here] = name
                    here = apply_move(self.level, here, name)
        return format_answer(self.solution.get(self.state, "Up"))

    def state_key(self) -> str:
        """The board in the agent's observation."""
        return format_board(self.level, self.state, self.border).translate(self.translation)

    def render(self) -> str:
        return format_board(self.level, self.state).translate(self.translation)

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_sokoban

        return draw_sokoban(format_board(self.level, self.state))
