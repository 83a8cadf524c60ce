"""Where and in which precision a model computes: where its parameters are, unless they are kept elsewhere.

A sharded model's parameters may rest in the host's memory and in float32, and still be multiplied on a GPU in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel


class Place(NamedTuple):
    """Of what flows between layers."""

    device: torch.device
    dtype: torch.dtype


_told: WeakKeyDictionary[PreTrainedModel, Place] = WeakKeyDictionary()


def place_of(model: PreTrainedModel) -> Place:
    """Where the model computes."""
    return _told[model] if model in _told else Place(model.device, model.dtype)


def stays_at(model: PreTrainedModel, place: Place) -> None:
    """The model goes on computing there, wherever its parameters are kept."""
    _told[model] = place
