"""Triton kernels of a GPU step between its matrix products: norms, gates, rotary embedding, attention, sampling.

N tokens, R rows (sequences), H query heads, K key heads, G = H / K, D head size, P tokens per cache block, B sampled
rows, V vocabulary. Tile sizes are powers of two, padded and masked. Sums are in float32 in any model precision, sums
over chunks of logits in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class AttentionTuning(NamedTuple):
    """Launch parameters of attention: keys per tile, warps, pipeline stages, precision of the products."""

    keys: int
    warps: int
    stages: int
    precision: str


DECODE = {torch.float32: AttentionTuning(64, 2, 2, "tf32x3")}
"""One query per row, by precision; other precisions use `NARROW_DECODE`. Small tiles with many stages, because decoding
is limited by memory bandwidth (`docs/results/engine.md`)."""
READ = {torch.float32: AttentionTuning(32, 4, 1, "ieee")}
"""Many queries per row."""
NARROW_DECODE, NARROW_READ = AttentionTuning(32, 2, 5, "tf32"), AttentionTuning(64, 4, 2, "tf32")
TILE_QUERIES = 16


@cache
def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))


# ------------------------------------------------------------------------------------------------ norms and gates


@triton.jit
def _norm(x, y, weight, total, out, E, y_stride, part_stride, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row = n * E
    place = tl.arange(0, BLOCK)
    mask = place < E
    v = tl.load(x + row + place, mask=mask, other=0.0)
    if PARTS > 0:
        both = v.to(tl.float32)
        for part in tl.static_range(PARTS):
            at = y + part * part_stride + n * y_stride + place
            both += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        v = both.to(v.dtype)
        tl.store(total + row + place, v, mask=mask)
    f = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, axis=0) / E + eps)
    w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + place, f * scale * w, mask=mask)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[1]
    _norm[(len(x),)](x, x, weight, x, out, width, width, 0, eps, PARTS=0, BLOCK=next_power_of_2(width))
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, in place of x, and its norm. y may consist of parts to be summed, `[parts, N, E]`; its rows may be
    strided."""
    out, width = torch.empty_like(x), x.shape[1]
    parts, part_stride = (1, 0) if y.dim() == 2 else (len(y), y.stride(0))
    _norm[(len(x),)](
        x, y, weight, x, out, width, y.stride(-2), part_stride, eps, PARTS=parts, BLOCK=next_power_of_2(width)
    )  # fmt: skip
    return x, out


def product_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """`x @ weight.T` as the sum of `[parts, N, E]`, each over a part of the inputs: more programs than one product of
    few rows and outputs has."""
    x_PNI = x.view(len(x), parts, -1).transpose(0, 1)
    return torch.bmm(x_PNI, weight.view(len(weight), parts, -1).permute(1, 2, 0))


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
    """SiLU of the first half of each row times the second half. The rows may be strided."""
    width = both.shape[1] // 2
    out = both.new_empty(len(both), width)
    _gate[(len(both), -(-width // 1024))](both, out, width, both.stride(0), BLOCK=1024)
    return out


# ------------------------------------------------------------------------------------------------ positions and cache


@triton.jit
def _rotate_store(
    qkv, cos, sin, position, slot, q_weight, k_weight, q_out, keys, values, row_stride, block_stride, eps,
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
    target = (here // P) * block_stride + (here % P) * D
    tl.store(keys + target + (j - H) * P * D + d, y, mask=turns & (j >= H))
    tl.store(values + target + (j - H - K) * P * D + d, y, mask=inside & (j >= H + K))


def rotate_store(
    qkv: Tensor, cos: Tensor, signed_sin: Tensor, position_N: Tensor, slot_N: Tensor, keys: Tensor, values: Tensor,
    heads: int, norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:  # fmt: skip
    """Rotate queries and keys by position (after their norms, if any) and store keys and values in the cache
    `[blocks, K, P, D]`; returns the queries `[N, H, D]`. The rows of `qkv` may be strided."""
    _, key_heads, block, size = keys.shape
    out = qkv.new_empty(len(qkv), heads, size)
    q_weight, k_weight, eps = norms or (cos, cos, 0.0)
    _rotate_store[(len(qkv),)](
        qkv, cos, signed_sin, position_N, slot_N, q_weight, k_weight, out, keys, values, qkv.stride(0),
        keys.stride(0), eps,
        H=heads, K=key_heads, D=size, P=block, NORM=norms is not None, HEADS=next_power_of_2(heads + 2 * key_heads),
        SIZE=next_power_of_2(size),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------ attention


@triton.jit
def _scan(
    query, at, keys, values, blocks, k, begin, end, scale, block_stride,
    D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over positions `begin` to `end` of one key head, for a tile of queries that see up to `at`: the highest
    score of each, the sum of weights relative to it, and the weighted sum of values."""
    d = tl.arange(0, SIZE)
    highest = tl.full([TILE], -1e30, tl.float32)
    sum_ = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, SIZE], tl.float32)
    for start in range(begin, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        valid = position < end
        if P % BLOCK == 0:  # consecutive within one block; values beyond the end are finite
            block = tl.load(blocks + start // P).to(tl.int64)
            row = block * block_stride + (k * P + start % P) * D + tl.arange(0, BLOCK) * D
            mask = (position >= 0)[:, None] & (d < D)[None, :]
        else:
            block = tl.load(blocks + position // P, mask=valid, other=0).to(tl.int64)
            row = block * block_stride + k * P * D + (position % P) * D
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


@triton.jit(do_not_specialize=["rows", "groups", "first", "rest", "table_stride"])
def _decode(
    q, keys, values, table, sequence, at, own, shared, member, partial, state, rows, groups, first, rest, scale,
    block_stride, table_stride, member_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, MEMBERS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two kinds of programs: the shared prefix of a group of rows, in `first` parts; the rest of a row, in `rest`."""
    G: tl.constexpr = H // K
    k, job = tl.program_id(0) % K, tl.program_id(0) // K
    d = tl.arange(0, SIZE)
    if job < groups * first:
        group_id, part = job // first, job % first
        total = tl.load(shared + group_id) * P
        if total > 0:
            m = tl.arange(0, MEMBERS * GROUP)
            r = tl.load(member + group_id * member_stride + m // GROUP)
            g = m % GROUP
            here = r.to(tl.int64) * H + k * G + g
            real = (r >= 0) & (g < G)
            both = real[:, None] & (d < D)[None, :]
            query = tl.load(q + here[:, None] * D + d[None, :], mask=both, other=0.0)
            blocks = table + tl.load(sequence + tl.load(member + group_id * member_stride)).to(tl.int64) * table_stride
            each = tl.cdiv(tl.cdiv(total, first), BLOCK) * BLOCK
            highest, sum_, acc = _scan(
                query, tl.where(real, total, 0), keys, values, blocks, k, part * each,
                tl.minimum(part * each + each, total), scale, block_stride, D, P, MEMBERS * GROUP, SIZE, BLOCK,
                PRECISION,
            )  # fmt: skip
            here += part * rows * H
            tl.store(partial + here[:, None] * D + d[None, :], acc, mask=both)
            tl.store(state + here * 2, highest, mask=real)
            tl.store(state + here * 2 + 1, sum_, mask=real)
    else:
        r, part = ((job - groups * first) // rest).to(tl.int64), (job - groups * first) % rest
        g = tl.arange(0, TILE)
        here = r * H + k * G + g
        both = (g < G)[:, None] & (d < D)[None, :]
        query = tl.load(q + here[:, None] * D + d[None, :], mask=both, other=0.0)
        begin, total = tl.load(own + r) * P, tl.load(at + r) + 1
        each = tl.cdiv(tl.cdiv(total - begin, rest), BLOCK) * BLOCK
        begin += part * each
        blocks = table + tl.load(sequence + r).to(tl.int64) * table_stride
        highest, sum_, acc = _scan(
            query, tl.zeros([TILE], tl.int32) + total, keys, values, blocks, k, begin,
            tl.minimum(begin + each, total), scale, block_stride, D, P, TILE, SIZE, BLOCK, PRECISION,
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
"""Programs that fill a large GPU; less work is split further."""


def parts_for(work: int) -> int:
    return min(32, next_power_of_2(max(1, PROGRAMS // work)))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of rows with a shared prefix (`PrefixGroups`); an unused group has 0 blocks."""

    blocks_M: Tensor
    rows_MB: Tensor
    shared_R: Tensor


def max_group_rows(heads: int, key_heads: int) -> int:
    """Maximum rows of a prefix group: their queries fill a tile."""
    return max(1, min(16, 64 // next_power_of_2(heads // key_heads)))


def decode_attention(
    q_RHD: Tensor, keys: Tensor, values: Tensor, table: Tensor, sequence_R: Tensor, position_R: Tensor,
    shared: SharedPrefix, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of one query per row, at `position[row]`, over the blocks `table[sequence[row]]` of the cache
    `[blocks, K, P, D]`; several rows may belong to one sequence. `[R, H, D]`."""
    rows, heads, size = q_RHD.shape
    _, key_heads, block, _ = keys.shape
    groups, members = shared.rows_MB.shape
    first, rest = parts_for(-(-rows // members) * key_heads), parts_for(rows * key_heads)
    partial = q_RHD.new_empty(first + rest, rows, heads, size, dtype=torch.float32)
    state = q_RHD.new_empty(first + rest, rows, heads, 2, dtype=torch.float32)
    group = next_power_of_2(heads // key_heads)
    tuning = DECODE.get(q_RHD.dtype, NARROW_DECODE)
    _decode[((groups * first + rows * rest) * key_heads,)](
        q_RHD, keys, values, table, sequence_R, position_R, shared.shared_R, shared.blocks_M, shared.rows_MB, partial,
        state, rows, groups, first, rest, scale, keys.stride(0), table.stride(0), shared.rows_MB.stride(0),
        H=heads, K=key_heads, D=size, P=block, MEMBERS=members, GROUP=group, TILE=max(16, group),
        SIZE=max(16, next_power_of_2(size)), BLOCK=tuning.keys, PRECISION=tuning.precision,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    out = torch.empty_like(q_RHD)
    _combine[(rows * heads,)](
        partial, state, shared.shared_R, out, rows * heads, first, first + rest, H=heads, D=size,
        PADDED=next_power_of_2(first + rest), SIZE=next_power_of_2(size), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _prefill(
    q, keys, values, table, tile_row, tile_first, first_query, start, end, out, scale, block_stride, table_stride,
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
        block_stride, D, P, TILE * GROUP, SIZE, BLOCK, PRECISION,
    )  # fmt: skip
    tl.store(out + place, acc / tl.where(sum_ > 0, sum_, 1.0)[:, None], mask=real)


def prefill_attention(
    q_NHD: Tensor, keys: Tensor, values: Tensor, table: Tensor, tiles: tuple[Tensor, Tensor], first_R: Tensor,
    start_R: Tensor, end_R: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Causal attention of many queries per row: tokens `start[r]` to `end[r]` of row r, whose queries begin at
    `first[r]` of the N. `tiles` are the row and the first query of every `TILE_QUERIES` queries."""
    _, heads, size = q_NHD.shape
    _, key_heads, block, _ = keys.shape
    out = torch.empty_like(q_NHD)
    tuning = READ.get(q_NHD.dtype, NARROW_READ)
    _prefill[(len(tiles[0]), key_heads)](
        q_NHD, keys, values, table, *tiles, first_R, start_R, end_R, out, scale, keys.stride(0), table.stride(0),
        H=heads, K=key_heads, D=size, P=block, TILE=TILE_QUERIES, GROUP=next_power_of_2(heads // key_heads),
        SIZE=max(16, next_power_of_2(size)), BLOCK=tuning.keys, PRECISION=tuning.precision, num_warps=tuning.warps,
        num_stages=tuning.stages,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------ tokens and sampling

CHUNK = 2048
"""Logits per program."""


@triton.jit(do_not_specialize=["N"])
def _input_tokens(tokens_in, last, tokens, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_in + n, mask=n < N, other=0)
    sampled = tl.load(last + (-1 - token), mask=(n < N) & (token < 0), other=0)
    tl.store(tokens + n, tl.where(token < 0, sampled, token.to(tl.int64)), mask=n < N)


def input_tokens(token_N: Tensor, last: Tensor) -> Tensor:
    """Input tokens of the host; -1 - i is replaced by the i-th token sampled last."""
    out = torch.empty(len(token_N), dtype=torch.int64, device=token_N.device)
    _input_tokens[(-(-len(token_N) // 1024),)](token_N, last, out, len(token_N), BLOCK=1024)
    return out


@triton.jit
def _chunk_sums(logits, temperature, highest, sum_, likeliest, V, CHUNKS, BLOCK: tl.constexpr):
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + b).to(tl.float32)
    top = tl.max(x, axis=0)
    tl.store(highest + b * CHUNKS + chunk, top)
    tl.store(sum_ + b * CHUNKS + chunk, tl.sum(tl.exp(x - top), axis=0))
    tl.store(likeliest + b * CHUNKS + chunk, chunk * BLOCK + tl.argmax(x, axis=0))


@triton.jit
def _choose(
    logits, temperature, greedy, uniform, highest, sum_, likeliest, token, logprob, V, CHUNKS,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    real = c < CHUNKS
    top_C = tl.load(highest + b * CHUNKS + c, mask=real, other=float("-inf"))
    top = tl.max(top_C, axis=0)
    mass_C = tl.where(real, tl.load(sum_ + b * CHUNKS + c, mask=real, other=0.0) * tl.exp(top_C - top), 0.0)
    before_C = tl.cumsum(mass_C.to(tl.float64), axis=0)
    total = tl.sum(mass_C.to(tl.float64), axis=0)
    point = tl.load(uniform + b) * total
    chunk = tl.minimum(tl.sum(((before_C <= point) & real).to(tl.int32), axis=0), CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, mass_C.to(tl.float64), 0.0), axis=0)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + b).to(tl.float32)
    passed = tl.cumsum(tl.exp(x - top), axis=0).to(tl.float64) + before <= point
    count = tl.sum((passed & (v < V)).to(tl.int32), axis=0)
    drawn = chunk * BLOCK + count
    likely = tl.load(likeliest + b * CHUNKS + chunk)
    drawn = tl.where((count < BLOCK) & (drawn < V), drawn, likely)  # rounding at a chunk's very end
    best = tl.load(likeliest + b * CHUNKS + tl.argmax(top_C, axis=0))
    drawn = tl.minimum(tl.where(tl.load(greedy + b) != 0, best, drawn), V - 1)  # among NaN, the best may be padding
    chosen = tl.load(logits + b * V + drawn).to(tl.float32) / tl.load(temperature + b).to(tl.float32)
    tl.store(token + b, drawn.to(tl.int64))
    tl.store(logprob + b, chosen - top - tl.log(total.to(tl.float32)))


def sample_logits(
    logits_BV: Tensor, temperature_B: Tensor, greedy_B: Tensor, uniform_B: Tensor, token_B: Tensor, logprob_B: Tensor
) -> None:
    """A token per row, where the cumulative probability passes its uniform number, and its log-probability. A greedy
    row takes the likeliest token. Reads the logits once and one chunk again."""
    rows, vocabulary = logits_BV.shape
    chunks = -(-vocabulary // CHUNK)
    highest, sum_ = (logits_BV.new_empty(rows, chunks, dtype=torch.float32) for _ in range(2))
    likeliest = logits_BV.new_empty(rows, chunks, dtype=torch.int32)
    _chunk_sums[(rows, chunks)](logits_BV, temperature_B, highest, sum_, likeliest, vocabulary, chunks, BLOCK=CHUNK)
    _choose[(rows,)](
        logits_BV, temperature_B, greedy_B, uniform_B, highest, sum_, likeliest, token_B, logprob_B, vocabulary, chunks,
        PADDED=next_power_of_2(chunks), BLOCK=CHUNK,
    )  # fmt: skip
