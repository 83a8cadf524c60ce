"""Checkpoints: complete or not there. They never know what a model is: the caller's callback writes the tensors.

Start with `checkpoint.py` (save, find, load_state); `manifest.py` says what makes a folder complete.
"""

from arborl.checkpoint.checkpoint import any_of, check_model, complete, find, load_state, rewind, save
from arborl.checkpoint.manifest import Damaged

__all__ = ["Damaged", "any_of", "check_model", "complete", "find", "load_state", "rewind", "save"]
