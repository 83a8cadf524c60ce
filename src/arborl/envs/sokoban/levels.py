"""Where Sokoban levels come from: made by playing backwards from the solved board, or read from Boxoban files.

Whoever pulls boxes off their targets leaves a level that pushing solves, so every level made here can be solved; the
solver then says how long it takes.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from pathlib import Path

import numpy as np

from arborl.envs.sokoban.board import BoardState, Level, read
from arborl.envs.sokoban.solver import GaveUp, solve, walks_from
from arborl.envs.splits import check_split, split_of
from arborl.seeds import generator

TRIES = 2_000
"""Levels drawn before giving up: a small room may have none of a split within the step limit."""


@lru_cache(maxsize=8192)
def draw_level(
    seed: int, split: str, size: int, boxes: int, walls: float, pulls: int, within: int
) -> tuple[Level, BoardState]:
    """A level of this split that `within` moves solve. The same arguments give the same level on every machine."""
    check_split(split, "sokoban")
    chance = generator(seed, "sokoban", size, boxes)
    for _ in range(TRIES):
        level = draw_room(chance, size, boxes, walls)
        if level is None or split_of((sorted(level.walls), sorted(level.targets))) != split:
            continue
        state = play_backwards(chance, level, int(chance.integers(1, pulls + 1)))
        if state.boxes & level.targets:
            continue
        try:
            solution = solve(level, state)
        except GaveUp:  # many boxes: it can be solved, but nobody could say how soon
            continue
        if solution is not None and len(solution) <= within:
            return level, state
    raise ValueError(
        f"no level of split {split!r} in {TRIES:,} draws with size={size}, boxes={boxes}, walls={walls}, "
        f"pulls={pulls}, max_steps={within}: give a larger size, fewer boxes or walls, or more steps"
    )


def draw_room(chance: np.random.Generator, size: int, boxes: int, walls: float) -> Level | None:
    """A connected room with its targets; None where what was drawn is too small."""
    inside = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]
    open_cells = {cell for cell, drawn in zip(inside, chance.random(len(inside)), strict=True) if drawn >= walls}
    floor = sorted(_largest_part(open_cells, size))
    if len(floor) < 2 * boxes + 2:
        return None
    targets = frozenset(int(cell) for cell in chance.choice(floor, size=boxes, replace=False))
    return Level(size, size, frozenset(range(size * size)) - frozenset(floor), targets)


def _largest_part(cells: set[int], columns: int) -> set[int]:
    """The largest connected part of these cells; of equals, the first."""
    left, best = set(cells), set[int]()
    while left:
        start = min(left)
        part, queue = {start}, deque([start])
        while queue:
            cell = queue.popleft()
            for there in (cell - columns, cell + columns, cell - 1, cell + 1):
                if there in left and there not in part:
                    part.add(there)
                    queue.append(there)
        left -= part
        best = part if len(part) > len(best) else best
    return best


def play_backwards(chance: np.random.Generator, level: Level, pulls: int) -> BoardState:
    """From the solved board, pull boxes about at random; then put the player anywhere they can walk."""
    free = [cell for cell in range(level.rows * level.columns) if cell not in level.walls | level.targets]
    state = BoardState(_pick(chance, free), level.targets)
    for _ in range(pulls):
        walks = walks_from(level, state)
        options = [
            BoardState(box + 2 * delta, (state.boxes - {box}) | {box + delta})
            for box in sorted(state.boxes)
            for delta in level.deltas.values()
            if box + delta in walks and box + 2 * delta in walks
        ]
        if not options:
            break
        state = options[int(chance.integers(len(options)))]
    return BoardState(_pick(chance, sorted(walks_from(level, state))), state.boxes)


def _pick(chance: np.random.Generator, cells: list[int]) -> int:
    return cells[int(chance.integers(len(cells)))]


# ------------------------------------------------------------------------------------------------ files


def pick_level(seed: int, split: str, path: str) -> tuple[Level, BoardState]:
    """A level of this split from a file or folder of levels."""
    levels = read_levels(path)[check_split(split, "sokoban")]
    if not levels:
        raise ValueError(f"{path}: none of its levels falls into split {split!r}: give more levels")
    return levels[int(generator(seed, "boxoban").integers(len(levels)))]


@lru_cache(maxsize=8)
def read_levels(path: str) -> dict[str, list[tuple[Level, BoardState]]]:
    """The levels of a Boxoban file, or of all `.txt` files in a folder, by split.

    A level is its rows; a line that begins with `;`, or an empty one, ends the level before it.
    """
    place = Path(path).expanduser()
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise ValueError(f"{place}: no level files there; give a Boxoban file, or a folder that holds .txt files")
    found: dict[str, list[tuple[Level, BoardState]]] = {"train": [], "held_out": []}
    for file in files:
        for number, text in enumerate(split_levels(file.read_text(encoding="utf-8")), 1):
            level, state = read(text, f"{file}, level {number}")
            found[split_of((sorted(level.walls), sorted(level.targets)))].append((level, state))
    return found


def split_levels(text: str) -> list[str]:
    """The texts of the levels in one file."""
    levels: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(";") or not line.strip():
            levels.append([])
        else:
            levels[-1].append(line)
    return ["\n".join(rows) for rows in levels if rows]
