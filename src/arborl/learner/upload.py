"""Arrays of the host on their way to the device that computes with them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16
"""Bytes: compiled code copies what does not begin at a multiple of these."""


def upload(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays of one type as tensors. To a GPU they travel as one, and the host does not wait for them."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    step = ALIGNED // arrays[0].itemsize
    starts = np.cumsum([0, *(-(-array.size // step) * step for array in arrays)])
    flat = torch.empty(int(starts[-1]), dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
    for array, start in zip(arrays, starts.tolist(), strict=False):
        flat.numpy()[start : start + array.size] = array.reshape(-1)
    there = flat.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]
