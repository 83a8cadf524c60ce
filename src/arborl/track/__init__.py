"""Tracking: where a run's numbers go: a JSONL file, TensorBoard, the terminal. It never changes what is trained.

In reading order:

    tracker.py      What a tracker is, and how several of them follow one run
    console.py      The terminal's view of a run: a live panel for people, one aligned line a step for pipes and CI
    logs.py         Keeps log lines out of a live display: while it is up, they are printed above it
    jsonl.py        The metrics file: one JSON object a step
    tensorboard.py  The same numbers for TensorBoard
"""

from arborl.track.console import Console, table_before_after
from arborl.track.jsonl import JsonlTracker
from arborl.track.tensorboard import TensorBoardTracker
from arborl.track.tracker import Tracker, Trackers

__all__ = ["Console", "JsonlTracker", "TensorBoardTracker", "Tracker", "Trackers", "table_before_after"]
