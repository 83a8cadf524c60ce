"""Tokens into a sampling step and out of it on a GPU: the sampler, and what was sampled last fed in again.

B rows, V vocabulary. Sums are in float32 whatever the model's precision, those over chunks in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arborl.engines.kernels import power

CHUNK = 2048
"""Logits one program looks at."""


@triton.jit(do_not_specialize=["N"])
def _feed(fed, last, tokens, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(fed + n, mask=n < N, other=0)
    sampled = tl.load(last + (-1 - token), mask=(n < N) & (token < 0), other=0)
    tl.store(tokens + n, tl.where(token < 0, sampled, token.to(tl.int64)), mask=n < N)


def feed(fed_N: Tensor, last: Tensor) -> Tensor:
    """Tokens as the host gave them; where it gave -1 - i, the i-th that was sampled last."""
    out = torch.empty(len(fed_N), dtype=torch.int64, device=fed_N.device)
    _feed[(triton.cdiv(len(fed_N), 1024),)](fed_N, last, out, len(fed_N), BLOCK=1024)
    return out


@triton.jit
def _survey(logits, heat, highest, sum_, likeliest, V, CHUNKS, BLOCK: tl.constexpr):
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(heat + b).to(tl.float32)
    top = tl.max(x, axis=0)
    tl.store(highest + b * CHUNKS + chunk, top)
    tl.store(sum_ + b * CHUNKS + chunk, tl.sum(tl.exp(x - top), axis=0))
    tl.store(likeliest + b * CHUNKS + chunk, chunk * BLOCK + tl.argmax(x, axis=0))


@triton.jit
def _choose(
    logits, heat, greedy, uniform, highest, sum_, likeliest, token, logprob, V, CHUNKS,
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
    x = x / tl.load(heat + b).to(tl.float32)
    passed = tl.cumsum(tl.exp(x - top), axis=0).to(tl.float64) + before <= point
    count = tl.sum((passed & (v < V)).to(tl.int32), axis=0)
    drawn = chunk * BLOCK + count
    likely = tl.load(likeliest + b * CHUNKS + chunk)
    drawn = tl.where((count < BLOCK) & (drawn < V), drawn, likely)  # rounding at a chunk's very end
    best = tl.load(likeliest + b * CHUNKS + tl.argmax(top_C, axis=0))
    drawn = tl.minimum(tl.where(tl.load(greedy + b) != 0, best, drawn), V - 1)  # among NaN, the best may be padding
    chosen = tl.load(logits + b * V + drawn).to(tl.float32) / tl.load(heat + b).to(tl.float32)
    tl.store(token + b, drawn.to(tl.int64))
    tl.store(logprob + b, chosen - top - tl.log(total.to(tl.float32)))


def sample(
    logits_BV: Tensor, heat_B: Tensor, greedy_B: Tensor, uniform_B: Tensor, token_B: Tensor, logprob_B: Tensor
) -> None:
    """A token for each row, where the cumulative probability passes its uniform number, and its log-probability.

    `heat` is the temperature; a greedy row takes its likeliest token. Reads the logits once and one chunk again.
    """
    rows, vocabulary = logits_BV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    highest, sum_ = (logits_BV.new_empty(rows, chunks, dtype=torch.float32) for _ in range(2))
    likeliest = logits_BV.new_empty(rows, chunks, dtype=torch.int32)
    _survey[(rows, chunks)](logits_BV, heat_B, highest, sum_, likeliest, vocabulary, chunks, BLOCK=CHUNK)
    _choose[(rows,)](
        logits_BV, heat_B, greedy_B, uniform_B, highest, sum_, likeliest, token_B, logprob_B, vocabulary, chunks,
        PADDED=power(chunks), BLOCK=CHUNK,
    )  # fmt: skip
