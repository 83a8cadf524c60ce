"""Tracking: where a run's numbers go: a JSONL file, TensorBoard, the terminal. It never changes what is trained.

Start with `tracker.py` (the protocol and the fan-out), then `jsonl.py` (the file every other room reads).
"""

from arborl.track.console import Console, table_before_after
from arborl.track.jsonl import JsonlTracker
from arborl.track.tensorboard import TensorBoardTracker
from arborl.track.tracker import Tracker, Trackers

__all__ = ["Console", "JsonlTracker", "TensorBoardTracker", "Tracker", "Trackers", "table_before_after"]
