"""Keys and values in blocks, and attention of new tokens over them with torch.

N new tokens of R sequences, H query heads, K key heads, D head size, G = H / K, P tokens per block, L tokens of
context.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from arborl.engines.engine import default_cache_tokens
from arborl.engines.local.sleepable_memory import SleepableMemory
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention, attention_layout

Array = NDArray[np.int64]


class KVCache:
    """`num_blocks` blocks of `block_size` tokens of all layers: keys and values `[layers, blocks, K, P, D]`."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int, sleep_mode: bool = False):
        layout = attention_layout(model)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.groups = layout.heads // layout.key_heads
        shape = (layout.layers, num_blocks, layout.key_heads, block_size, layout.size)
        self.memory: SleepableMemory | None = None
        self.is_awake = True
        # zeros, not empty: a masked position has weight 0, and 0 x NaN would be NaN
        if sleep_mode and model.device.type == "cuda":
            self.memory = SleepableMemory(2 * math.prod(shape) * model.dtype.itemsize, model.device)
            self.keys, self.values = self.memory.tensor().view(model.dtype).view(2, *shape)
            self.clear()
        else:
            self.keys, self.values = (lazy_zeros(shape, model.dtype, model.device) for _ in range(2))

    @property
    def can_sleep(self) -> bool:
        return self.memory is not None

    def sleep(self) -> None:
        if self.is_awake and self.memory is not None:
            self.memory.sleep()
            self.is_awake = False

    def wake_up(self) -> None:
        if not self.is_awake and self.memory is not None:
            self.memory.wake_up()
            self.is_awake = True
            self.clear()

    def copy(self, source: int, target: int, count: int) -> None:
        self.keys[:, target, :, :count] = self.keys[:, source, :, :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def clear(self, num_blocks: int | None = None) -> None:
        """Zero the first `num_blocks` blocks, or all: NaN left in a block would spoil masked positions."""
        if self.is_awake:
            self.keys[:, :num_blocks].zero_()
            self.values[:, :num_blocks].zero_()


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU from numpy: the operating system hands out zero pages lazily, while torch writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


def token_bytes(model: PreTrainedModel) -> int:
    layout = attention_layout(model)
    return 2 * layout.layers * layout.key_heads * layout.size * model.dtype.itemsize


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_kv_tokens(model: PreTrainedModel, context: int) -> int:
    device = model.device.type
    memory = torch.cuda.mem_get_info(model.device)[0] if device == "cuda" else host_memory()
    return default_cache_tokens(device, memory, token_bytes(model), context)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The new tokens of one step: sequence i adds its tokens `starts[i]` to `ends[i]`."""

    starts: Array
    ends: Array
    tables: NDArray[np.int32]

    @property
    def counts(self) -> Array:
        return self.ends - self.starts

    @property
    def positions(self) -> Array:
        counts = self.counts
        before = np.cumsum(counts) - counts
        return np.arange(int(counts.sum())) - np.repeat(before - self.starts, counts)

    def slots(self, block_size: int) -> Array:
        """Slot of every new token: block times block size plus offset."""
        positions, row = self.positions, np.repeat(np.arange(len(self.starts)), self.counts)
        return self.tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention runs in one call: those with one new token, or those with several."""

    blocks: slice | Tensor
    """The blocks of each sequence: `[R * blocks per sequence]`, or a slice of the cache with one block per sequence."""
    place: tuple[Tensor, Tensor] | None
    """Row and column of each new token in the padded `[R, T]`; None where the tokens fill it in order."""
    shape: tuple[int, int]
    query: Tensor
    """`[R, T]`: the position of each new token."""
    length: int
    groups: int
    span: slice
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window; made at first use, for all layers."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[R, 1, G * T, L]`: 0 where a new token sees a cached one, minus infinity elsewhere."""
        if window is not None and window >= self.length:
            window = None
        if window not in self.masks:
            key, query = torch.arange(self.length, device=self.query.device), self.query[:, :, None]
            hidden = query < key
            if window is not None:
                hidden |= query - key >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))
            self.masks[window] = (mask.repeat(1, self.groups, 1) if self.groups > 1 else mask)[:, None]
        return self.masks[window]


class TorchAttention:
    """Attention of one step: stores the new keys and values, then attends over each sequence's blocks."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata):
        self.cache = cache
        slots = metadata.slots(cache.block_size)
        device = cache.keys.device
        self.block_N = torch.from_numpy(slots // cache.block_size).to(device)
        self.offset_N = torch.from_numpy(slots % cache.block_size).to(device)
        self.groups: list[AttentionGroup] = []
        offset, single = 0, metadata.counts == 1
        if not single[: single.sum()].all():
            raise ValueError("sequences with one new token come first")
        for chosen in (single, ~single):
            if chosen.any():
                part = AttentionMetadata(metadata.starts[chosen], metadata.ends[chosen], metadata.tables[chosen])
                self.groups.append(attention_group(cache, part, offset))
                offset = self.groups[-1].span.stop

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.block_N, :, self.offset_N] = k_NKD
        values[self.block_N, :, self.offset_N] = v_NKD
        outs = [_attend(group, keys, values, q_NHD[group.span], scale, limits) for group in self.groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(
    group: AttentionGroup, keys: Tensor, values: Tensor, q_NHD: Tensor, scale: float, limits: AttentionLimits
) -> Tensor:
    (rows, width), heads = group.shape, keys.shape[1]
    if group.place is None:
        q_RTHD = q_NHD.reshape(rows, width, *q_NHD.shape[1:])
    else:
        q_RTHD = q_NHD.new_zeros(rows, width, *q_NHD.shape[1:])
        q_RTHD[group.place] = q_NHD
    groups, size = q_RTHD.shape[2] // heads, q_RTHD.shape[3]
    # query heads that share a key head become further queries of that head, so keys are never repeated
    q = q_RTHD.view(rows, width, heads, groups, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(rows, heads, groups * width, size)
    k, v = (_gather(group, cached) for cached in (keys, values))
    out = attention(q, k, v, scale, group.mask(limits.window, q.dtype), cap=limits.cap)
    out = out.view(rows, heads, groups, width, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows, width, heads * groups, size)
    return out.reshape(q_NHD.shape) if group.place is None else out[group.place]


def _gather(group: AttentionGroup, cached: Tensor) -> Tensor:
    """Keys (or values) of each sequence, `[R, K, L, D]`."""
    length = group.length
    if isinstance(group.blocks, slice):
        return cached[group.blocks, :, :length]
    rows, heads, size = group.shape[0], cached.shape[1], cached.shape[3]
    if len(group.blocks) == rows:
        return cached[:, :, :length].index_select(0, group.blocks)
    gathered = cached.index_select(0, group.blocks).view(rows, -1, heads, *cached.shape[2:])
    return gathered.transpose(1, 2).reshape(rows, heads, -1, size)[:, :, :length]


def attention_group(cache: KVCache, part: AttentionMetadata, offset: int) -> AttentionGroup:
    """The group of these sequences. Where each sequence is one block and the sequences fill most of a run of blocks,
    the whole run is taken as a view; rows in between attend to nothing new and their output is not read."""
    device = cache.keys.device
    counts = part.counts
    width, length = int(counts.max()), int(part.ends.max())
    tables = part.tables[:, : -(-length // cache.block_size)]
    used = np.arange(tables.shape[1]) < -(-part.ends // cache.block_size)[:, None]
    tables = np.where(used, tables, tables[:, :1])  # masked, but 0 x NaN of another sequence's block would be NaN
    top = int(tables.max()) + 1
    dense = tables.shape[1] == 1 and len(tables) * 2 > top and len(np.unique(tables)) == len(tables)
    rows = top if dense else len(tables)
    row_of = tables[:, 0].astype(np.int64) if dense else np.arange(len(tables))
    start = np.zeros(rows, dtype=np.int64)
    start[row_of] = part.starts
    query = start[:, None] + np.arange(width)  # [R, T] position of each new token
    row = np.repeat(row_of, counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    full = len(row) == rows * width and bool((row[1:] >= row[:-1]).all())
    return AttentionGroup(
        slice(0, top) if dense else torch.from_numpy(tables.reshape(-1).astype(np.int64)).to(device),
        None if full else (torch.from_numpy(row).to(device), torch.from_numpy(column).to(device)),
        (rows, width),
        torch.from_numpy(query).to(device),
        length,
        cache.groups,
        slice(offset, offset + int(counts.sum())),
    )
