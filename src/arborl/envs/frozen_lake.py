"""FrozenLake: cross the ice from P to G without falling into a hole, one `<answer>Right</answer>` a turn.

Maps are random, solvable within the step limit, and come from the task's seed. One map in ten, chosen by a hash of the
map itself, belongs to the split `held_out`: training never draws it, whatever its seeds.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from arborl.envs.env import Env, Observation, Step
from arborl.seeds import generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
RULES = (
    "Cross the frozen lake from P to G. _ is ice, O is a hole. "
    "Each turn, answer with one move: <answer>Left</answer>, <answer>Down</answer>, <answer>Right</answer> "
    "or <answer>Up</answer>."
)
INVALID = "Not a move."
TRIES = 20_000
"""Maps drawn before giving up: a tiny lake may have none of a split within the step limit."""

Cell = tuple[int, int]


class FrozenLake(Env):
    """The lake.

    Args:
        size: cells a side.
        frozen: chance of a cell being ice.
        slippery: a move goes astray, to one side or the other, with chance 2/3.
        max_steps: the episode is truncated after this many.
        format_penalty: reward of a message that is not a move; the player stays.
    """

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        slippery: bool = False,
        max_steps: int = 10,
        format_penalty: float = -0.01,
    ):
        if not 2 <= size <= 20:
            raise ValueError(f"size={size}: give a number from 2 to 20")
        if not 0 < frozen <= 1:
            raise ValueError(f"frozen={frozen}: give a chance above 0 and up to 1")
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: give at least 1")
        if format_penalty > 0:
            raise ValueError(f"format_penalty={format_penalty}: a penalty is negative or zero")
        self.size, self.frozen, self.slippery = size, frozen, slippery
        self.max_steps, self.format_penalty = max_steps, format_penalty

    async def reset(self, task: Task, seed: int) -> Observation:
        self.grid, self.player = draw_map(
            task.seed, str(task.fields.get("split", "train")), self.size, self.frozen, self.max_steps
        )
        self.chance = generator(seed, "frozen_lake")
        self.steps = self.valid = self.effective = 0
        return Observation((Message("system", RULES), Message("user", self.render())), state_key=self.render())

    async def step(self, action: Message) -> Step:
        move = read_move(action.content)
        before = self.player
        if move is not None:
            self.player = self._slide(move)
        effective = self.player != before
        self.steps += 1
        self.valid += move is not None
        self.effective += effective
        cell = self.grid[self.player[0]][self.player[1]]
        text = self.render() if move else f"{INVALID}\n{self.render()}"
        return Step(
            Observation((Message("user", text),), state_key=self.render()),
            reward=self.format_penalty if move is None else float(cell == "G"),
            terminated=cell in "GO",
            truncated=cell not in "GO" and self.steps >= self.max_steps,
            info={"valid": float(move is not None), "effective": float(effective)},
        )

    def _slide(self, move: str) -> Cell:
        names = list(MOVES)
        if self.slippery:
            move = names[(names.index(move) + int(self.chance.integers(-1, 2))) % 4]
        row, column = self.player[0] + MOVES[move][0], self.player[1] + MOVES[move][1]
        return min(max(row, 0), self.size - 1), min(max(column, 0), self.size - 1)

    def metrics(self) -> Metrics:
        played = max(self.steps, 1)
        return {
            "success": float(self.grid[self.player[0]][self.player[1]] == "G"),
            "valid": self.valid / played,
            "effective": self.effective / played,
        }

    def actions(self) -> list[str]:
        return [f"<answer>{move}</answer>" for move in MOVES]

    def oracle(self) -> str:
        """A move of a shortest path (of the map without slipping)."""
        best = best_moves(self.grid, self.player)
        return f"<answer>{best[0] if best else 'Left'}</answer>"

    def render(self) -> str:
        rows = [list(row) for row in self.grid]
        row, column = self.player
        rows[row][column] = {"G": "√", "O": "X"}.get(rows[row][column], "P")
        return "\n".join("".join(cells) for cells in rows)

    def picture(self) -> Image:
        from arborl.envs.tiles import paint

        return paint(self.render())


def read_move(text: str) -> str | None:
    """The move in the first `<answer>…</answer>`; None where that is no move, or there is none."""
    found = ANSWER.search(text)
    return {name.lower(): name for name in MOVES}.get(found.group(1).strip().lower()) if found else None


@lru_cache(maxsize=4096)
def draw_map(seed: int, split: str, size: int, frozen: float, within: int) -> tuple[tuple[str, ...], Cell]:
    """A map of this split, and where the player starts. The same arguments give the same map on every machine."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split={split!r}: frozen_lake has 'train' and 'held_out'")
    chance = generator(seed, "map", size)
    for _ in range(TRIES):
        cells = np.where(chance.random(size * size) < frozen, "_", "O")
        start, goal = chance.choice(size * size, size=2, replace=False)
        cells[start], cells[goal] = "_", "G"
        grid = tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))
        player = (int(start) // size, int(start) % size)
        if _split(grid) == split and distances(grid).get(player, within + 1) <= within:
            return grid, player
    raise ValueError(
        f"no map of split {split!r} in {TRIES:,} draws with size={size}, frozen={frozen}, max_steps={within}: "
        "give a larger size, more ice or more steps"
    )


def _split(grid: tuple[str, ...]) -> str:
    """By the grid alone: a held-out lake is never trained on, not even from another start."""
    digest = hashlib.blake2b(repr(grid).encode(), digest_size=2).digest()
    return "held_out" if int.from_bytes(digest, "big") % 10 == 0 else "train"


@lru_cache(maxsize=4096)
def distances(grid: tuple[str, ...]) -> dict[Cell, int]:
    """Moves to the goal from every cell that can reach it over ice."""
    size = len(grid)
    goal = next((r, c) for r in range(size) for c in range(size) if grid[r][c] == "G")
    found = {goal: 0}
    queue = deque([goal])
    while queue:
        row, column = cell = queue.popleft()
        for down, right in MOVES.values():
            there = row + down, column + right
            if there not in found and 0 <= there[0] < size and 0 <= there[1] < size and grid[there[0]][there[1]] != "O":
                found[there] = found[cell] + 1
                queue.append(there)
    return found


def best_moves(grid: tuple[str, ...], player: Cell) -> list[str]:
    """Every move that begins a shortest path; empty where there is none."""
    far = distances(grid)
    here = far.get(player, 0)
    return [name for name, (d, r) in MOVES.items() if far.get((player[0] + d, player[1] + r), here) == here - 1]
