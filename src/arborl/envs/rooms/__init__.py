"""Rooms: find the treasure in a house with locked doors and their keys.

Start with `game.py` (the environment), then `house.py` (a house, and how one is drawn) and `walk.py` (what can be done
in it, and the shortest way).
"""

from arborl.envs.rooms.game import Rooms

__all__ = ["Rooms"]
