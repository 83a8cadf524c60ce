"""FrozenLake: walk from P to G without falling into a hole, one `<answer>Right</answer>` per turn.

Maps are drawn from the task's seed and solvable within the step limit. One map in ten, by a hash of the map, belongs to
the split `held_out`; training never draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arborl.envs.env import Observation, Step, check_split, format_answer, parse_choice, split_of, task_split
from arborl.envs.games.text_game import TextGame, chosen_symbols, require
from arborl.seeds import generator
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from PIL.Image import Image

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
SYMBOLS = {
    "player": "P", "ice": "_", "hole": "O", "goal": "G", "player_in_hole": "X", "player_on_goal": "√",
}  # fmt: skip
"""Characters of the board."""
TEMPLATE = (
    "Cross the frozen lake from {player} to {goal}. {ice} is ice, {hole} is a hole. "
    "Each turn, answer with one move: <answer>Left</answer>, <answer>Down</answer>, <answer>Right</answer> "
    "or <answer>Up</answer>."
)
RULES = TEMPLATE.format(**SYMBOLS)
PLAYER = {"G": "√", "O": "X", "_": "P"}
"""Symbol of the player, by the cell below."""
MAX_DRAWS = 20_000
"""Maps drawn before an error: a tiny lake may have no map of a split within the step limit."""
MAX_PICTURE_PIXELS = 960
LARGE = 20
"""Above this size, the start is drawn among the cells within reach of the goal."""

Cell = tuple[int, int]


@dataclass(eq=False)
class FrozenLake(TextGame):
    """Cross a frozen lake without falling into a hole."""

    blocking = False
    tagged = True
    rules, invalid = RULES, "Not a move."

    size: int = 4
    """Cells per side."""
    frozen: float = 0.8
    """Probability that a cell is ice."""
    slippery: bool = False
    """A move goes to one side or the other with probability 2/3."""
    max_steps: int = 10
    """The episode is truncated after this many steps."""
    format_penalty: float = -0.01
    """Reward of an illegal message; the player does not move."""
    spaced: bool = False
    """Print a space between cells. Large vocabularies otherwise join neighbouring cells (`____` is one token), and
    small models cannot distinguish columns."""
    symbols: Mapping[str, str] | None = None
    """Other characters for cells: `{ice: ".", hole: "#"}`. Kinds: `player`, `ice`, `hole`, `goal`, `player_in_hole`,
    `player_on_goal`. The rules name them too."""

    def __post_init__(self) -> None:
        if self.symbols:
            chosen = chosen_symbols(self.symbols, SYMBOLS)
            self.rules = TEMPLATE.format(**chosen)
            self.translation = str.maketrans({SYMBOLS[kind]: sign for kind, sign in chosen.items()})
        require(self.size >= 2, f"size={self.size}: give 2 or more")
        require(0 < self.frozen <= 1, f"frozen={self.frozen}: give a probability above 0, at most 1")
        self.check_limits()

    async def reset(self, task: Task, seed: int) -> Observation:
        split = task_split(task, "frozen_lake")
        self.grid, self.player = draw_map(task.seed, split, self.size, self.frozen, self.max_steps)
        self.rng = generator(seed, "frozen_lake") if self.slippery else None
        return self.opening(self._spaced_board())

    async def step(self, action: Message) -> Step:
        move = parse_move(action.content)
        before = self.player
        if move is not None:
            self.player = self._slide(move)
        cell = self.grid[self.player[0]][self.player[1]]
        reward = self.format_penalty if move is None else float(cell == "G")
        effective = self.player != before
        return self.next_step(move is not None, effective, reward, cell in "GO", self._spaced_board())

    def _spaced_board(self) -> str | None:
        """The board with a space between cells if `spaced` is set."""
        return "\n".join(map(" ".join, self.render().split("\n"))) if self.spaced else None

    def _slide(self, move: str) -> Cell:
        if self.rng is not None:
            names = list(MOVES)
            move = names[(names.index(move) + int(self.rng.integers(-1, 2))) % 4]
        down, right = MOVES[move]
        row, column = self.player[0] + down, self.player[1] + right
        return min(max(row, 0), self.size - 1), min(max(column, 0), self.size - 1)

    def metrics(self) -> Metrics:
        return {"success": float(self.grid[self.player[0]][self.player[1]] == "G"), **self.shares()}

    def actions(self) -> list[str]:
        return [format_answer(move) for move in MOVES]

    def oracle(self) -> str:
        """A move of a shortest path; on slippery ice the move with the highest probability of reaching the goal."""
        if self.slippery:
            return format_answer(safest_move(self.grid, self.player, self.max_steps - self.steps, self.max_steps))
        best = best_moves(self.grid, self.player)
        return format_answer(best[0] if best else "Left")

    def render(self) -> str:
        return self.board().translate(self.translation) if self.symbols else self.board()

    def board(self) -> str:
        """The board with the usual characters."""
        row, column = self.player
        line = self.grid[row]
        shown = f"{line[:column]}{PLAYER[line[column]]}{line[column + 1 :]}"
        return "\n".join((*self.grid[:row], shown, *self.grid[row + 1 :]))

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_frozen_lake

        return draw_frozen_lake(self.board(), cell=max(8, min(48, MAX_PICTURE_PIXELS // self.size)))


def parse_move(text: str) -> str | None:
    """The move in the first `<answer>…</answer>`; None without one."""
    return parse_choice(text, MOVES)


@lru_cache(maxsize=4096)
def draw_map(seed: int, split: str, size: int, frozen: float, within: int) -> tuple[tuple[str, ...], Cell]:
    """A map of this split, and the start cell; deterministic on every machine."""
    check_split(split, "frozen_lake")
    rng = generator(seed, "map", size)
    for _ in range(MAX_DRAWS):
        cells = np.where(rng.random(size * size) < frozen, "_", "O")
        start, goal = rng.choice(size * size, size=2, replace=False)
        cells[start], cells[goal] = "_", "G"
        grid = tuple("".join(cells[row * size : (row + 1) * size]) for row in range(size))
        player = (int(start) // size, int(start) % size)
        if split_of(grid) != split:  # of the grid alone: a held-out map is not trained on from another start either
            continue
        if size > LARGE:
            near = [cell for cell, far in distances(grid).items() if 1 <= far <= within]
            player = near[int(rng.integers(len(near)))] if near else player
        if distances(grid).get(player, within + 1) <= within:
            return grid, player
    raise ValueError(
        f"no map of split {split!r} in {MAX_DRAWS:,} draws with size={size}, frozen={frozen}, max_steps={within}: "
        "give a larger size, more ice or more steps"
    )


@lru_cache(maxsize=4096)
def distances(grid: tuple[str, ...]) -> dict[Cell, int]:
    """Number of moves to the goal from every cell that can reach it."""
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
    """First moves of all shortest paths; empty without a path."""
    far = distances(grid)
    here = far.get(player, 0)
    return [name for name, (d, r) in MOVES.items() if far.get((player[0] + d, player[1] + r), here) == here - 1]


def safest_move(grid: tuple[str, ...], player: Cell, steps: int, horizon: int) -> str:
    """On slippery ice: the move with the highest probability of reaching the goal within `steps`."""
    names, by_steps = list(MOVES), goal_probabilities(grid, horizon)
    landing = _landing_values(by_steps[min(max(steps - 1, 0), len(by_steps) - 1)])
    mean = [sum(landing[(i + turn) % 4][player] for turn in (-1, 0, 1)) for i in range(4)]
    return names[int(np.argmax(np.round(mean, 12)))]  # rounded: ties are resolved equally on every machine


@lru_cache(maxsize=256)
def goal_probabilities(grid: tuple[str, ...], horizon: int) -> list[NDArray[np.float64]]:
    """On slippery ice: value iteration for the probability of reaching the goal within 0, 1, 2, … steps from each cell.

    The list ends at `horizon`, or when the values converge.
    """
    cells = np.array([list(row) for row in grid])
    found = [np.where(cells == "G", 1.0, 0.0)]
    while len(found) <= horizon:
        landing = _landing_values(found[-1])
        best = np.max([(landing[i - 1] + landing[i] + landing[(i + 1) % 4]) / 3 for i in range(4)], axis=0)
        found.append(np.where(cells == "G", 1.0, np.where(cells == "O", 0.0, best)))
        if np.abs(found[-1] - found[-2]).max() < 1e-9:
            break
    return found


def _landing_values(value: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """For each move, the value of the cell that it reaches from every cell."""
    size = len(value)
    index = np.arange(size)
    return [
        value[np.clip(index + down, 0, size - 1)][:, np.clip(index + right, 0, size - 1)]
        for down, right in MOVES.values()
    ]
