"""A shortest solution of a Sokoban level, counted in moves.

A* over the states right after a push: between two pushes the player walks, and one flood fill gives all walks at once.
The estimate is the sum over the boxes of the pushes to the nearest target on an otherwise empty board, which never
exceeds the moves that are left; a box on a cell with no way to any target is lost, and so is the state.
"""

from __future__ import annotations

import heapq
from collections import deque
from functools import lru_cache

from arborl.envs.sokoban.board import BoardState, Level

MAX_STATES = 20_000
"""Pushes looked into before giving up. Boards of 10×10 with two boxes take some hundreds."""


class GaveUp(Exception):
    """The level may be solvable; the search was cut short."""


@lru_cache(maxsize=8192)
def solve(level: Level, state: BoardState, max_states: int = MAX_STATES) -> tuple[str, ...] | None:
    """The moves of a shortest solution; None where there is none.

    Raises:
        GaveUp: after `max_states` pushes.
    """
    far = pushes_to_target(level)
    if not state.boxes <= far.keys():
        return None
    came: dict[BoardState, tuple[BoardState, str] | None] = {state: None}
    cost = {state: 0}
    queue = [(estimate(far, state), 0, state.player, sorted(state.boxes), state)]
    done: set[BoardState] = set()
    while queue:
        *_, here = heapq.heappop(queue)
        if here in done:
            continue
        if here.solved(level):
            return _moves(level, state, here, came)
        done.add(here)
        if len(done) > max_states:
            raise GaveUp(f"no solution within {max_states:,} pushes")
        walks = walks_from(level, here)
        for name, delta in level.deltas.items():
            for box in here.boxes:
                stand, beyond = box - delta, box + delta
                if stand not in walks or beyond in level.walls or beyond in here.boxes or beyond not in far:
                    continue
                after = BoardState(box, (here.boxes - {box}) | {beyond})
                total = cost[here] + walks[stand] + 1
                if total < cost.get(after, 1 << 30):
                    cost[after], came[after] = total, (here, name)
                    ahead = estimate(far, after)
                    heapq.heappush(queue, (total + ahead, ahead, after.player, sorted(after.boxes), after))
    return None


@lru_cache(maxsize=1024)
def pushes_to_target(level: Level) -> dict[int, int]:
    """Pushes that a box alone on the board needs from each cell; cells that are not here have no way to a target."""
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


def estimate(far: dict[int, int], state: BoardState) -> int:
    return sum(far[box] for box in state.boxes)


def walks_from(level: Level, state: BoardState) -> dict[int, int]:
    """Moves to every cell the player can walk to."""
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
    level: Level, start: BoardState, end: BoardState, came: dict[BoardState, tuple[BoardState, str] | None]
) -> tuple[str, ...]:
    """The walks and pushes that led to `end`."""
    parts: list[list[str]] = []
    here = end
    while (last := came[here]) is not None:
        before, name = last
        box = here.player  # where the box was that the player pushed away
        parts.append([*_path(level, before, box - level.deltas[name]), name])
        here = before
    return tuple(name for part in reversed(parts) for name in part)


def _path(level: Level, state: BoardState, goal: int) -> list[str]:
    """A shortest walk to `goal`."""
    walks = walks_from(level, state)
    names: list[str] = []
    cell = goal
    while cell != state.player:
        name, delta = next((n, d) for n, d in level.deltas.items() if walks.get(cell - d, -1) == walks[cell] - 1)
        names.append(name)
        cell -= delta
    return names[::-1]
