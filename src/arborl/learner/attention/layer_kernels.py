"""The operations between the matrix products of an update on a GPU, forward and backward, as fused Triton kernels.

Plain torch takes several passes over memory for each and keeps intermediate results; torch.compile also fuses them,
after minutes. N tokens, J heads, D head size, F feed-forward size, M terms, V vocabulary. All numbers are computed in
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024  # numbers of a row per program of `gate`
LOGIT_BLOCK = 4096  # logits per iteration


def next_power(n: int) -> int:
    return int(triton.next_power_of_2(n))


@triton.jit
def _rotate(
    x, cos, sin, out, stride,
    J: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    j, d = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (j < J) & (d < D)
    other = (d + D // 2) % D
    value = tl.load(x + n * stride + j * D + d, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x + n * stride + j * D + other, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + n * D + d, mask=d < D, other=0.0).to(tl.float32)
    if BACK:
        s = tl.load(sin + n * D + other, mask=d < D, other=0.0).to(tl.float32)
    else:
        s = tl.load(sin + n * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + n * J * D + j * D + d, value * c + partner * s, mask=inside)


def rotate(x_NJD: Tensor, cos_N1D: Tensor, signed_sin_N1D: Tensor, back: bool) -> Tensor:
    """Rotary position embedding by halves, or its gradient with `back`. The heads of a token must be contiguous."""
    count, heads, size = x_NJD.shape
    x_NJD = x_NJD if x_NJD.stride()[1:] == (size, 1) else x_NJD.contiguous()
    out = x_NJD.new_empty(x_NJD.shape)
    _rotate[(count,)](
        x_NJD, cos_N1D.contiguous(), signed_sin_N1D.contiguous(), out, x_NJD.stride(0),
        J=heads, D=size, HEADS=next_power(heads), SIZE=next_power(size), BACK=back,
    )  # fmt: skip
    return out


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
    _gate[(count, triton.cdiv(width, GATE_BLOCK))](gate_NF, up_NF, out, width, BLOCK=GATE_BLOCK)
    return out


def gate_backward(gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    count, width = gate_NF.shape
    to_gate, to_up = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    _gate_backward[(count, triton.cdiv(width, GATE_BLOCK))](
        gate_NF, up_NF, grad_NF, to_gate, to_up, width, BLOCK=GATE_BLOCK
    )
    return to_gate, to_up


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
    _token_logprobs_backward[(count, triton.cdiv(vocabulary, LOGIT_BLOCK))](
        logit_MV, token_M, temperature_M, entropy_M, lse_M, to_logprob_M,
        entropy_M if to_entropy_M is None else to_entropy_M, out, vocabulary,
        ENTROPY=to_entropy_M is not None, BLOCK=LOGIT_BLOCK, num_warps=8,
    )  # fmt: skip
    return out
