"""Keys and values of what has been read, in slots; and attention of new tokens over them.

A slot holds one sequence from its start. N new tokens of R rows, L cached positions, H query heads, K key heads,
D head size, G = H / K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel


class Cache:
    """`slots` sequences of up to `length` tokens each."""

    def __init__(self, model: PreTrainedModel, slots: int, length: int):
        config = model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, slots, heads, length, size)
        # zeros, not empty: a masked position has weight 0, and 0 x NaN would be NaN
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.tokens = np.full((slots, length), -1, dtype=np.int64)
        self.filled = np.zeros(slots, dtype=np.int64)
        """How many tokens of each slot have keys and values."""
        self.used = np.zeros(slots, dtype=np.int64)
        """When each slot was last taken, to find the oldest."""

    def common_prefixes(self, prompt: np.ndarray) -> np.ndarray:
        """How much of `prompt` each slot has read, in tokens."""
        same = self.tokens[:, : len(prompt)] == prompt
        ends = np.zeros((len(same), 1), dtype=bool)  # a difference after the last token, for prompts wholly read
        return np.minimum(np.concatenate([same, ends], axis=1).argmin(1), self.filled)

    def copy(self, source: int, target: int, count: int) -> None:
        """Give slot `target` the first `count` tokens of `source`."""
        if source != target:
            self.keys[:, target, :, :count] = self.keys[:, source, :, :count]
            self.values[:, target, :, :count] = self.values[:, source, :, :count]
            self.tokens[target, :count] = self.tokens[source, :count]
        self.filled[target] = count

    def forget(self) -> None:
        """The weights have changed: nothing that was read counts any more."""
        self.filled[:] = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows that bring a like number of new tokens, attended in one call; only attention is padded."""

    rows: slice | Tensor
    """Slots, one a row. A slice avoids copying the cache."""
    place: tuple[Tensor, Tensor] | None
    """Row and column of each new token in the padded `[R, T]`; None where they fill it in order."""
    shape: tuple[int, int]
    mask: Tensor
    """`[R, 1, G * T, L]`, to be added: 0 where a new token sees a cached one, minus infinity elsewhere."""
    span: slice
    """Where this lane's tokens stand among the N."""


class CacheAttend:
    """Attention of one step: the new tokens' keys and values go into the cache, then each row looks at its slot."""

    def __init__(self, cache: Cache, slot_N: Tensor, position_N: Tensor, lanes: list[Lane]):
        self.cache, self.slot_N, self.position_N, self.lanes = cache, slot_N, position_N, lanes

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot_N, :, self.position_N] = k_NKD
        values[self.slot_N, :, self.position_N] = v_NKD
        return torch.cat([self._attend(lane, keys, values, q_NHD[lane.span], scale) for lane in self.lanes])

    @staticmethod
    def _attend(lane: Lane, keys: Tensor, values: Tensor, q_NHD: Tensor, scale: float) -> Tensor:
        (rows, width), heads = lane.shape, keys.shape[1]
        length = lane.mask.shape[-1]
        if lane.place is None:
            q_RTHD = q_NHD.reshape(rows, width, *q_NHD.shape[1:])
        else:
            q_RTHD = q_NHD.new_zeros(rows, width, *q_NHD.shape[1:])
            q_RTHD[lane.place] = q_NHD
        groups, size = q_RTHD.shape[2] // heads, q_RTHD.shape[3]
        # query heads that share a key head become more queries of that head, so keys are never repeated
        q = q_RTHD.view(rows, width, heads, groups, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, heads, groups * width, size)
        k, v = keys[:, :, :length][lane.rows], values[:, :, :length][lane.rows]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=lane.mask, scale=scale)
        out = out.view(rows, heads, groups, width, size).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows, width, heads * groups, size)
        return out.reshape(q_NHD.shape) if lane.place is None else out[lane.place]


def lane(cache: Cache, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, offset: int, groups: int) -> Lane:
    """The lane of these rows: row i brings `counts[i]` new tokens to slot `slots[i]`, which has read `starts[i]`.

    When the rows fill most of a run of slots, the whole run is taken as a view; the rows in between see nothing new and
    their output is not read.
    """
    device = cache.keys.device
    width, length = int(counts.max()), int((starts + counts).max())
    top = int(slots.max()) + 1
    dense = len(slots) * 2 > top
    rows = top if dense else len(slots)
    row_of = slots if dense else np.arange(len(slots))
    start = np.zeros(rows, dtype=np.int64)
    start[row_of] = starts
    query = start[:, None] + np.arange(width)  # [R, T] position of each new token
    sees = np.arange(length)[None, None] <= query[:, :, None]
    bias = torch.from_numpy(np.where(sees, np.float32(0), np.float32("-inf"))).to(cache.keys)
    row = np.repeat(row_of, counts)
    column = np.concatenate([np.arange(c) for c in counts])
    full = len(row) == rows * width and bool((row[1:] >= row[:-1]).all())
    return Lane(
        slice(0, top) if dense else torch.from_numpy(slots).to(device),
        None if full else (torch.from_numpy(row).to(device), torch.from_numpy(column).to(device)),
        (rows, width),
        bias.repeat(1, groups, 1)[:, None],
        slice(offset, offset + int(counts.sum())),
    )
