"""`optimizer.pt` of a checkpoint: read without running what is in it, and refused in one line where it is of another
model or no such file at all."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from arborl.errors import ConfigError

NAME = "optimizer.pt"
KEYS = ("optimizer", "done", "budget")
WORDS = 200


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The state that a learner wrote. Only tensors and plain values are read, and no more than the file is long."""
    path = folder / NAME
    with one_line(path):
        if not path.is_file():
            raise ConfigError(f"{path}: is missing. A run can go on only from a checkpoint that has its optimizer.")
        _check_unpacked(path)
        state = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or any(key not in state for key in KEYS):
            raise ConfigError(f"{path}: is not the state of an Arbor learner, which has {', '.join(KEYS)}.")
        return state


def check_moments(moments: Mapping[int, Mapping[str, Any]], shapes: Sequence[torch.Size]) -> None:
    """Raise ValueError unless every moment has the shape of its parameter; torch finds out only when it steps."""
    for number, saved in moments.items():
        for name, value in saved.items():
            shape = shapes[number]
            if name != "step" and shape.numel() and value.shape != shape:
                raise ValueError(f"{name} of parameter {number} is {tuple(value.shape)}, the parameter {tuple(shape)}")


@contextmanager
def one_line(path: Path) -> Iterator[None]:
    """What a foreign file makes torch raise, as a ConfigError of one line that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        words = f"{words[:WORDS]}…" if len(words) > WORDS else words
        raise ConfigError(
            f"{path}: cannot be read, or is of another model ({type(error).__name__}: {words}). Give the checkpoint of "
            "a run with this model and these learner settings."
        ) from error


def _check_unpacked(path: Path) -> None:
    """torch writes what it saves as it is; what is packed may be any number of times as large as the file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as entries:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist()):
                raise ConfigError(f"{path}: has packed entries, which no learner writes.")
