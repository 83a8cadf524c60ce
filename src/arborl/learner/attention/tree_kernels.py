"""Attention over trees as Triton kernels: forward, and the gradients of queries and of keys and values.

Each program takes one block of queries (or of keys) and iterates over the blocks of the other side in its row of the
plan (`tree_plan.py`): first those that are completely visible and need no mask, then the partially visible ones. The
forward pass keeps one number per query, the log-sum-exp of its scores; the backward passes compute scores again.

One program for a block of keys sums over all query heads that share its key head. If several programs share a block's
list of queries, their sums are added afterwards in order: no sum depends on the order of execution, so equal inputs
give equal bits.

N tokens, H query heads, K key heads, G = H / K, D head size. Block sizes are padded to powers of two and masked. Sums
are in float32; scores are in base 2, whose exponential a GPU computes. Nothing that varies between batches is a
compile-time constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from arborl.learner.attention.tree_plan import Tile, Tiles, rows_at

LOG2E = tl.constexpr(1.4426950408889634)
SUMMED = {"ELEMENTS": 256, "SLOTS": 16}
"""Elements of a block of keys per program of `_sum_slots`, and slots that are read at once."""

Sizes = tuple[int, int, int]
"""Numbers of rows for keys, of sums, and of slots: `BlockPlan.sizes`."""


@triton.jit
def _tile(base, first, stride, N, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Rows from `first` on of one head, zeros after the last token."""
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at = base + first.to(tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if WHOLE and SIZE == D:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(first + row < N)[:, None] & (d < D)[None, :], other=0.0)
    return x


@triton.jit
def _put(base, first, stride, x, N, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at = base + first.to(tl.int64) * stride + (row[:, None] * stride + d[None, :])
    tl.store(at, x.to(base.dtype.element_ty), mask=(first + row < N)[:, None] & (d < D)[None, :])


@triton.jit
def _score(product, scale, cap, CAP: tl.constexpr):
    """Scores from products of queries and keys, and the derivative of the cap."""
    if CAP:
        tanh = 1.0 - 2.0 / (1.0 + tl.math.exp2(product * (2.0 * scale * LOG2E / cap)))
        score, slope = tanh * (cap * LOG2E), 1.0 - tanh * tanh
    else:
        score, slope = product * (scale * LOG2E), 1.0
    return score, slope


@triton.jit
def _sees(q, k, plan, N, window, WINDOW: tl.constexpr):
    """Whether queries see keys; the positions are a column and a row, or the reverse. Positions after the last token
    see nothing and are not seen."""
    end = tl.load(plan + k, mask=k < N, other=0)
    sees = (k <= q) & (q < end)
    if WINDOW:
        depth_q, depth_k = tl.load(plan + N + q, mask=q < N, other=0), tl.load(plan + N + k, mask=k < N, other=0)
        sees = sees & (depth_q - depth_k < window)
    return sees


@triton.jit
def _attend(
    query, k, v, plan, first, begin, stop, highest, total, acc, N, window, scale, cap, k_stride, v_stride,
    D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for i in range(begin, stop):
        here = tl.load(plan + i) * KEYS
        key = _tile(k, here, k_stride, N, KEYS, D, SIZE, WHOLE)
        score, _ = _score(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, cap, CAP)
        if not WHOLE:
            place_q, place_k = first + tl.arange(0, QUERIES), here + tl.arange(0, KEYS)
            sees = _sees(place_q[:, None], place_k[None, :], plan, N, window, WINDOW)
            score = tl.where(sees, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))  # never minus infinity: `highest` does not begin there
        weight = tl.math.exp2(score - higher[:, None])
        shrink = tl.math.exp2(highest - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        value = _tile(v, here, v_stride, N, KEYS, D, SIZE, WHOLE)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        highest = higher
    return highest, total, acc


@triton.jit(do_not_specialize=["N", "rows", "window"])
def _forward(
    q, k, v, plan, out, lse, N, rows, window, scale, cap, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    row = plan + rows + tl.program_id(0) // H * 4
    first, begin, middle, stop = tl.load(row) * QUERIES, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    k += h // G * k_head
    v += h // G * v_head
    query = _tile(q + h * q_head, first, q_stride, N, QUERIES, D, SIZE, False)
    highest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, SIZE], tl.float32)
    highest, total, acc = _attend(
        query, k, v, plan, first, begin, middle, highest, total, acc, N, window, scale, cap, k_stride, v_stride,
        D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, True,
    )  # fmt: skip
    highest, total, acc = _attend(
        query, k, v, plan, first, middle, stop, highest, total, acc, N, window, scale, cap, k_stride, v_stride,
        D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, False,
    )  # fmt: skip
    place = first + tl.arange(0, QUERIES)
    total = tl.where(place < N, total, 1.0)
    _put(out + h * D, first, H * D, acc / total[:, None], N, QUERIES, D, SIZE)
    tl.store(lse + h * N + place, highest + tl.math.log2(total), mask=place < N)


@triton.jit
def _to_queries(
    query, grad_tile, lse, delta, k, v, plan, first, begin, stop, acc, N, window, scale, cap, k_stride, v_stride,
    D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for i in range(begin, stop):
        here = tl.load(plan + i) * KEYS
        key = _tile(k, here, k_stride, N, KEYS, D, SIZE, WHOLE)
        value = _tile(v, here, v_stride, N, KEYS, D, SIZE, WHOLE)
        score, slope = _score(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, cap, CAP)
        weight = tl.math.exp2(score - lse[:, None])
        if not WHOLE:
            place_q, place_k = first + tl.arange(0, QUERIES), here + tl.arange(0, KEYS)
            sees = _sees(place_q[:, None], place_k[None, :], plan, N, window, WINDOW)
            weight = tl.where(sees, weight, 0.0)
        weight_grad = tl.dot(grad_tile, tl.trans(value), input_precision=PRECISION)
        score_grad = weight * (weight_grad - delta[:, None]) * slope
        acc += tl.dot(score_grad.to(key.dtype), key, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["N", "rows", "window"])
def _backward_queries(
    q, k, v, plan, out, grad, lse, delta, dq, N, rows, window, scale, cap, q_stride, q_head, k_stride, k_head,
    v_stride, v_head, g_stride, g_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Also writes `delta`, the product of each query's output and its gradient, for `_backward_keys`."""
    h = (tl.program_id(0) % H).to(tl.int64)
    row = plan + rows + tl.program_id(0) // H * 4
    first, begin, middle, stop = tl.load(row) * QUERIES, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    k += h // G * k_head
    v += h // G * v_head
    place = first + tl.arange(0, QUERIES)
    query = _tile(q + h * q_head, first, q_stride, N, QUERIES, D, SIZE, False)
    grad_tile = _tile(grad + h * g_head, first, g_stride, N, QUERIES, D, SIZE, False)
    out_tile = _tile(out + h * D, first, H * D, N, QUERIES, D, SIZE, False)
    row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), axis=1)
    tl.store(delta + h * N + place, row_delta, mask=place < N)
    row_lse = tl.load(lse + h * N + place, mask=place < N, other=0.0)
    acc = tl.zeros([QUERIES, SIZE], tl.float32)
    acc = _to_queries(
        query, grad_tile, row_lse, row_delta, k, v, plan, first, begin, middle, acc, N, window, scale, cap, k_stride,
        v_stride,
        D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, True,
    )  # fmt: skip
    acc = _to_queries(
        query, grad_tile, row_lse, row_delta, k, v, plan, first, middle, stop, acc, N, window, scale, cap, k_stride,
        v_stride,
        D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, False,
    )  # fmt: skip
    _put(dq + h * D, first, H * D, acc * scale, N, QUERIES, D, SIZE)


@triton.jit
def _to_keys(
    key, value, q, grad, lse, delta, plan, first, begin, stop, to_key, to_value, N, window, scale, cap, q_stride,
    g_stride,
    D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for i in range(begin, stop):
        here = tl.load(plan + i) * QUERIES
        place = here + tl.arange(0, QUERIES)
        query = _tile(q, here, q_stride, N, QUERIES, D, SIZE, WHOLE)
        grad_tile = _tile(grad, here, g_stride, N, QUERIES, D, SIZE, WHOLE)
        row_lse, row_delta = (
            tl.load(lse + place, mask=place < N, other=0.0),
            tl.load(delta + place, mask=place < N, other=0.0),
        )
        score, slope = _score(tl.dot(key, tl.trans(query), input_precision=PRECISION), scale, cap, CAP)
        weight = tl.math.exp2(score - row_lse[None, :])
        if not WHOLE:
            place_k = first + tl.arange(0, KEYS)
            weight = tl.where(_sees(place[None, :], place_k[:, None], plan, N, window, WINDOW), weight, 0.0)
        to_value += tl.dot(weight.to(grad_tile.dtype), grad_tile, input_precision=PRECISION)
        weight_grad = tl.dot(value, tl.trans(grad_tile), input_precision=PRECISION)
        score_grad = weight * (weight_grad - row_delta[None, :]) * slope
        to_key += tl.dot(score_grad.to(query.dtype), query, input_precision=PRECISION)
    return to_key, to_value


@triton.jit(do_not_specialize=["N", "rows", "window"])
def _backward_keys(
    q, k, v, plan, grad, lse, delta, dk, dv, slots, N, rows, window, scale, cap, q_stride, q_head, k_stride,
    k_head, v_stride, v_head, g_stride, g_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys, in `dk` and `dv` of `[N, K, D]`; those by a part of its queries in a slot in
    float32: of keys, then of values, both `[KEYS, K, D]`."""
    K: tl.constexpr = H // G
    own_head = (tl.program_id(0) % K).to(tl.int64)
    row = plan + rows + tl.program_id(0) // K * 5
    first, begin, middle, stop = tl.load(row) * KEYS, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    slot = tl.load(row + 4)
    key = _tile(k + own_head * k_head, first, k_stride, N, KEYS, D, SIZE, False)
    value = _tile(v + own_head * v_head, first, v_stride, N, KEYS, D, SIZE, False)
    to_key, to_value = tl.zeros([KEYS, SIZE], tl.float32), tl.zeros([KEYS, SIZE], tl.float32)
    for g in range(G):
        h = own_head * G + g
        to_key, to_value = _to_keys(
            key, value, q + h * q_head, grad + h * g_head, lse + h * N, delta + h * N, plan, first, begin, middle,
            to_key, to_value, N, window, scale, cap, q_stride, g_stride,
            D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, True,
        )  # fmt: skip
        to_key, to_value = _to_keys(
            key, value, q + h * q_head, grad + h * g_head, lse + h * N, delta + h * N, plan, first, middle, stop,
            to_key, to_value, N, window, scale, cap, q_stride, g_stride,
            D, SIZE, QUERIES, KEYS, WINDOW, CAP, PRECISION, False,
        )  # fmt: skip
    if slot < 0:
        _put(dk + own_head * D, first, K * D, to_key * scale, N, KEYS, D, SIZE)
        _put(dv + own_head * D, first, K * D, to_value, N, KEYS, D, SIZE)
    else:
        to = slots + slot.to(tl.int64) * (2 * KEYS * K * D) + own_head * D
        _put(to, first * 0, K * D, to_key * scale, KEYS, KEYS, D, SIZE)
        _put(to + KEYS * K * D, first * 0, K * D, to_value, KEYS, KEYS, D, SIZE)


@triton.jit(do_not_specialize=["count", "rows"])
def _sum_slots(
    plan, slots, dk, dv, count, rows, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums of the slots of each block of keys, as `count` numbers in `dk` and `dv`, `WIDTH` per block."""
    row = plan + rows + tl.program_id(0) * 3
    block, begin, stop = tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    to_key, to_value = tl.zeros([ELEMENTS], tl.float32), tl.zeros([ELEMENTS], tl.float32)
    for i in range(begin, stop, SLOTS):
        slot = i + tl.arange(0, SLOTS)
        mask = (slot < stop)[:, None] & (element < WIDTH)[None, :]
        at = slots + slot.to(tl.int64)[:, None] * (2 * WIDTH) + element[None, :]
        to_key += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        to_value += tl.sum(tl.load(at + WIDTH, mask=mask, other=0.0), axis=0)
    at = block * WIDTH + element
    inside = (element < WIDTH) & (at < count)
    tl.store(dk + at, to_key.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, to_value.to(dv.dtype.element_ty), mask=inside)


def forward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, plan: Tensor, sizes: Sizes, scale: float, window: int, cap: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attention output `[N, H, D]` and the log-sum-exp of the scores `[H, N]`. `plan` and `sizes` are those of a
    `BlockPlan`. Window and cap of 0 mean none. The last dimension of all inputs must be contiguous."""
    count, heads, size = q_NHD.shape
    out = torch.empty((count, heads, size), dtype=q_NHD.dtype, device=q_NHD.device)
    lse = torch.empty((heads, count), dtype=torch.float32, device=q_NHD.device)
    tile = tiles.forward
    _forward[(-(-count // tile.queries) * heads,)](
        q_NHD, k_NKD, v_NKD, plan, out, lse, count, rows_at(count, tiles, sizes[0])[0], window, scale, cap,
        *_strides(q_NHD, k_NKD, v_NKD), **_compiled_in(q_NHD, k_NKD, window, cap, tile),
    )  # fmt: skip
    return out, lse


def backward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, plan: Tensor, sizes: Sizes, out_NHD: Tensor, grad_NHD: Tensor,
    lse_HN: Tensor, scale: float, window: int, cap: float, tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    count, heads, size = q_NHD.shape
    key_heads = k_NKD.shape[1]
    key_rows, sum_rows, slot_count = sizes
    dq, delta = torch.empty_like(out_NHD), torch.empty_like(lse_HN)
    rows, strides = rows_at(count, tiles, key_rows), _strides(q_NHD, k_NKD, v_NKD, grad_NHD)
    _backward_queries[(-(-count // tiles.to_queries.queries) * heads,)](
        q_NHD, k_NKD, v_NKD, plan, out_NHD, grad_NHD, lse_HN, delta, dq, count, rows[1], window, scale, cap,
        *strides, **_compiled_in(q_NHD, k_NKD, window, cap, tiles.to_queries),
    )  # fmt: skip
    dk, dv = torch.empty((2, count, key_heads, size), dtype=q_NHD.dtype, device=q_NHD.device)
    width = tiles.to_keys.keys * key_heads * size
    slots = torch.empty((max(slot_count, 1), 2, width), dtype=torch.float32, device=q_NHD.device)
    _backward_keys[(key_rows * key_heads,)](
        q_NHD, k_NKD, v_NKD, plan, grad_NHD, lse_HN, delta, dk, dv, slots, count, rows[2], window, scale, cap,
        *strides, **_compiled_in(q_NHD, k_NKD, window, cap, tiles.to_keys),
    )  # fmt: skip
    if sum_rows:
        grid = (sum_rows, -(-width // SUMMED["ELEMENTS"]))
        _sum_slots[grid](plan, slots, dk, dv, dk.numel(), rows[3], WIDTH=width, **SUMMED)
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _compiled_in(q_NHD: Tensor, k_NKD: Tensor, window: int, cap: float, tile: Tile) -> Mapping[str, int | str | bool]:
    _, heads, size = q_NHD.shape
    exact = q_NHD.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return _constants(heads, k_NKD.shape[1], size, window > 0, cap > 0, exact, tile)


@cache
def _constants(
    heads: int, key_heads: int, size: int, window: bool, cap: bool, exact: bool, tile: Tile
) -> Mapping[str, int | str | bool]:
    return {
        "H": heads, "G": heads // key_heads, "D": size, "SIZE": max(16, int(triton.next_power_of_2(size))),
        "QUERIES": tile.queries, "KEYS": tile.keys, "WINDOW": window, "CAP": cap,
        "PRECISION": "ieee" if exact else "tf32", "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
