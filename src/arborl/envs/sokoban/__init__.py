"""Sokoban: push every box onto a target.

Start with `game.py` (the environment), then `board.py` (a level and its moves), `levels.py` (levels made by reverse
play, or read from Boxoban files) and `solver.py` (a shortest solution).
"""

from arborl.envs.sokoban.game import Sokoban

__all__ = ["Sokoban"]
