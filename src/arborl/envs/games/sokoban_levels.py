"""Sokoban levels: boards and moves, generation by reverse play, Boxoban files, and an A* solver."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

from arborl.envs.env import check_split, split_of
from arborl.seeds import generator

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = "#_OX√PS"
STANDARD = dict(zip("#_- .$*@+", "#___OX√PS", strict=True))
"""Symbols of level collections (XSB, Boxoban) -> symbols of this module."""


@lru_cache(maxsize=256)
def _deltas(columns: int) -> dict[str, int]:
    return {name: down * columns + right for name, (down, right) in MOVES.items()}


@dataclass(frozen=True, slots=True)
class Level:
    """Walls and targets. Cells are numbered row by row."""

    rows: int
    columns: int
    walls: frozenset[int]
    targets: frozenset[int]

    @property
    def deltas(self) -> dict[str, int]:
        """Difference of cell numbers for each move."""
        return _deltas(self.columns)


@dataclass(frozen=True, slots=True)
class BoardState:
    """Positions of the player and the boxes."""

    player: int
    boxes: frozenset[int]

    def solved(self, level: Level) -> bool:
        return self.boxes == level.targets


def apply_move(level: Level, state: BoardState, name: str) -> BoardState:
    """The state after this move; the same state when a wall or an immovable box blocks it."""
    delta = level.deltas[name]
    there, beyond = state.player + delta, state.player + 2 * delta
    if there in level.walls:
        return state
    if there not in state.boxes:
        return BoardState(there, state.boxes)
    if beyond in level.walls or beyond in state.boxes:
        return state
    return BoardState(there, (state.boxes - {there}) | {beyond})


def format_board(level: Level, state: BoardState, border: bool = True) -> str:
    """The board as text; without `border`, the outer wall is omitted."""
    edge = 0 if border else 1
    return "\n".join(
        "".join(_symbol(level, state, row * level.columns + column) for column in range(edge, level.columns - edge))
        for row in range(edge, level.rows - edge)
    )


def _symbol(level: Level, state: BoardState, cell: int) -> str:
    if cell in level.walls:
        return WALL
    on_target = cell in level.targets
    if cell == state.player:
        return PLAYER_ON_TARGET if on_target else PLAYER
    if cell in state.boxes:
        return BOX_ON_TARGET if on_target else BOX
    return TARGET if on_target else FLOOR


def parse_board(text: str, where: str = "level") -> tuple[Level, BoardState]:
    """A board from text, in this module's symbols or those of level collections. Rows are padded with wall."""
    rows = [line.rstrip("\n") for line in text.splitlines() if line.strip()]
    columns = max(map(len, rows), default=0)
    found: dict[str, set[int]] = {symbol: set() for symbol in "#_OX√PS"}
    for number, row in enumerate(rows):
        for column, char in enumerate(row.ljust(columns, "#")):
            symbol = char if char in found else STANDARD.get(char)
            if symbol is None:
                raise ValueError(f"{where}: {char!r} in row {number + 1} is not a level symbol: use # .$@*+ or _OX√PS")
            found[symbol].add(number * columns + column)
    players = found[PLAYER] | found[PLAYER_ON_TARGET]
    boxes = frozenset(found[BOX] | found[BOX_ON_TARGET])
    targets = frozenset(found[TARGET] | found[BOX_ON_TARGET] | found[PLAYER_ON_TARGET])
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"{where}: {len(players)} players, {len(boxes)} boxes and {len(targets)} targets: a level has one player, "
            "and as many boxes as targets"
        )
    level = Level(len(rows), columns, frozenset(found[WALL]), targets)
    rows_range, last = range(level.rows), (level.rows - 1) * level.columns
    ring = {row * level.columns + side for row in rows_range for side in (0, level.columns - 1)}
    if not level.walls >= ring.union(range(level.columns), range(last, last + level.columns)):
        raise ValueError(f"{where}: the border has a gap: enclose the level by wall (#)")
    return level, BoardState(next(iter(players)), boxes)


MAX_DRAWS = 2_000
"""Levels drawn before an error."""


@lru_cache(maxsize=8192)
def draw_level(
    seed: int, split: str, size: int, boxes: int, walls: float, pulls: int, within: int
) -> tuple[Level, BoardState]:
    """A level of this split with a solution of at most `within` moves; deterministic on every machine."""
    check_split(split, "sokoban")
    rng = generator(seed, "sokoban", size, boxes)
    for _ in range(MAX_DRAWS):
        level = generate_walls(rng, size, boxes, walls)
        if level is None or split_of((sorted(level.walls), sorted(level.targets))) != split:
            continue
        state = reverse_play(rng, level, int(rng.integers(1, pulls + 1)))
        if state.boxes & level.targets:
            continue
        try:
            solution = solve(level, state)
        except SolverLimitExceeded:  # solvable, but the length of the solution is unknown
            continue
        if solution is not None and len(solution) <= within:
            return level, state
    raise ValueError(
        f"no level of split {split!r} in {MAX_DRAWS:,} draws with size={size}, boxes={boxes}, walls={walls}, "
        f"pulls={pulls}, max_steps={within}: give a larger size, fewer boxes or walls, or more steps"
    )


def generate_walls(rng: np.random.Generator, size: int, boxes: int, walls: float) -> Level | None:
    """A connected floor with targets; None when the drawn floor is too small."""
    inside = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]
    open_cells = {cell for cell, drawn in zip(inside, rng.random(len(inside)), strict=True) if drawn >= walls}
    floor = sorted(_largest_component(open_cells, size))
    if len(floor) < 2 * boxes + 2:
        return None
    targets = frozenset(int(cell) for cell in rng.choice(floor, size=boxes, replace=False))
    return Level(size, size, frozenset(range(size * size)) - frozenset(floor), targets)


def _largest_component(cells: set[int], columns: int) -> set[int]:
    """The largest connected component; the first among equals."""
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


def reverse_play(rng: np.random.Generator, level: Level, pulls: int) -> BoardState:
    """Pull boxes at random from the solved board, then place the player on a reachable cell."""
    free = [cell for cell in range(level.rows * level.columns) if cell not in level.walls | level.targets]
    state = BoardState(_choose(rng, free), level.targets)
    for _ in range(pulls):
        distances = walking_distances(level, state)
        options = [
            BoardState(box + 2 * delta, (state.boxes - {box}) | {box + delta})
            for box in sorted(state.boxes)
            for delta in level.deltas.values()
            if box + delta in distances and box + 2 * delta in distances
        ]
        if not options:
            break
        state = options[int(rng.integers(len(options)))]
    return BoardState(_choose(rng, sorted(walking_distances(level, state))), state.boxes)


def _choose(rng: np.random.Generator, cells: list[int]) -> int:
    return cells[int(rng.integers(len(cells)))]


# ------------------------------------------------------------------------------------------------ files


def choose_level(seed: int, split: str, path: str) -> tuple[Level, BoardState]:
    """A level of this split from a file or folder of levels."""
    levels = read_levels(path)[check_split(split, "sokoban")]
    if not levels:
        raise ValueError(f"{path}: no level of split {split!r}: give more levels")
    return levels[int(generator(seed, "boxoban").integers(len(levels)))]


@lru_cache(maxsize=8)
def read_levels(path: str) -> dict[str, list[tuple[Level, BoardState]]]:
    """The levels of a Boxoban file, or of all `.txt` files in a folder, by split.

    A line that begins with `;`, or an empty line, ends a level.
    """
    place = Path(path).expanduser()
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise ValueError(f"{place}: no level files; give a Boxoban file, or a folder with .txt files")
    found: dict[str, list[tuple[Level, BoardState]]] = {"train": [], "held_out": []}
    for file in files:
        for number, text in enumerate(split_levels(file.read_text(encoding="utf-8")), 1):
            level, state = parse_board(text, f"{file}, level {number}")
            found[split_of((sorted(level.walls), sorted(level.targets)))].append((level, state))
    return found


def split_levels(text: str) -> list[str]:
    def is_row(line: str) -> bool:
        return bool(line.strip()) and not line.startswith(";")

    return ["\n".join(rows) for inside, rows in groupby(text.splitlines(), is_row) if inside]


MAX_STATES = 20_000
"""Expanded states before an error. 10×10 boards with two boxes need some hundreds."""


class SolverLimitExceeded(Exception):
    """The search stopped before it found a solution; the level may be solvable."""


@lru_cache(maxsize=8192)
def solve(level: Level, state: BoardState, max_states: int = MAX_STATES) -> tuple[str, ...] | None:
    """The moves of a shortest solution; None when the level is unsolvable.

    A* over the states after each push; the heuristic sums the pushes of each box to its nearest target on an empty
    board. A box on a cell without a path to a target makes the state unsolvable.

    Raises:
        SolverLimitExceeded: after `max_states` states.
    """
    far = pushes_to_target(level)
    if not state.boxes <= far.keys():
        return None
    predecessors: dict[BoardState, tuple[BoardState, str] | None] = {state: None}
    cost = {state: 0}
    queue = [(sum(far[box] for box in state.boxes), 0, state.player, sorted(state.boxes), state)]
    done: set[BoardState] = set()
    while queue:
        *_, here = heapq.heappop(queue)
        if here in done:
            continue
        if here.solved(level):
            return _moves(level, state, here, predecessors)
        done.add(here)
        if len(done) > max_states:
            raise SolverLimitExceeded(f"no solution within {max_states:,} pushes")
        distances = walking_distances(level, here)
        for name, delta in level.deltas.items():
            for box in here.boxes:
                stand, beyond = box - delta, box + delta
                if stand not in distances or beyond in level.walls or beyond in here.boxes or beyond not in far:
                    continue
                after = BoardState(box, (here.boxes - {box}) | {beyond})
                total = cost[here] + distances[stand] + 1
                if total < cost.get(after, 1 << 30):
                    cost[after], predecessors[after] = total, (here, name)
                    ahead = sum(far[box] for box in after.boxes)
                    heapq.heappush(queue, (total + ahead, ahead, after.player, sorted(after.boxes), after))
    return None


@lru_cache(maxsize=1024)
def pushes_to_target(level: Level) -> dict[int, int]:
    """Pushes of a single box from each cell to the nearest target; other cells have no path to a target."""
    far = dict.fromkeys(level.targets, 0)
    queue = deque(level.targets)
    while queue:
        cell = queue.popleft()
        for delta in level.deltas.values():
            before, stand = cell - delta, cell - 2 * delta
            if before not in far and before not in level.walls and stand not in level.walls:
                far[before] = far[cell] + 1
                queue.append(before)
    return far


def walking_distances(level: Level, state: BoardState) -> dict[int, int]:
    found = {state.player: 0}
    queue = deque([state.player])
    steps = tuple(level.deltas.values())
    while queue:
        cell = queue.popleft()
        for delta in steps:
            there = cell + delta
            if there not in found and there not in level.walls and there not in state.boxes:
                found[there] = found[cell] + 1
                queue.append(there)
    return found


def _moves(
    level: Level, start: BoardState, end: BoardState, predecessors: dict[BoardState, tuple[BoardState, str] | None]
) -> tuple[str, ...]:
    """The distances and pushes that led to `end`."""
    parts: list[list[str]] = []
    here = end
    while (last := predecessors[here]) is not None:
        before, name = last
        box = here.player  # the player stands where the pushed box was
        parts.append([*_path(level, before, box - level.deltas[name]), name])
        here = before
    return tuple(name for part in reversed(parts) for name in part)


def _path(level: Level, state: BoardState, goal: int) -> list[str]:
    """A shortest walk of the player to `goal`."""
    distances = walking_distances(level, state)
    names: list[str] = []
    cell = goal
    while cell != state.player:
        name, delta = next(
            (n, d) for n, d in level.deltas.items() if distances.get(cell - d, -1) == distances[cell] - 1
        )
        names.append(name)
        cell -= delta
    return names[::-1]
