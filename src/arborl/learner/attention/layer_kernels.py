"""The operations between the matrix products of an update on a GPU, forward and backward, as fused Triton kernels.

Plain torch takes several passes over memory for each and keeps intermediate results; torch.compile also fuses them,
after minutes. N tokens, E model size, H query heads, K key heads, J all heads of a joined projection, D head size, F
feed-forward size, M terms, V vocabulary. All numbers are computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024  # numbers of a row per program of `gate`
LOGIT_BLOCK = 4096  # logits per iteration
REDUCING_PROGRAMS = 528  # programs of a kernel that also sums over rows: four per multiprocessor of a large GPU


@cache
def next_power(n: int) -> int:
    return int(triton.next_power_of_2(n))


# ------------------------------------------------------------------------------------------------ norms


@triton.jit
def _norm(x, weight, out, each, E, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < E
    v = tl.load(x + n * E + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=0) / E + eps)
    w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n * E + place, v * scale * w, mask=mask)
    tl.store(each + n, scale)


@triton.jit
def _norm_backward(x, weight, each, grad, out, partial, N, E, rows, BLOCK: tl.constexpr):
    """`rows` rows of the input's gradient, and their sum for the weight's."""
    place = tl.arange(0, BLOCK)
    inside = place < E
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows
    for row in range(0, rows):
        n = first + row
        mask = inside & (n < N)
        scale = tl.load(each + n, mask=n < N, other=0.0)
        h = tl.load(x + n * E + place, mask=mask, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + n * E + place, mask=mask, other=0.0).to(tl.float32)
        total += g * h
        g *= w
        tl.store(out + n * E + place, scale * (g - h * (tl.sum(g * h, axis=0) / E)), mask=mask)
    tl.store(partial + tl.program_id(0) * E + place, total, mask=inside)


def _warps(numbers: int) -> int:
    return 8 if numbers >= 4096 else 4


def norm(x_NE: Tensor, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The RMS norm, and the factor of each row in it."""
    count, width = x_NE.shape
    out, each = torch.empty_like(x_NE), x_NE.new_empty(count, dtype=torch.float32)
    block = next_power(width)
    _norm[(count,)](x_NE, weight_E, out, each, width, epsilon, BLOCK=block, num_warps=_warps(block))
    return out, each


def norm_backward(x_NE: Tensor, weight_E: Tensor, each_N: Tensor, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
    count, width = x_NE.shape
    rows, block = -(-count // REDUCING_PROGRAMS), next_power(width)
    programs = -(-count // rows)
    out, partial = torch.empty_like(x_NE), x_NE.new_empty(programs, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        x_NE, weight_E, each_N, grad_NE, out, partial, count, width, rows, BLOCK=block, num_warps=_warps(block)
    )
    return out, partial.sum(0).to(weight_E.dtype)


# ------------------------------------------------------------------------------------------------ heads


@triton.jit
def _rotated_heads(
    qkv, q_weight, k_weight, cos, sin, q_out, k_out, v_out, row_stride, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    of_q, of_k = (j < H) & (d < D), (j >= H) & (j < H + K) & (d < D)
    of_v = (j >= H + K) & (j < H + 2 * K) & (d < D)
    turns, other = of_q | of_k, (d + D // 2) % D
    row = qkv + n * row_stride + j * D
    given = tl.load(row + d, mask=turns | of_v, other=0.0)
    x, partner = given.to(tl.float32), tl.load(row + other, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        w = tl.load(q_weight + d + j * 0, mask=of_q, other=0.0) + tl.load(k_weight + d + j * 0, mask=of_k, other=0.0)
        v = tl.load(q_weight + other + j * 0, mask=of_q, other=0.0)
        v += tl.load(k_weight + other + j * 0, mask=of_k, other=0.0)
        x = (x * scale * w.to(tl.float32)).to(given.dtype).to(tl.float32)  # rounded, as the engine does
        partner = (partner * scale * v.to(tl.float32)).to(given.dtype).to(tl.float32)
    c = tl.load(cos + n * D + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + n * D + d, mask=d < D, other=0.0).to(tl.float32)
    y = x * c + partner * s
    tl.store(q_out + n * H * D + j * D + d, y, mask=of_q)
    tl.store(k_out + n * K * D + (j - H) * D + d, y, mask=of_k)
    tl.store(v_out + n * K * D + (j - H - K) * D + d, given, mask=of_v)


@triton.jit
def _rotated_heads_backward(
    qkv, q_weight, k_weight, cos, sin, to_q, to_k, to_v, out, partial, N, rows, row_stride, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of `rows` tokens, and their sums for those of the norms' weights."""
    j, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    is_q, is_k = (j < H) & (d < D), (j >= H) & (j < H + K) & (d < D)
    is_v, other = (j >= H + K) & (j < H + 2 * K) & (d < D), (d + D // 2) % D
    q_total, k_total = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows
    for row in range(0, rows):
        n = first + row
        of_q, of_k, of_v = is_q & (n < N), is_k & (n < N), is_v & (n < N)
        q_row, k_row = to_q + n * H * D + j * D, to_k + n * K * D + (j - H) * D
        g = tl.load(q_row + d, mask=of_q, other=0.0).to(tl.float32)
        g += tl.load(k_row + d, mask=of_k, other=0.0).to(tl.float32)
        partner = tl.load(q_row + other, mask=of_q, other=0.0).to(tl.float32)
        partner += tl.load(k_row + other, mask=of_k, other=0.0).to(tl.float32)
        inside = (d < D) & (n < N)
        c = tl.load(cos + n * D + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + n * D + other, mask=inside, other=0.0).to(tl.float32)
        y = g * c + partner * s
        if NORM:
            x = tl.load(qkv + n * row_stride + j * D + d, mask=of_q | of_k, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
            h = x * scale
            q_total += tl.sum(tl.where(of_q, y * h, 0.0), axis=0)
            k_total += tl.sum(tl.where(of_k, y * h, 0.0), axis=0)
            w = tl.load(q_weight + d + j * 0, mask=of_q, other=0.0)
            w += tl.load(k_weight + d + j * 0, mask=of_k, other=0.0)
            y *= w.to(tl.float32)
            y = scale * (y - h * (tl.sum(y * h, axis=1) / D)[:, None])
        place = out + n * (H + 2 * K) * D + j * D + d
        tl.store(place, y, mask=of_q | of_k)
        tl.store(place, tl.load(to_v + n * K * D + (j - H - K) * D + d, mask=of_v, other=0.0), mask=of_v)
    if NORM:
        at = tl.arange(0, SIZE)
        tl.store(partial + tl.program_id(0) * 2 * D + at, q_total, mask=at < D)
        tl.store(partial + tl.program_id(0) * 2 * D + D + at, k_total, mask=at < D)


@cache
def _head_sizes(heads: int, key_heads: int, size: int, normed: bool) -> Mapping[str, int | bool]:
    tile = next_power(heads + 2 * key_heads) * next_power(size)
    return {
        "H": heads, "K": key_heads, "D": size, "NORM": normed, "HEADS": next_power(heads + 2 * key_heads),
        "SIZE": next_power(size), "num_warps": _warps(tile),
    }  # fmt: skip


def rotated_heads(
    qkv_NJD: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos_N1D: Tensor, signed_sin_N1D: Tensor,
    key_heads: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys of a joined projection, after their norms (if there are weights) and the rotary embedding by
    halves; values. The heads of a token must be contiguous."""
    count, joined, size = qkv_NJD.shape
    heads = joined - 2 * key_heads
    qkv_NJD = qkv_NJD if qkv_NJD.stride()[1:] == (size, 1) else qkv_NJD.contiguous()
    q, k, v = (qkv_NJD.new_empty(count, number, size) for number in (heads, key_heads, key_heads))
    _rotated_heads[(count,)](
        qkv_NJD, cos_N1D if q_weight is None else q_weight, cos_N1D if k_weight is None else k_weight,
        cos_N1D.contiguous(), signed_sin_N1D.contiguous(), q, k, v, qkv_NJD.stride(0), epsilon,
        **_head_sizes(heads, key_heads, size, q_weight is not None),
    )  # fmt: skip
    return q, k, v


def rotated_heads_backward(
    to_q_NHD: Tensor, to_k_NKD: Tensor, to_v_NKD: Tensor, qkv_NJD: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, cos_N1D: Tensor, signed_sin_N1D: Tensor, epsilon: float,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Gradients of the joined projection (needed for norms only) and of the norms' weights."""
    count, heads, size = to_q_NHD.shape
    key_heads = to_k_NKD.shape[1]
    rows = -(-count // REDUCING_PROGRAMS)
    programs = -(-count // rows)
    out = to_q_NHD.new_empty(count, heads + 2 * key_heads, size)
    partial = to_q_NHD.new_empty(programs, 2, size, dtype=torch.float32)
    given = out if qkv_NJD is None else qkv_NJD
    given = given if given.stride()[1:] == (size, 1) else given.contiguous()
    _rotated_heads_backward[(programs,)](
        given, cos_N1D if q_weight is None else q_weight, cos_N1D if k_weight is None else k_weight,
        cos_N1D.contiguous(), signed_sin_N1D.contiguous(), to_q_NHD.contiguous(), to_k_NKD.contiguous(),
        to_v_NKD.contiguous(), out, partial, count, rows, given.stride(0), epsilon,
        **_head_sizes(heads, key_heads, size, q_weight is not None),
    )  # fmt: skip
    if q_weight is None or k_weight is None:
        return out, (None, None)
    to_q_weight, to_k_weight = partial.sum(0)
    return out, (to_q_weight.to(q_weight.dtype), to_k_weight.to(k_weight.dtype))


# ------------------------------------------------------------------------------------------------ gates


@triton.jit
def _gate(gate, up, out, F, BLOCK: tl.constexpr):
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * F + place, place < F
    x = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, x / (1.0 + tl.exp(-x)) * y, mask=mask)


@triton.jit
def _gate_backward(gate, up, grad, to_gate, to_up, F, BLOCK: tl.constexpr):
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * F + place, place < F
    x = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    tl.store(to_gate + at, g * y * sigmoid * (1.0 + x * (1.0 - sigmoid)), mask=mask)
    tl.store(to_up + at, g * x * sigmoid, mask=mask)


def gate(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    count, width = gate_NF.shape
    out = torch.empty_like(gate_NF)
    _gate[(count, -(-width // GATE_BLOCK))](gate_NF, up_NF, out, width, BLOCK=GATE_BLOCK)
    return out


def gate_backward(gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    count, width = gate_NF.shape
    to_gate, to_up = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    _gate_backward[(count, -(-width // GATE_BLOCK))](gate_NF, up_NF, grad_NF, to_gate, to_up, width, BLOCK=GATE_BLOCK)
    return to_gate, to_up


# ------------------------------------------------------------------------------------------------ tokens


@triton.jit
def _token_logprobs(logits, token, temperature, logprob, entropy, lse, V, BLOCK: tl.constexpr):
    """One pass over a row: the sums of exponentials, relative to the running maximum, and of logits times them."""
    m = tl.program_id(0).to(tl.int64)
    row, temp = logits + m * V, tl.load(temperature + m)
    highest = -1e30
    sum_, mean = 0.0, 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32) / temp
        higher = tl.maximum(highest, tl.max(x, axis=0))
        weight = tl.exp(x - higher)
        shrink = tl.exp(highest - higher)
        sum_ = sum_ * shrink + tl.sum(weight, axis=0)
        mean = mean * shrink + tl.sum(tl.where(weight > 0, x * weight, 0.0), axis=0)
        highest = higher
    total = highest + tl.log(sum_)
    logit = tl.load(row + tl.load(token + m)).to(tl.float32) / temp
    tl.store(logprob + m, logit - total)
    tl.store(entropy + m, total - mean / sum_)
    tl.store(lse + m, total)


@triton.jit
def _token_logprobs_backward(
    logits, token, temperature, entropy, lse, to_logprob, to_entropy, out, V, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temp = tl.load(temperature + m)
    x = tl.load(logits + m * V + v, mask=v < V, other=0.0).to(tl.float32) / temp - tl.load(lse + m)
    p = tl.exp(x)
    logit_grad = tl.load(to_logprob + m) * (tl.where(v == tl.load(token + m), 1.0, 0.0) - p)
    if ENTROPY:
        logit_grad -= tl.where(p > 0, tl.load(to_entropy + m) * p * (x + tl.load(entropy + m)), 0.0)
    tl.store(out + m * V + v, logit_grad / temp, mask=v < V)


def token_logprobs(logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each token at its temperature, entropy, and log-sum-exp."""
    count, vocabulary = logit_MV.shape
    logprob, entropy, lse = torch.empty((3, count), dtype=torch.float32, device=logit_MV.device)
    _token_logprobs[(count,)](
        logit_MV, token_M, temperature_M, logprob, entropy, lse, vocabulary, BLOCK=LOGIT_BLOCK, num_warps=8
    )
    return logprob, entropy, lse


def token_logprobs_backward(
    logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor, entropy_M: Tensor, lse_M: Tensor, to_logprob_M: Tensor,
    to_entropy_M: Tensor | None,
) -> Tensor:  # fmt: skip
    count, vocabulary = logit_MV.shape
    out = torch.empty_like(logit_MV)
    _token_logprobs_backward[(count, -(-vocabulary // LOGIT_BLOCK))](
        logit_MV, token_M, temperature_M, entropy_M, lse_M, to_logprob_M,
        entropy_M if to_entropy_M is None else to_entropy_M, out, vocabulary,
        ENTROPY=to_entropy_M is not None, BLOCK=LOGIT_BLOCK, num_warps=8,
    )  # fmt: skip
    return out
