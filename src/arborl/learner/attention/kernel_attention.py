"""Attention over trees with Triton kernels, as a torch operation with gradients.

Without Triton the operation is defined but cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from arborl.learner.attention.tree_plan import Tiles, plan, tiles_for
from arborl.learner.core.packing import MicroBatch, upload
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention_layout
from arborl.models.model_loading import compute_device


class TritonTreeAttention:
    """Attention of the whole micro-batch in one call."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.batch, self.device = batch, device
        self.plans: dict[int | None, tuple[Tensor, tuple[int, int, int]]] = {}
        """By window: a plan's numbers on the device, and its sizes."""
        self.tiles: Tiles | None = None

    def prepare(
        self, windows: Sequence[int], key_heads: int, size: int, dtype: torch.dtype, tiles: Tiles | None = None
    ) -> None:
        """Compute the block plans without a window and for these windows, for key heads of this number and size."""
        tiles = tiles or tiles_for(size, dtype)
        if tiles is None:
            raise ValueError(f"no kernel for heads of {size} numbers in {dtype}")
        self.tiles = tiles
        made = [plan(self.batch.end, self.batch.depth, window, tiles, key_heads) for window in (None, *windows)]
        numbers = upload(self.device, *(one.numbers for one in made))
        self.plans = {
            window: (there, one.sizes) for window, there, one in zip((None, *windows), numbers, made, strict=True)
        }

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        numbers, sizes = self.plans[bounds.window]
        settings = (scale, bounds.window or 0, bounds.cap or 0.0, self.tiles)
        out: Tensor = _TreeAttention.apply(q_NHD, k_NKD, v_NKD, numbers, sizes, settings)
        return out


def supports_gpu_attention(model: PreTrainedModel) -> bool:
    if compute_device(model).device.type != "cuda" or find_spec("triton") is None:
        return False
    return tiles_for(attention_layout(model).size, compute_device(model).dtype) is not None


class _TreeAttention(Function):
    """A custom operation of `torch.library` instead would take 0.2 ms more of the host per layer and direction."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Tensor, sizes: tuple[int, int, int], settings: tuple[Any, ...]
    ) -> Tensor:
        from arborl.learner.attention import tree_kernels

        q, k, v = _dense(q), _dense(k), _dense(v)
        out, lse = tree_kernels.forward(q, k, v, plan, sizes, *settings)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, plan, out, lse)
        ctx.sizes, ctx.settings = sizes, settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        from arborl.learner.attention import tree_kernels

        q, k, v, plan, out, lse = ctx.saved_tensors
        if grads[0] is None:
            return (None,) * 6
        gradients = tree_kernels.backward(q, k, v, plan, ctx.sizes, out, _dense(grads[0]), lse, *ctx.settings)
        return *gradients, None, None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
