"""Attention over trees: token q sees token k exactly when k <= q < end[k].

Two ways to the same numbers. `DenseAttend` masks the square of each tree. `BlockAttend` cuts the tokens into blocks and
gives each block only the keys it can see: in depth-first order those are the ancestors of its first token and the block
itself, few when the tree has many branches. `attend_over` takes whichever multiplies less.

N tokens, H query heads, K key heads, D head size, B blocks of T tokens, S keys a block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from arborl.learner.batch import MicroBatch
from arborl.models.attention import Attend

BLOCK = 32
BUCKET = 16
"""Blocks attended in one call; they are sorted by their number of keys first, so that few are padded much."""
WORTH_GATHERING = 0.7
"""Blocks are used when they multiply less than this share of what the dense way does."""


def attend_over(batch: MicroBatch, device: torch.device) -> Attend:
    """The cheaper way for this micro-batch."""
    keys = block_keys(batch.end)
    blocks = BLOCK * sum(map(len, keys))
    dense = sum(length**2 for length in batch.lengths)
    if blocks < WORTH_GATHERING * dense:
        return BlockAttend(batch, keys, device)
    return DenseAttend(batch, device)


def block_keys(end: np.ndarray) -> list[np.ndarray]:
    """For each block of tokens, the keys any of them sees, in order."""
    starts = range(0, len(end), BLOCK)
    return [
        np.concatenate([np.flatnonzero(end[:start] > start), np.arange(start, min(start + BLOCK, len(end)))])
        for start in starts
    ]


class DenseAttend:
    """One masked square a tree."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.lengths = batch.lengths
        self.masks = []
        start = 0
        for length in batch.lengths:
            end = torch.from_numpy(batch.end[start : start + length] - start).to(device)
            place = torch.arange(length, device=device)
            self.masks.append((place[None] <= place[:, None]) & (place[:, None] < end[None]))
            start += length

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        outs = []
        parts = zip(*(x.split(self.lengths) for x in (q_NHD, k_NKD, v_NKD)), self.masks, strict=True)
        for q, k, v, mask in parts:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class Bucket:
    """Some blocks, each against its own gathered keys, padded to the most any of them has."""

    def __init__(self, starts: np.ndarray, keys: list[np.ndarray], end: np.ndarray, device: torch.device):
        gathered = np.zeros((len(keys), max(map(len, keys))), dtype=np.int64)
        real = np.zeros_like(gathered, dtype=bool)
        for row, own in enumerate(keys):
            gathered[row, : len(own)] = own
            real[row, : len(own)] = True
        # the last block repeats the last token where it runs out: a query that sees nothing would give NaN
        self.places = starts[:, None] + np.arange(BLOCK)
        query = np.minimum(self.places, len(end) - 1)[:, :, None]
        sees = (gathered[:, None] <= query) & (query < end[gathered][:, None]) & real[:, None]
        self.blocks = len(keys)
        self.query, self.keys, self.sees = (
            torch.from_numpy(x).to(device) for x in (query.reshape(-1), gathered.reshape(-1), sees[:, None])
        )
        self.mask: Tensor | None = None

    def attend(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        """The blocks' attended values, one after the other."""
        heads, size = k_NKD.shape[1:]
        groups = q_NHD.shape[1] // heads
        # query heads that share a key head become more queries of that head, so keys are never repeated
        q = q_NHD.index_select(0, self.query).view(self.blocks, BLOCK, heads, groups, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(self.blocks, heads, groups * BLOCK, size)
        k, v = (x.index_select(0, self.keys).view(self.blocks, -1, heads, size).transpose(1, 2) for x in (k_NKD, v_NKD))
        if self.mask is None:  # the same at every layer, and cheaper as numbers to add than as a choice to make
            bias = torch.zeros_like(self.sees, dtype=q.dtype).masked_fill_(~self.sees, float("-inf"))
            self.mask = bias.repeat(1, 1, groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale)
        out = out.view(self.blocks, heads, groups, BLOCK, size).permute(0, 3, 1, 2, 4)
        return out.reshape(self.blocks * BLOCK, heads * groups, size)


class BlockAttend:
    """Blocks in buckets of like numbers of keys; the tokens come back in their own order."""

    def __init__(self, batch: MicroBatch, keys: list[np.ndarray], device: torch.device):
        order = sorted(range(len(keys)), key=lambda block: len(keys[block]))
        chosen = [order[i : i + BUCKET] for i in range(0, len(order), BUCKET)]
        self.buckets = [
            Bucket(np.array(blocks) * BLOCK, [keys[b] for b in blocks], batch.end, device) for blocks in chosen
        ]
        places = np.concatenate([bucket.places.reshape(-1) for bucket in self.buckets])
        self.back = torch.from_numpy(np.argsort(places)[: len(batch.end)]).to(device)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        outs = [bucket.attend(q_NHD, k_NKD, v_NKD, scale) for bucket in self.buckets]
        return torch.cat(outs).index_select(0, self.back)
