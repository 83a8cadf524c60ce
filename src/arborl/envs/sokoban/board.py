"""A Sokoban level, what a move does to it, and how it is written.

Cells are numbers, row by row, so a state is a number and a few numbers: quick to copy, hash and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

WALL, FLOOR, TARGET, BOX, BOX_HOME, PLAYER, PLAYER_HOME = "#_OX√PS"
STANDARD = {"#": WALL, " ": FLOOR, "-": FLOOR, ".": TARGET, "$": BOX, "*": BOX_HOME, "@": PLAYER, "+": PLAYER_HOME}
"""The symbols of level collections (XSB, Boxoban) in ours."""


@dataclass(frozen=True, slots=True)
class Level:
    """What does not move: walls and targets."""

    rows: int
    columns: int
    walls: frozenset[int]
    targets: frozenset[int]

    @property
    def deltas(self) -> dict[str, int]:
        """What each move adds to a cell's number."""
        return _deltas(self.columns)


@dataclass(frozen=True, slots=True)
class BoardState:
    """What moves."""

    player: int
    boxes: frozenset[int]

    def solved(self, level: Level) -> bool:
        return self.boxes == level.targets


@lru_cache(maxsize=256)
def _deltas(columns: int) -> dict[str, int]:
    return {name: down * columns + right for name, (down, right) in MOVES.items()}


def move(level: Level, state: BoardState, name: str) -> BoardState:
    """The state after this move; the same one where a wall, or a box that cannot move, is in the way."""
    delta = level.deltas[name]
    there, beyond = state.player + delta, state.player + 2 * delta
    if there in level.walls:
        return state
    if there not in state.boxes:
        return BoardState(there, state.boxes)
    if beyond in level.walls or beyond in state.boxes:
        return state
    return BoardState(there, (state.boxes - {there}) | {beyond})


def write(level: Level, state: BoardState, border: bool = True) -> str:
    """The board as text; without `border`, the outermost ring (always wall) is left out."""
    edge = 0 if border else 1
    return "\n".join(
        "".join(_symbol(level, state, row * level.columns + column) for column in range(edge, level.columns - edge))
        for row in range(edge, level.rows - edge)
    )


def _symbol(level: Level, state: BoardState, cell: int) -> str:
    if cell in level.walls:
        return WALL
    home = cell in level.targets
    if cell == state.player:
        return PLAYER_HOME if home else PLAYER
    if cell in state.boxes:
        return BOX_HOME if home else BOX
    return TARGET if home else FLOOR


def read(text: str, where: str = "level") -> tuple[Level, BoardState]:
    """A board from text, in our symbols or in those of level collections. Rows are filled up with wall.

    Example:
        level, state = read("#####\\n#@$.#\\n#####")

    Args:
        text: the rows.
        where: its place, for the error message.
    """
    rows = [line.rstrip("\n") for line in text.splitlines() if line.strip()]
    columns = max(map(len, rows), default=0)
    found: dict[str, set[int]] = {symbol: set() for symbol in "#_OX√PS"}
    for number, row in enumerate(rows):
        for column, given in enumerate(row.ljust(columns, "#")):
            symbol = given if given in found else STANDARD.get(given)
            if symbol is None:
                raise ValueError(
                    f"{where}: {given!r} in row {number + 1} is no symbol of a level: use # .$@*+ or _OX√PS"
                )
            found[symbol].add(number * columns + column)
    players = found[PLAYER] | found[PLAYER_HOME]
    boxes = frozenset(found[BOX] | found[BOX_HOME])
    targets = frozenset(found[TARGET] | found[BOX_HOME] | found[PLAYER_HOME])
    if len(players) != 1 or not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"{where}: {len(players)} players, {len(boxes)} boxes and {len(targets)} targets: a level has one player, "
            "and as many boxes as targets"
        )
    level = Level(len(rows), columns, frozenset(found[WALL]), targets)
    if not level.walls >= _ring(level):
        raise ValueError(f"{where}: the edge has a gap: a level is enclosed by wall (#)")
    return level, BoardState(next(iter(players)), boxes)


def _ring(level: Level) -> set[int]:
    last = (level.rows - 1) * level.columns
    ring = set(range(level.columns)) | set(range(last, last + level.columns))
    return ring | {row * level.columns + side for row in range(level.rows) for side in (0, level.columns - 1)}
