"""Attention over trees by FlexAttention: one fused kernel that skips the blocks no token of which is seen.

Which blocks those are follows from `end` alone. The keys of block j are seen by an unbroken run of queries, from its
own first token to the largest `end` in it, since each key is followed by its own subtree; and wholly seen up to the
smallest. So the table of blocks is two comparisons on the CPU; asking the mask about every pair would take longer than
a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from arborl.learner.packing import MicroBatch
from arborl.learner.upload import upload
from arborl.models.attention import FREE, Bounds

SIZE = 128
"""Tokens a block. Batches are padded to whole blocks: one compiled kernel then serves every size."""

TILES = {f"bwd_BLOCK_{side}": 64 for side in ("M1", "N1", "M2", "N2")} | {"bwd_num_warps": 4, "bwd_num_stages": 2}
"""For heads of at most 64 numbers in 16 bits: an eighth less time in the backward pass than what torch would choose
(1.18 ms against 1.34 for 16,384 tokens of 14 heads on an H200)."""


class FlexAttend:
    """The whole micro-batch in one call; `batch` holds a whole number of blocks."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.batch, self.device = batch, device
        self.masks: dict[int | None, BlockMask] = {None: block_mask(batch.end, device)}

    def prepare(self, windows: Sequence[int]) -> None:
        """Make the masks of these windows, before layers are run: compiled ones cannot."""
        batch = self.batch
        for window in windows:
            reaches = window > batch.depth.max(initial=0)
            self.masks[window] = (
                self.masks[None] if reaches else block_mask(batch.end, self.device, batch.depth, window)
            )

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        # keys are repeated for the query heads that share them: the kernel could do without, but its backward pass then
        # has one program a key head, and leaves most of the device idle (0.97 ms a layer against 0.27)
        groups = q_NHD.shape[1] // k_NKD.shape[1]
        k_NHD, v_NHD = (x.repeat_interleave(groups, dim=1) for x in (k_NKD, v_NKD))
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NHD, v_NHD))
        fused: Any = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else compiled_flex()
        narrow = q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] <= 64
        given = {"block_mask": self.masks[bounds.window], "scale": scale, "kernel_options": TILES if narrow else None}
        out = fused(q, k, v, score_mod=None if bounds.cap is None else soft_cap(bounds.cap), **given)
        return out[0].transpose(0, 1)


@cache
def soft_cap(cap: float) -> Callable[..., Tensor]:
    """Scores held below `cap`."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention not compiled would hold every score in memory."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(end: np.ndarray, device: torch.device, depth: np.ndarray | None = None, window: int = 0) -> BlockMask:
    """Which blocks of keys each block of queries must look at, and which of them need no mask; with the tokens'
    `depth`, within a window of so many positions."""
    if len(end) % SIZE:
        raise ValueError(f"{len(end)} tokens are not a whole number of blocks of {SIZE}; pad the batch first")
    ends = end.reshape(-1, SIZE)
    block = np.arange(len(ends))
    query, key = block[:, None], block[None]
    seen = (query >= key) & (query * SIZE < ends.max(1)[None])
    whole = (query > key) & ((query + 1) * SIZE <= ends.min(1)[None])
    if depth is not None:
        depths = depth.reshape(-1, SIZE)
        seen &= depths.min(1)[:, None] - depths.max(1)[None] < window
        whole &= depths.max(1)[:, None] - depths.min(1)[None] < window
    partly = seen & ~whole
    tables = [table[None, None] for chosen in (partly, whole, partly.T, whole.T) for table in _table(chosen)]
    along = np.zeros_like(end) if depth is None else depth
    end_N, depth_N, *sent = upload(device, end.astype(np.int32), along.astype(np.int32), *tables)
    names = [
        f"{kind}{side}_{what}" for side in ("kv", "q") for kind in ("", "full_") for what in ("num_blocks", "indices")
    ]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_N[k])

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) & (depth_N[q] - depth_N[k] < window)

    given: dict[str, Any] = dict(zip(names, sent, strict=True))
    rule = visible if depth is None else near
    return BlockMask((len(end), len(end)), **given, BLOCK_SIZE=(SIZE, SIZE), mask_mod=rule)


def _table(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each block, how many blocks of the other side, and which, in order."""
    counts = chosen.sum(1).astype(np.int32)
    return counts, np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
