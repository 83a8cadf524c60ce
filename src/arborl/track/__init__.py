"""Tracking of a run: metrics files, terminal, hosted trackers, logs and traces. It never changes the training.

tracker.py              Tracker, Trackers and TensorBoardTracker; helpers for hosted trackers
console.py              The terminal output of a run
jsonl.py                The metrics file: one JSON object per step
folder_files.py         Bounded and safe access to the files of a run folder
run_log.py              Log lines on the terminal and in `run.log`
configured_trackers.py  The trackers that a configuration names; the tracker for MLflow
background_tracker.py   Runs a tracker in its own thread
timeline.py             Timeline of a run in Chrome's trace format
tracing.py              Export of spans with OpenTelemetry
"""

from arborl.track.console import Console, table_before_after
from arborl.track.jsonl import JsonlTracker
from arborl.track.tracker import TensorBoardTracker, Tracker, Trackers

__all__ = ["Console", "JsonlTracker", "TensorBoardTracker", "Tracker", "Trackers", "table_before_after"]
