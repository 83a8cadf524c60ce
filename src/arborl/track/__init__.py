"""Tracking: where a run's numbers go: files, the terminal, services that follow it. It never changes what is trained.

In reading order:

    tracker.py       What a tracker is, and how several of them follow one run
    console.py       The terminal's view of a run: a live panel for people, one aligned line a step for pipes and CI
    jsonl.py         The metrics file: one JSON object a step
    folder_files.py  Files of a run folder: read within bounds, written without following links
    tensorboard.py   The same numbers for TensorBoard
    run_log.py       `run.log`: all that a run said on the console, and more, with times and levels
    logs.py          Log lines on the terminal: how many of them, and kept out of a live display
    from_config.py   Who else follows a run, as its configuration says
    aside.py         Trackers that may be slow, hang or break: each works in a thread of its own
    wandb_run.py     The run on Weights & Biases
    mlflow_run.py    The run on MLflow
    episode_rows.py  Some episodes of a step as rows of a table, for trackers that show tables
    run_ids.py       What a run is called by those who follow it, kept in its folder
    timeline.py      Who worked when, and who waited: one file a run in Chrome's trace format
    tracing.py       OpenTelemetry: who listens to the spans of a run, if anybody does
"""

from arborl.track.console import Console, table_before_after
from arborl.track.jsonl import JsonlTracker
from arborl.track.tensorboard import TensorBoardTracker
from arborl.track.tracker import Tracker, Trackers

__all__ = ["Console", "JsonlTracker", "TensorBoardTracker", "Tracker", "Trackers", "table_before_after"]
