"""Checkpoints: complete or absent. Tensors are written by a function of the caller.

In reading order:

    checkpoint.py  Write, find and delete checkpoints; write in the background
    manifest.py    Size and hash of every file of a checkpoint
"""

from arborl.checkpoint.checkpoint import (
    BackgroundWriter,
    check_model,
    checkpoint_name,
    complete_checkpoints,
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

__all__ = [
    "BackgroundWriter",
    "DamagedCheckpoint",
    "check_model",
    "checkpoint_name",
    "complete_checkpoints",
    "find",
    "has_checkpoints",
    "load_state",
    "newest_usable",
    "resolve_path",
    "rewind",
    "save",
    "steps_around_age",
]
