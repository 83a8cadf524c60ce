"""What happens between the matrix products of a sampling step on a GPU, as a few fused Triton kernels.

N tokens, R rows (sequences), H query heads, K key heads, G = H / K, D head size, P tokens a page. Sizes that a
block must have as a power of two are padded and masked. Sums are in float32 whatever the model's precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tuning(NamedTuple):
    """How attention is launched: keys in one block, warps, stages of the pipeline, precision of its products."""

    keys: int
    warps: int
    stages: int
    precision: str


DECODE = {torch.float32: Tuning(64, 2, 2, "tf32x3")}
"""For one query a row, by precision; others have `NARROW_DECODE`. Small blocks, many under way: it waits for memory
(`docs/results/engine.md`)."""
READ = {torch.float32: Tuning(32, 4, 1, "ieee")}
"""The same for many queries a row."""
NARROW_DECODE, NARROW_READ = Tuning(32, 2, 5, "tf32"), Tuning(64, 4, 2, "tf32")
QUERIES = 16
"""Queries of one row in a tile, when a row brings many."""


def power(n: int) -> int:
    return int(triton.next_power_of_2(n))


# ------------------------------------------------------------------------------------------------ norms and gates


@triton.jit
def _norm(x, y, weight, total, out, E, y_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = n * E
    place = tl.arange(0, BLOCK)
    mask = place < E
    v = tl.load(x + row + place, mask=mask, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(y + n * y_stride + place, mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + row + place, v, mask=mask)
    f = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, axis=0) / E + eps)
    w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + place, f * scale * w, mask=mask)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row."""
    out = torch.empty_like(x)
    _norm[(len(x),)](x, x, weight, x, out, x.shape[1], x.shape[1], eps, ADD=False, BLOCK=power(x.shape[1]))
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, in place of x, and its norm. The rows of y may be parts of wider ones."""
    out = torch.empty_like(x)
    _norm[(len(x),)](x, y, weight, x, out, x.shape[1], y.stride(0), eps, ADD=True, BLOCK=power(x.shape[1]))
    return x, out


@triton.jit
def _gate(both, out, F, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < F
    g = tl.load(both + row * stride + place, mask=mask, other=0.0)
    up = tl.load(both + row * stride + F + place, mask=mask, other=0.0)
    f = g.to(tl.float32)
    silu = (f / (1.0 + tl.exp(-f))).to(g.dtype)
    tl.store(out + row * F + place, silu * up, mask=mask)


def gate(both: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second half. The rows may be parts of wider ones."""
    width = both.shape[1] // 2
    out = both.new_empty(len(both), width)
    _gate[(len(both), triton.cdiv(width, 1024))](both, out, width, both.stride(0), BLOCK=1024)
    return out


# ------------------------------------------------------------------------------------------------ positions and cache


@triton.jit
def _rotate_store(
    qkv, cos, sin, position, slot, q_weight, k_weight, q_out, keys, values, row_stride, page_stride, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (j < H + 2 * K) & (d < D)
    turns = inside & (j < H + K)
    other = (d + D // 2) % D
    row = qkv + n * row_stride + j * D
    x = tl.load(row + d, mask=inside, other=0.0)
    partner = tl.load(row + other, mask=turns, other=0.0)
    if NORM:
        f = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(f * f, axis=1) / D + eps)[:, None]
        of_q = (j < H) & (d < D)
        of_k = turns & (j >= H)
        w = tl.load(q_weight + d + j * 0, mask=of_q, other=0.0) + tl.load(k_weight + d + j * 0, mask=of_k, other=0.0)
        v = tl.load(q_weight + other + j * 0, mask=of_q, other=0.0)
        v += tl.load(k_weight + other + j * 0, mask=of_k, other=0.0)
        x = tl.where(turns, (f * scale * w.to(tl.float32)).to(x.dtype), x)
        partner = (partner.to(tl.float32) * scale * v.to(tl.float32)).to(x.dtype)
    at = tl.load(position + n)
    c = tl.load(cos + at * D + d + j * 0, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + at * D + d + j * 0, mask=turns, other=0.0).to(tl.float32)
    y = (x.to(tl.float32) * c + partner.to(tl.float32) * s).to(x.dtype)
    tl.store(q_out + n * H * D + j * D + d, y, mask=inside & (j < H))
    here = tl.load(slot + n).to(tl.int64)
    target = (here // P) * page_stride + (here % P) * D
    tl.store(keys + target + (j - H) * P * D + d, y, mask=turns & (j >= H))
    tl.store(values + target + (j - H - K) * P * D + d, y, mask=inside & (j >= H + K))


def rotate_store(
    qkv: Tensor, cos: Tensor, signed_sin: Tensor, position_N: Tensor, slot_N: Tensor, keys: Tensor, values: Tensor,
    heads: int, norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:  # fmt: skip
    """Turn queries and keys by their position (after their norms, if any), put keys and values into the cache
    `[pages, K, P, D]`; the queries come back, `[N, H, D]`. The rows of `qkv` may be parts of wider ones."""
    _, key_heads, page, size = keys.shape
    out = qkv.new_empty(len(qkv), heads, size)
    q_weight, k_weight, eps = norms or (cos, cos, 0.0)
    _rotate_store[(len(qkv),)](
        qkv, cos, signed_sin, position_N, slot_N, q_weight, k_weight, out, keys, values, qkv.stride(0),
        keys.stride(0), eps,
        H=heads, K=key_heads, D=size, P=page, NORM=norms is not None, HEADS=power(heads + 2 * key_heads),
        SIZE=power(size),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------ attention


@triton.jit
def _scan(
    query, at, keys, values, pages, k, begin, end, scale, page_stride,
    D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One key head's positions `begin` to `end` of a sequence, for a tile of queries that each see up to `at`: the
    highest score of each, the sum of weights relative to it, and the weighted sum of values."""
    d = tl.arange(0, SIZE)
    highest = tl.full([TILE], -1e30, tl.float32)
    sum_ = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, SIZE], tl.float32)
    for start in range(begin, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        valid = position < end
        if P % BLOCK == 0:  # they lie in one page, side by side; what is there beyond the end is finite
            page = tl.load(pages + start // P).to(tl.int64)
            row = page * page_stride + (k * P + start % P) * D + tl.arange(0, BLOCK) * D
            mask = (position >= 0)[:, None] & (d < D)[None, :]
        else:
            page = tl.load(pages + position // P, mask=valid, other=0).to(tl.int64)
            row = page * page_stride + k * P * D + (position % P) * D
            mask = valid[:, None] & (d < D)[None, :]
        key = tl.load(keys + row[:, None] + d[None, :], mask=mask, other=0.0)
        sees = (position[None, :] <= at[:, None]) & valid[None, :]
        score = tl.where(sees, tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale, -1e30)
        higher = tl.maximum(highest, tl.max(score, axis=1))
        shrink = tl.exp(highest - higher)
        weight = tl.where(sees, tl.exp(score - higher[:, None]), 0.0)
        sum_ = sum_ * shrink + tl.sum(weight, axis=1)
        value = tl.load(values + row[:, None] + d[None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        highest = higher
    return highest, sum_, acc


@triton.jit(do_not_specialize=["rows", "bundles", "first", "rest", "table_stride"])
def _decode(
    q, keys, values, table, sequence, at, own, shared, member, partial, state, rows, bundles, first, rest, scale,
    page_stride, table_stride, member_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs of two kinds: what a bundle of rows shares, in `first` parts; what a row has of its own, in `rest`."""
    G: tl.constexpr = H // K
    k, job = tl.program_id(0) % K, tl.program_id(0) // K
    d = tl.arange(0, SIZE)
    if job < bundles * first:
        bundle, part = job // first, job % first
        total = tl.load(shared + bundle) * P
        if total > 0:
            m = tl.arange(0, MEMBERS * GROUP)
            r = tl.load(member + bundle * member_stride + m // GROUP)
            g = m % GROUP
            here = r.to(tl.int64) * H + k * G + g
            real = (r >= 0) & (g < G)
            both = real[:, None] & (d < D)[None, :]
            query = tl.load(q + here[:, None] * D + d[None, :], mask=both, other=0.0)
            pages = table + tl.load(sequence + tl.load(member + bundle * member_stride)).to(tl.int64) * table_stride
            each = tl.cdiv(tl.cdiv(total, first), BLOCK) * BLOCK
            highest, sum_, acc = _scan(
                query, tl.where(real, total, 0), keys, values, pages, k, part * each,
                tl.minimum(part * each + each, total), scale, page_stride, D, P, MEMBERS * GROUP, SIZE, BLOCK,
                PRECISION,
            )  # fmt: skip
            here += part * rows * H
            tl.store(partial + here[:, None] * D + d[None, :], acc, mask=both)
            tl.store(state + here * 2, highest, mask=real)
            tl.store(state + here * 2 + 1, sum_, mask=real)
    else:
        r, part = ((job - bundles * first) // rest).to(tl.int64), (job - bundles * first) % rest
        g = tl.arange(0, TILE)
        here = r * H + k * G + g
        both = (g < G)[:, None] & (d < D)[None, :]
        query = tl.load(q + here[:, None] * D + d[None, :], mask=both, other=0.0)
        begin, total = tl.load(own + r) * P, tl.load(at + r) + 1
        each = tl.cdiv(tl.cdiv(total - begin, rest), BLOCK) * BLOCK
        begin += part * each
        pages = table + tl.load(sequence + r).to(tl.int64) * table_stride
        highest, sum_, acc = _scan(
            query, tl.zeros([TILE], tl.int32) + total, keys, values, pages, k, begin,
            tl.minimum(begin + each, total), scale, page_stride, D, P, TILE, SIZE, BLOCK, PRECISION,
        )  # fmt: skip
        here += (first + part) * rows * H
        tl.store(partial + here[:, None] * D + d[None, :], acc, mask=both)
        tl.store(state + here * 2, highest, mask=g < G)
        tl.store(state + here * 2 + 1, sum_, mask=g < G)


@triton.jit(do_not_specialize=["RH", "first", "parts"])
def _combine(
    partial, state, own, out, RH, first, parts,
    H: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, PADDED), tl.arange(0, SIZE)
    row = part * RH + here
    real = (part < parts) & ((part >= first) | (tl.load(own + here // H) > 0))
    highest = tl.load(state + row * 2, mask=real, other=-1e30)
    sum_ = tl.load(state + row * 2 + 1, mask=real, other=0.0)
    weight = tl.exp(highest - tl.max(highest, axis=0))
    acc = tl.load(partial + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    total = tl.sum(sum_ * weight, axis=0)
    mixed = tl.sum(acc * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + here * D + d, mixed, mask=d < D)


PROGRAMS = 264
"""As many as fill a large GPU: where there is less work than that, it is divided further."""


def parts_for(work: int) -> int:
    """Parts that each of `work` sequences of keys is divided into."""
    return min(32, power(max(1, PROGRAMS // work)))


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows that begin with the same pages, as `shared_prefix.py` finds them; a bundle that is not there has 0 pages."""

    pages_M: Tensor
    rows_MB: Tensor
    own_R: Tensor


def members_for(heads: int, key_heads: int) -> int:
    """Rows of a bundle, at most: their queries fill a tile."""
    return max(1, min(16, 64 // power(heads // key_heads)))


def decode(
    q_RHD: Tensor, keys: Tensor, values: Tensor, table: Tensor, sequence_R: Tensor, position_R: Tensor, shared: Shared,
    scale: float,
) -> Tensor:  # fmt: skip
    """One query a row, at `position[row]`, over the pages `table[sequence[row]]` of the cache `[pages, K, P, D]`; a
    sequence may have several. `[R, H, D]`."""
    rows, heads, size = q_RHD.shape
    _, key_heads, page, _ = keys.shape
    bundles, members = shared.rows_MB.shape
    first, rest = parts_for(-(-rows // members) * key_heads), parts_for(rows * key_heads)
    partial = q_RHD.new_empty(first + rest, rows, heads, size, dtype=torch.float32)
    state = q_RHD.new_empty(first + rest, rows, heads, 2, dtype=torch.float32)
    group = power(heads // key_heads)
    tuning = DECODE.get(q_RHD.dtype, NARROW_DECODE)
    _decode[((bundles * first + rows * rest) * key_heads,)](
        q_RHD, keys, values, table, sequence_R, position_R, shared.own_R, shared.pages_M, shared.rows_MB, partial,
        state, rows, bundles, first, rest, scale, keys.stride(0), table.stride(0), shared.rows_MB.stride(0),
        H=heads, K=key_heads, D=size, P=page, MEMBERS=members, GROUP=group, TILE=max(16, group),
        SIZE=max(16, power(size)), BLOCK=tuning.keys, PRECISION=tuning.precision,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    out = torch.empty_like(q_RHD)
    _combine[(rows * heads,)](
        partial, state, shared.own_R, out, rows * heads, first, first + rest, H=heads, D=size,
        PADDED=power(first + rest), SIZE=power(size), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _read(
    q, keys, values, table, tile_row, tile_first, first_query, start, end, out, scale, page_stride, table_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, k = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // K
    r = tl.load(tile_row + tile).to(tl.int64)
    first = tl.load(tile_first + tile)
    begin, stop = tl.load(start + r), tl.load(end + r)
    m, d = tl.arange(0, TILE * GROUP), tl.arange(0, SIZE)
    g = m % GROUP
    at = begin + first + m // GROUP  # position of each query
    n = (tl.load(first_query + r) + first + m // GROUP).to(tl.int64)
    place = n[:, None] * H * D + (k * G + g)[:, None] * D + d[None, :]
    real = ((g < G) & (at < stop))[:, None] & (d < D)[None, :]
    query = tl.load(q + place, mask=real, other=0.0)
    _, sum_, acc = _scan(
        query, at, keys, values, table + r * table_stride, k, 0, tl.minimum(begin + first + TILE, stop), scale,
        page_stride, D, P, TILE * GROUP, SIZE, BLOCK, PRECISION,
    )  # fmt: skip
    tl.store(out + place, acc / tl.where(sum_ > 0, sum_, 1.0)[:, None], mask=real)


def read(
    q_NHD: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: tuple[Tensor, Tensor], first_R: Tensor,
    start_R: Tensor, end_R: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Many queries a row: row r's tokens `start[r]` to `end[r]`, whose queries begin at `first[r]` of the N, each over
    its row's pages up to itself. `tiles` are the row and the first query of every piece of `QUERIES`."""
    _, heads, size = q_NHD.shape
    _, key_heads, page, _ = keys.shape
    out = torch.empty_like(q_NHD)
    tuning = READ.get(q_NHD.dtype, NARROW_READ)
    _read[(len(tiles[0]), key_heads)](
        q_NHD, keys, values, table, *tiles, first_R, start_R, end_R, out, scale, keys.stride(0), table.stride(0),
        H=heads, K=key_heads, D=size, P=page, TILE=QUERIES, GROUP=power(heads // key_heads), SIZE=max(16, power(size)),
        BLOCK=tuning.keys, PRECISION=tuning.precision, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return out
