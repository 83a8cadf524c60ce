"""Checkpoints: complete or not there. They never know what a model is: the caller's callback writes the tensors.

In reading order:

    checkpoint.py  Saving and finding checkpoints, so that a kill at any moment leaves a good one to resume from
    background.py  Writing while the run goes on: one thread, one job at a time, and no failure is lost
    manifest.py    The file that makes a checkpoint complete: every file with its size and hash, written last
"""

from arborl.checkpoint.background import BackgroundWriter
from arborl.checkpoint.checkpoint import (
    check_model,
    complete_checkpoints,
    find,
    has_checkpoints,
    load_state,
    rewind,
    save,
)
from arborl.checkpoint.manifest import DamagedCheckpoint

__all__ = [
    "BackgroundWriter",
    "DamagedCheckpoint",
    "check_model",
    "complete_checkpoints",
    "find",
    "has_checkpoints",
    "load_state",
    "rewind",
    "save",
]
