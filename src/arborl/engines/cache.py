"""Keys and values of what has been read, in pages; and attention of new tokens over them with torch alone.

N new tokens of R rows, H query heads, K key heads, D head size, G = H / K, P tokens a page, L tokens of context.
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

from arborl.engines.cache_size import usual_tokens
from arborl.engines.lent_memory import LentMemory
from arborl.models.attention import FREE, Bounds, attention, layout

Array = NDArray[np.int64]


class Cache:
    """`pages` pages of `size` tokens, of all layers.

    Args:
        lends: its memory is given back at times, and is at the same address when it is taken again.
    """

    def __init__(self, model: PreTrainedModel, pages: int, size: int, lends: bool = False):
        found = layout(model)
        self.pages, self.size = pages, size
        self.groups = found.heads // found.key_heads
        shape = (found.layers, pages, found.key_heads, size, found.size)
        self.memory: LentMemory | None = None
        self.here = True
        # zeros, not empty: a masked position has weight 0, and 0 x NaN would be NaN
        if lends and model.device.type == "cuda":
            self.memory = LentMemory(2 * math.prod(shape) * model.dtype.itemsize, model.device)
            self.keys, self.values = self.memory.tensor().view(model.dtype).view(2, *shape)
            self.clear()
        else:
            self.keys, self.values = (untouched_zeros(shape, model.dtype, model.device) for _ in range(2))

    @property
    def lends(self) -> bool:
        return self.memory is not None

    def give_back(self) -> None:
        """Let others have the memory, and with it all that was read, until `take`."""
        if self.here and self.memory is not None:
            self.memory.give_back()
            self.here = False

    def take(self) -> None:
        """Have memory again, where it was given back: with zeros."""
        if not self.here and self.memory is not None:
            self.memory.take()
            self.here = True
            self.clear()

    def copy(self, source: int, target: int, count: int) -> None:
        """Give page `target` the first `count` tokens of `source`."""
        self.keys[:, target, :, :count] = self.keys[:, source, :, :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def clear(self, pages: int | None = None) -> None:
        """Zeros in the first `pages` pages again, or in all: a page that is handed out holds nothing that spoils what
        is masked."""
        if self.here:
            self.keys[:, :pages].zero_()
            self.values[:, :pages].zero_()


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU torch would write them all: seconds, and gigabytes that a short run never reads. What the system
    hands out is zero already, and takes no memory before it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    whole = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(whole).view(dtype).view(tuple(shape))


def token_bytes(model: PreTrainedModel) -> int:
    """Memory of one token's keys and values."""
    found = layout(model)
    return 2 * found.layers * found.key_heads * found.size * model.dtype.itemsize


def host_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_kv_tokens(model: PreTrainedModel, context: int) -> int:
    """A share of the device's memory, and no more than some hundreds of sequences can use."""
    kind = model.device.type
    if kind == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = host_memory()
    return usual_tokens(kind, memory, token_bytes(model), context)


@dataclass(frozen=True, slots=True)
class Reading:
    """The new tokens of one step, row by row: row i brings tokens `starts[i]` to `ends[i]` of its sequence."""

    starts: Array
    ends: Array
    tables: NDArray[np.int32]
    """`[R, pages]`: the pages of each row's sequence."""

    @property
    def counts(self) -> Array:
        return self.ends - self.starts

    @property
    def positions(self) -> Array:
        """Of every new token in its own sequence."""
        counts = self.counts
        before = np.cumsum(counts) - counts
        return np.arange(int(counts.sum())) - np.repeat(before - self.starts, counts)

    def slots(self, size: int) -> Array:
        """Where every new token's key goes: page times page size plus place in the page."""
        positions, row = self.positions, np.repeat(np.arange(len(self.starts)), self.counts)
        return self.tables[row, positions // size].astype(np.int64) * size + positions % size


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows that bring a like number of new tokens, attended in one call; only attention is padded."""

    pages: slice | Tensor
    """The pages of each row: `[R * pages a row]`, or a run of the cache, one page a row, which avoids a copy."""
    place: tuple[Tensor, Tensor] | None
    """Row and column of each new token in the padded `[R, T]`; None where they fill it in order."""
    shape: tuple[int, int]
    query: Tensor
    """`[R, T]`: the position of each new token."""
    length: int
    """L: of the longest sequence."""
    groups: int
    span: slice
    """Where this lane's tokens stand among the N."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, made when first asked for: the same at every layer."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[R, 1, G * T, L]`, to be added: 0 where a new token sees a cached one, minus infinity elsewhere."""
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


class TorchAttend:
    """Attention of one step: the new tokens' keys and values go into the cache, then each row looks at its pages."""

    def __init__(self, cache: Cache, reading: Reading):
        self.cache = cache
        slots = reading.slots(cache.size)
        device = cache.keys.device
        self.page_N = torch.from_numpy(slots // cache.size).to(device)
        self.place_N = torch.from_numpy(slots % cache.size).to(device)
        self.lanes: list[Lane] = []
        offset, one = 0, reading.counts == 1
        if not one[: one.sum()].all():
            raise ValueError("rows that bring one token come first")
        for chosen in (one, ~one):
            if chosen.any():
                part = Reading(reading.starts[chosen], reading.ends[chosen], reading.tables[chosen])
                self.lanes.append(lane(cache, part, offset))
                offset = self.lanes[-1].span.stop

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.page_N, :, self.place_N] = k_NKD
        values[self.page_N, :, self.place_N] = v_NKD
        outs = [_attend(lane, keys, values, q_NHD[lane.span], scale, bounds) for lane in self.lanes]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(lane: Lane, keys: Tensor, values: Tensor, q_NHD: Tensor, scale: float, bounds: Bounds) -> Tensor:
    (rows, width), heads = lane.shape, keys.shape[1]
    if lane.place is None:
        q_RTHD = q_NHD.reshape(rows, width, *q_NHD.shape[1:])
    else:
        q_RTHD = q_NHD.new_zeros(rows, width, *q_NHD.shape[1:])
        q_RTHD[lane.place] = q_NHD
    groups, size = q_RTHD.shape[2] // heads, q_RTHD.shape[3]
    # query heads that share a key head become more queries of that head, so keys are never repeated
    q = q_RTHD.view(rows, width, heads, groups, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(rows, heads, groups * width, size)
    k, v = (_sequences(lane, cached) for cached in (keys, values))
    out = attention(q, k, v, scale, lane.mask(bounds.window, q.dtype), cap=bounds.cap)
    out = out.view(rows, heads, groups, width, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows, width, heads * groups, size)
    return out.reshape(q_NHD.shape) if lane.place is None else out[lane.place]


def _sequences(lane: Lane, cached: Tensor) -> Tensor:
    """Each row's keys (or values) as one run, `[R, K, L, D]`."""
    length = lane.length
    if isinstance(lane.pages, slice):
        return cached[lane.pages, :, :length]
    rows, heads, size = lane.shape[0], cached.shape[1], cached.shape[3]
    if len(lane.pages) == rows:
        return cached[:, :, :length].index_select(0, lane.pages)
    gathered = cached.index_select(0, lane.pages).view(rows, -1, heads, *cached.shape[2:])
    return gathered.transpose(1, 2).reshape(rows, heads, -1, size)[:, :, :length]


def lane(cache: Cache, part: Reading, offset: int) -> Lane:
    """The lane of these rows.

    Where a sequence is one page, and the rows fill most of a run of pages, the whole run is taken as a view; the rows
    in between see nothing new and their output is not read.
    """
    device = cache.keys.device
    counts = part.counts
    width, length = int(counts.max()), int(part.ends.max())
    tables = part.tables[:, : -(-length // cache.size)]
    own = np.arange(tables.shape[1]) < -(-part.ends // cache.size)[:, None]
    tables = np.where(own, tables, tables[:, :1])  # masked, but even so 0 x NaN of another's page would be NaN
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
    return Lane(
        slice(0, top) if dense else torch.from_numpy(tables.reshape(-1).astype(np.int64)).to(device),
        None if full else (torch.from_numpy(row).to(device), torch.from_numpy(column).to(device)),
        (rows, width),
        torch.from_numpy(query).to(device),
        length,
        cache.groups,
        slice(offset, offset + int(counts.sum())),
    )
