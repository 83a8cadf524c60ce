"""Checkpoints: complete or absent. Tensors are written by a function of the caller.

In reading order:

    checkpoint.py  Write, find and delete checkpoints; write in the background
    manifest.py    Size and hash of every file of a checkpoint
    scores.py      CheckpointScores: which checkpoint is the best by a metric
"""

from arborl.checkpoint.checkpoint import (
    BackgroundWriter,
    check_model,
    checkpoint_name,
    complete_checkpoints,
    complete_steps,
    find,
    has_checkpoints,
    load_state,
    newest_usable,
    resolve_path,
    rewind,
    save,
    steps_around_age,
)
from arborl.checkpoint.manifest import DamagedCheckpoint
from arborl.checkpoint.scores import CheckpointScores

__all__ = [
    "BackgroundWriter",
    "CheckpointScores",
    "DamagedCheckpoint",
    "check_model",
    "checkpoint_name",
    "complete_checkpoints",
    "complete_steps",
    "find",
    "has_checkpoints",
    "load_state",
    "newest_usable",
    "resolve_path",
    "rewind",
    "save",
    "steps_around_age",
]
