"""Attention over trees with Triton kernels, as torch operations with gradients that torch.compile treats as opaque.

Without Triton the operations are defined but cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.learner.attention.tree_plan import Tile, Tiles, plan, tiles_for
from arborl.learner.core.packing import MicroBatch, upload
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention_layout
from arborl.models.model_loading import compute_device

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor plan"
SETTINGS = "float scale, int window, float cap, int[] tiles"
torch.library.define("arborl::tree_attend", f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor)")
torch.library.define(
    "arborl::tree_attend_backward",
    f"({INPUTS}, Tensor out, Tensor grad, Tensor lse, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
)


class TritonTreeAttention:
    """Attention of the whole micro-batch in one call."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.batch, self.device = batch, device
        self.plans: dict[int | None, Tensor] = {}
        self.tiles: list[int] = []

    def prepare(self, windows: Sequence[int], size: int, dtype: torch.dtype, tiles: Tiles | None = None) -> None:
        """Compute the block plans without a window and for these windows, for heads of this size."""
        tiles = tiles or tiles_for(size, dtype)
        if tiles is None:
            raise ValueError(f"no kernel for heads of {size} numbers in {dtype}")
        self.tiles = [number for tile in tiles for number in tile]
        made = [plan(self.batch.end, self.batch.depth, window, tiles) for window in (None, *windows)]
        self.plans = dict(zip((None, *windows), upload(self.device, *made), strict=True))

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        out, _ = torch.ops.arborl.tree_attend(
            q_NHD, k_NKD, v_NKD, self.plans[bounds.window], scale, bounds.window or 0, bounds.cap or 0.0, self.tiles
        )
        return out


def supports_gpu_attention(model: PreTrainedModel) -> bool:
    if compute_device(model).device.type != "cuda" or find_spec("triton") is None:
        return False
    return tiles_for(attention_layout(model).size, compute_device(model).dtype) is not None


def _tiles(numbers: Sequence[int]) -> Tiles:
    return Tiles(*(Tile(*numbers[i : i + 4]) for i in (0, 4, 8)))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.impl("arborl::tree_attend", ("CPU", "CUDA"))
def _run(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, scale: float, window: int, cap: float, tiles: Sequence[int]
) -> tuple[Tensor, Tensor]:
    from arborl.learner.attention import tree_kernels

    return tree_kernels.forward(_dense(q), _dense(k), _dense(v), plan, scale, window, cap, _tiles(tiles))


@torch.library.impl("arborl::tree_attend_backward", ("CPU", "CUDA"))
def _run_backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Tensor, out: Tensor, grad: Tensor, lse: Tensor,
    scale: float, window: int, cap: float, tiles: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from arborl.learner.attention import tree_kernels

    dense = (_dense(q), _dense(k), _dense(v), plan, out, _dense(grad), lse)
    return tree_kernels.backward(*dense, scale, window, cap, _tiles(tiles))


@torch.library.register_fake("arborl::tree_attend")
def _shape(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    count, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, count), dtype=torch.float32)


@torch.library.register_fake("arborl::tree_attend_backward")
def _shape_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, *settings = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, plan, out, lse)
    ctx.settings = settings


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, plan, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 8
    gradients = torch.ops.arborl.tree_attend_backward(q, k, v, plan, out, grad, lse, *ctx.settings)
    return (*gradients, *(None,) * 5)


torch.library.register_autograd("arborl::tree_attend", _differentiate, setup_context=_keep)
