"""Weights as byte arrays: Ray's object store shares them between the processes of a node without a copy, and sends
them to each node once. No model is pickled."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WeightArrays = dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]
"""By name: dtype, shape, bytes."""


def as_arrays(weights: Mapping[str, Tensor]) -> WeightArrays:
    """Bytes of the weights; tied weights once, under their first name."""
    found: WeightArrays = {}
    places: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place in places and tensor.numel():
            continue
        places.add(place)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy())
    return found


def as_tensors(arrays: WeightArrays) -> dict[str, Tensor]:
    """Tensors in the memory of the arrays, which is read-only."""
    found = {}
    for name, (dtype, shape, flat) in arrays.items():
        kind = getattr(torch, dtype)
        if not flat.size:
            found[name] = torch.empty(shape, dtype=kind)
            continue
        with warnings.catch_warnings():  # about read-only memory
            warnings.simplefilter("ignore")
            found[name] = torch.from_numpy(flat).view(kind).reshape(shape)
    return found


def weight_bytes(weights: Mapping[str, Tensor]) -> int:
    """Size of the weights in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
