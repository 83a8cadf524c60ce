"""The distribution that tokens are sampled from: schema, temperature, top-k, top-p and min-p, renormalised.

Engine and learner both use it, so a token is scored under the distribution that it was sampled from. B rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.types import Floats, Sampling, Terms

TokenMasks = Sequence[bytes | None]
"""For each row the tokens that a schema allows, as `SchemaMatcher.allowed`; None for all tokens."""


@dataclass(frozen=True, slots=True)
class DistributionParams:
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    truncates: bool  # whether any row excludes tokens by top-k, top-p or min-p
    allowed_B: TokenMasks | None = None

    @property
    def excludes(self) -> bool:
        """Whether any row has tokens of probability 0."""
        return self.truncates or self.allowed_B is not None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> DistributionParams:
        """From sampling settings. Temperature 0 is greedy sampling, scored at temperature 1."""
        columns = [[s.temperature or 1.0, s.top_k, s.top_p, s.min_p] for s in samplings]
        temperature, k, p, m = torch.tensor(columns, dtype=torch.float64, device=device).T
        return cls(temperature, k.long(), p, m, any(s.truncates for s in samplings))

    @classmethod
    def from_terms(cls, terms: Terms, default: Sampling, device: torch.device) -> DistributionParams:
        """One entry per term from `Terms.drawn`, where NaN takes the value of `default`, and `Terms.allowed`."""
        drawn_M4: Floats = np.full((len(terms), 4), np.nan) if terms.drawn is None else terms.drawn
        rows_M4 = np.where(np.isnan(drawn_M4), np.asarray(default.drawn), drawn_M4)
        temperature, k, p, m = rows_M4.T
        is_whole = ((k <= 0) & (p >= 1) & (m <= 0)).all()
        columns = np.stack([np.where(temperature == 0, 1.0, temperature), k, p, m])
        temperature, k, p, m = torch.from_numpy(columns).to(device)
        allowed = terms.allowed if terms.allowed is not None and any(terms.allowed) else None
        return cls(temperature, k.long(), p, m, not is_whole, None if allowed is None else allowed.tolist())

    def split(self, rows: int) -> Iterator[DistributionParams]:
        columns = (self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
        for number, (temperature, k, p, m) in enumerate(zip(*(column.split(rows) for column in columns), strict=True)):
            allowed = None if self.allowed_B is None else self.allowed_B[number * rows : (number + 1) * rows]
            yield DistributionParams(temperature, k, p, m, self.truncates, allowed)


def sampling_logprobs(logits_BV: Tensor, params: DistributionParams, token_B: Tensor | None = None) -> Tensor:
    """Log-probabilities of the sampling distribution; minus infinity for excluded tokens."""
    return torch.log_softmax(processed_logits(logits_BV, params, token_B), dim=-1)


def processed_logits(logits_BV: Tensor, params: DistributionParams, token_B: Tensor | None = None) -> Tensor:
    return possible_logits(logits_BV, params, token_B) / params.temperature_B[:, None].to(logits_BV.dtype)


def possible_logits(logits_BV: Tensor, params: DistributionParams, token_B: Tensor | None = None) -> Tensor:
    """The logits, minus infinity for tokens that cannot be sampled; `token_B` were sampled."""
    if params.allowed_B is not None:
        logits_BV = exclude_tokens(logits_BV, params.allowed_B)
    if not params.truncates:
        return logits_BV
    kept_BV = kept_tokens(logits_BV.detach(), params)
    if token_B is not None:
        kept_BV.scatter_(1, token_B[:, None], True)
    return logits_BV.masked_fill(~kept_BV, float("-inf"))


def exclude_tokens(logits_BV: Tensor, allowed_B: TokenMasks) -> Tensor:
    """The logits, minus infinity for tokens that are not allowed. Tokens beyond the end of a mask are not allowed."""
    rows = [row for row, mask in enumerate(allowed_B) if mask is not None]
    if not rows:
        return logits_BV
    packed_RW = packed_masks([allowed_B[row] for row in rows], logits_BV.shape[1])
    bits_RW1 = torch.from_numpy(packed_RW).to(logits_BV.device)[:, :, None]
    bit_8 = torch.arange(8, dtype=torch.uint8, device=logits_BV.device)
    excluded_RV = ((bits_RW1 >> bit_8) & 1 == 0).flatten(1)[:, : logits_BV.shape[1]]
    if len(rows) == len(allowed_B):
        return logits_BV.masked_fill(excluded_RV, float("-inf"))
    excluded_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    excluded_BV[torch.tensor(rows, device=logits_BV.device)] = excluded_RV
    return logits_BV.masked_fill(excluded_BV, float("-inf"))


def packed_masks(masks: TokenMasks, vocabulary: int) -> NDArray[np.uint8]:
    """Masks as rows of bits for a vocabulary of this size, which may be larger than the tokenizer's."""
    packed = np.zeros((len(masks), -(-vocabulary // 8)), dtype=np.uint8)
    for target, mask in zip(packed, masks, strict=True):
        bits = np.frombuffer(mask or b"", dtype=np.uint8)[: len(target)]
        target[: len(bits)] = bits
    return packed


PREFIX = 2048
"""Likeliest tokens among which the last kept one is sought first. If they do not suffice, the row is sorted completely:
a flat distribution takes longer than by sorting alone (`docs/results/step.md`)."""
MAX_LOGITS_AT_ONCE = 2**24  # in `kept_tokens`, which needs up to 45 bytes for each


def kept_tokens(logits_BV: Tensor, params: DistributionParams) -> Tensor:
    """Which tokens may be sampled: the k likeliest; of these the fewest with a total probability of p; of these the
    ones at least m times as likely as the likeliest. The likeliest is always kept. Of equally likely tokens the first
    ones are. All tokens of a row with NaN are kept."""
    rows, vocabulary = logits_BV.shape
    if not rows:
        return torch.zeros_like(logits_BV, dtype=torch.bool)
    heat_B, top_p_B, min_p_B = params.temperature_B, params.top_p_B, params.min_p_B
    k_B = torch.where(params.top_k_B > 0, params.top_k_B.clamp(max=vocabulary), vocabulary)
    limit_4B = torch.stack([heat_B, k_B.double(), top_p_B, min_p_B]).expand(4, rows)
    most, at_once = int(k_B.max()), max(1, MAX_LOGITS_AT_ONCE // vocabulary)
    parts = zip(logits_BV.split(at_once), limit_4B.split(at_once, dim=1), strict=True)
    return torch.cat([_kept(logits_PV, limit_4P, most) for logits_PV, limit_4P in parts])


def _kept(logits_BV: Tensor, limit_4B: Tensor, most: int) -> Tensor:
    vocabulary = logits_BV.shape[1]
    heat_B, k_B, p_B, m_B = limit_4B
    precise_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    scaled_BV = precise_BV / heat_B[:, None].to(precise_BV.dtype)
    count_B, last_B, known_B = _last_kept(scaled_BV, limit_4B[1:], min(PREFIX, most), most)
    whole_B = ((k_B == vocabulary) & (p_B >= 1) & (m_B <= 0)) | last_B.isnan()
    row = (~(known_B | whole_B)).nonzero()[:, 0]
    if len(row):
        count_B[row], last_B[row], _ = _last_kept(scaled_BV[row], limit_4B[1:, row], vocabulary, vocabulary)
    above_BV, equal_BV = scaled_BV > last_B[:, None], scaled_BV == last_B[:, None]
    left_B = count_B - above_BV.sum(-1)
    if bool((equal_BV.sum(-1) > left_B).any()):
        equal_BV &= equal_BV.cumsum(-1, dtype=torch.int32) <= left_B[:, None]
    return above_BV | equal_BV | whole_B[:, None]


def _last_kept(scaled_BV: Tensor, limit_3B: Tensor, size: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each row the number of kept tokens, the logit of the least likely one, and whether the `size` likeliest
    tokens suffice to know them. Limits are k, p and m; `most` is at least the largest k."""
    vocabulary = scaled_BV.shape[1]
    k_B1, p_B1, m_B1 = limit_3B[:, :, None]
    if size == vocabulary:
        top_BP = scaled_BV.sort(dim=-1, descending=True).values
    else:
        top_BP = scaled_BV.topk(size, dim=-1).values
    among_BP = torch.arange(size, device=scaled_BV.device) < k_B1
    weight_BP = (top_BP.double() - top_BP[:, :1]).exp().masked_fill(~among_BP, 0.0)
    total_B1 = weight_BP.sum(-1, keepdim=True)
    if most > size:
        all_B1 = (scaled_BV.double() - top_BP[:, :1]).exp().sum(-1, keepdim=True)
        total_B1 = torch.where(k_B1 == vocabulary, all_B1, total_B1)
    prob_BP = weight_BP / total_B1
    before_BP = torch.nn.functional.pad(prob_BP.cumsum(-1)[:, :-1], (1, 0))
    kept_BP = among_BP & ((before_BP < p_B1) | (p_B1 >= 1))  # p = 1 excludes nothing in spite of rounding
    kept_BP &= prob_BP >= m_B1 * prob_BP[:, :1]
    count_B = kept_BP.sum(-1).clamp(min=1)
    k_B = k_B1[:, 0]
    known_B = (k_B <= size) | ((k_B == vocabulary) & (count_B < size))
    return count_B, top_BP.gather(1, count_B[:, None] - 1)[:, 0], known_B
