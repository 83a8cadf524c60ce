"""Attention over trees: token q sees token k exactly when k <= q < end[k], and within a sliding window of depths.

Several implementations compute the same numbers; `path_selection.py` selects one. `PackedCausalAttention` is for trees
without branches, `DenseAttention` masks the square of each tree, and `BlockAttention` gives each block of tokens only
the keys that it sees: in depth-first order the ancestors of its first token and the block itself. `TritonTreeAttention`
(`kernel_attention.py`) is for GPUs, `CpuTreeAttention` (`cpu_kernels.py`) for CPUs with a C compiler.

N tokens, H query heads, K key heads, D head size, B blocks of T tokens, S keys per block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from arborl.learner.core.packing import MicroBatch
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention

BLOCK = 32
BUCKET = 16  # blocks per call. Blocks are sorted by their number of keys first, so that little is padded


def block_keys(end: np.ndarray) -> list[np.ndarray]:
    starts = range(0, len(end), BLOCK)
    return [
        np.concatenate([np.flatnonzero(end[:start] > start), np.arange(start, min(start + BLOCK, len(end)))])
        for start in starts
    ]


class PackedCausalAttention:
    def __init__(self, batch: MicroBatch, device: torch.device):
        lengths, starts = np.asarray(batch.lengths), np.cumsum(batch.lengths) - batch.lengths
        places = [starts[lengths == length][:, None] + np.arange(length) for length in np.unique(lengths)]
        self.one = len(lengths) == 1
        self.rows = [torch.from_numpy(group).to(device) for group in places]
        self.back = torch.from_numpy(np.argsort(np.concatenate([group.reshape(-1) for group in places]))).to(device)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        if self.one:
            return self._attend(q_NHD[None], k_NKD[None], v_NKD[None], scale, bounds)[0]
        outs = [self._attend(q_NHD[rows], k_NKD[rows], v_NKD[rows], scale, bounds).flatten(0, 1) for rows in self.rows]
        return torch.cat(outs).index_select(0, self.back)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bounds: AttentionLimits) -> Tensor:
        """`[rows, tokens, heads, size]` in and out."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length, mask = q.shape[2], None
        if bounds.window is not None and bounds.window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - bounds.window)
        return attention(q, k, v, scale, mask, mask is None, bounds.cap).transpose(1, 2)


class DenseAttention:
    def __init__(self, batch: MicroBatch, device: torch.device):
        self.lengths = batch.lengths
        self.trees = []
        start = 0
        for length in batch.lengths:
            here = slice(start, start + length)
            end, depth = (torch.from_numpy(x).to(device) for x in (batch.end[here] - start, batch.depth[here]))
            self.trees.append((end, depth))
            start += length
        self.masks: dict[int | None, list[Tensor]] = {}

    def _mask(self, end: Tensor, depth: Tensor, window: int | None) -> Tensor:
        place = torch.arange(len(end), device=end.device)
        sees = (place[None] <= place[:, None]) & (place[:, None] < end[None])
        return sees if window is None else sees & (depth[:, None] - depth[None] < window)

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        outs, window = [], bounds.window
        if window not in self.masks:
            self.masks[window] = [self._mask(end, depth, window) for end, depth in self.trees]
        parts = zip(*(x.split(self.lengths) for x in (q_NHD, k_NKD, v_NKD)), self.masks[window], strict=True)
        for q, k, v, mask in parts:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            outs.append(attention(q, k, v, scale, mask, cap=bounds.cap)[0].transpose(0, 1))
        return torch.cat(outs)


class BlockBucket:
    """Blocks with their gathered keys, padded to the longest."""

    def __init__(self, starts: np.ndarray, keys: list[np.ndarray], batch: MicroBatch, device: torch.device):
        end, depth = batch.end, batch.depth
        gathered = np.zeros((len(keys), max(map(len, keys))), dtype=np.int64)
        real = np.zeros_like(gathered, dtype=bool)
        for row, block in enumerate(keys):
            gathered[row, : len(block)] = block
            real[row, : len(block)] = True
        # the last block is padded with the last token: a query that sees nothing would give NaN
        self.places = starts[:, None] + np.arange(BLOCK)
        query = np.minimum(self.places, len(end) - 1)[:, :, None]
        sees = (gathered[:, None] <= query) & (query < end[gathered][:, None]) & real[:, None]
        self.blocks = len(keys)
        self.query, self.keys = query.reshape(-1), gathered.reshape(-1)
        self.sees = torch.from_numpy(sees[:, None]).to(device)
        self.distance = torch.from_numpy((depth[query] - depth[gathered][:, None])[:, None]).to(device)
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float, bounds: AttentionLimits) -> Tensor:
        heads, size = k_SKD.shape[1:]
        groups = q_NHD.shape[1] // heads
        # query heads of one key head become more queries of that head, so keys are not repeated
        q = q_NHD.view(self.blocks, BLOCK, heads, groups, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(self.blocks, heads, groups * BLOCK, size)
        k, v = (x.view(self.blocks, -1, heads, size).transpose(1, 2) for x in (k_SKD, v_SKD))
        if bounds.window not in self.masks:  # the same for every layer; adding a bias is cheaper than a Boolean mask
            sees = self.sees if bounds.window is None else self.sees & (self.distance < bounds.window)
            bias = torch.zeros_like(sees, dtype=q.dtype).masked_fill_(~sees, float("-inf"))
            self.masks[bounds.window] = bias.repeat(1, 1, groups, 1)
        out = attention(q, k, v, scale, self.masks[bounds.window], cap=bounds.cap)
        out = out.view(self.blocks, heads, groups, BLOCK, size).permute(0, 3, 1, 2, 4)
        return out.reshape(self.blocks * BLOCK, heads * groups, size)


class BlockAttention:
    """Blocks in buckets of similar numbers of keys. The keys of all buckets are gathered at once: the gradient of one
    large gather is much cheaper than those of many small ones."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        keys = block_keys(batch.end)
        order = sorted(range(len(keys)), key=lambda block: len(keys[block]))
        chosen = [order[i : i + BUCKET] for i in range(0, len(order), BUCKET)]
        self.buckets = [
            BlockBucket(np.array(blocks) * BLOCK, [keys[b] for b in blocks], batch, device) for blocks in chosen
        ]
        self.queries_each, self.keys_each = ([len(getattr(b, x)) for b in self.buckets] for x in ("query", "keys"))
        places = np.concatenate([bucket.places.reshape(-1) for bucket in self.buckets])
        self.query, self.keys, self.back = (
            torch.from_numpy(index).to(device)
            for index in (
                np.concatenate([bucket.query for bucket in self.buckets]),
                np.concatenate([bucket.keys for bucket in self.buckets]),
                np.argsort(places)[: len(batch.end)],
            )
        )

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        queries = q_NHD.index_select(0, self.query).split(self.queries_each)
        keys, values = (x.index_select(0, self.keys).split(self.keys_each) for x in (k_NKD, v_NKD))
        parts = zip(self.buckets, queries, keys, values, strict=True)
        outs = [bucket.attend(q, k, v, scale, bounds) for bucket, q, k, v in parts]
        return torch.cat(outs).index_select(0, self.back)
