"""The distribution tokens are drawn from: temperature, then top-k, top-p and min-p, renormalised over what is kept.

Engine and learner both take it from here, so a token is scored under what it was sampled from. B rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborl.types import Floats, Sampling


@dataclass(frozen=True, slots=True)
class Shape:
    """How logits become probabilities, one entry a row; or one for all rows."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    truncates: bool
    """Whether any row keeps less than the whole vocabulary."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> Shape:
        """Temperature 0 is sampled greedily and scored as at 1."""
        columns = [[s.temperature or 1.0, s.top_k, s.top_p, s.min_p] for s in samplings]
        heat, k, p, m = torch.tensor(columns, dtype=torch.float64, device=device).T
        return cls(heat, k.long(), p, m, any(s.truncates for s in samplings))

    @classmethod
    def noted(cls, drawn_M4: Floats, otherwise: Sampling, device: torch.device) -> Shape:
        """One entry a term, from `Terms.drawn`; where nothing is noted, that of `otherwise`."""
        rows_M4 = np.where(np.isnan(drawn_M4), np.asarray(otherwise.drawn), drawn_M4)
        heat, k, p, m = rows_M4.T
        whole = ((k <= 0) & (p >= 1) & (m <= 0)).all()
        heat, k, p, m = torch.from_numpy(np.stack([np.where(heat == 0, 1.0, heat), k, p, m])).to(device)
        return cls(heat, k.long(), p, m, not whole)

    def split(self, rows: int) -> Iterator[Shape]:
        """The same in parts of so many rows."""
        columns = (self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
        for heat_B, k_B, p_B, m_B in zip(*(column.split(rows) for column in columns), strict=True):
            yield Shape(heat_B, k_B, p_B, m_B, self.truncates)


def log_distribution(logits_BV: Tensor, shape: Shape, token_B: Tensor | None = None) -> Tensor:
    """Log-probabilities of the shaped distribution; a token that cannot be drawn has minus infinity.

    Args:
        logits_BV: float32 or float64.
        shape: one entry, or one a row.
        token_B: tokens known to have been drawn: kept whatever the present weights say, so that their score is finite.
    """
    return torch.log_softmax(shaped(logits_BV, shape, token_B), dim=-1)


def shaped(logits_BV: Tensor, shape: Shape, token_B: Tensor | None = None) -> Tensor:
    """The logits of that distribution, up to a constant a row."""
    scaled_BV = logits_BV / shape.temperature_B[:, None].to(logits_BV.dtype)
    if not shape.truncates:
        return scaled_BV
    kept_BV = kept(scaled_BV.detach(), shape)
    if token_B is not None:
        kept_BV.scatter_(1, token_B[:, None], True)
    return scaled_BV.masked_fill(~kept_BV, float("-inf"))


def kept(scaled_BV: Tensor, shape: Shape) -> Tensor:
    """Which tokens may be drawn: the k likeliest; of these the fewest that hold p of the probability; of these the ones
    at least m times as likely as the likeliest. The likeliest always may."""
    ordered_BV, index_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
    k_B = torch.where(shape.top_k_B > 0, shape.top_k_B, scaled_BV.shape[1])
    inside_BV = rank_V[None] < k_B[:, None]
    prob_BV = torch.softmax(ordered_BV.double().masked_fill(~inside_BV, float("-inf")), dim=-1)
    before_BV = prob_BV.cumsum(-1) - prob_BV
    p_B1 = shape.top_p_B[:, None]
    inside_BV = inside_BV & ((before_BV < p_B1) | (p_B1 >= 1))  # rounding must not cost the last tokens their place
    inside_BV &= prob_BV >= shape.min_p_B[:, None] * prob_BV[:, :1]
    inside_BV[:, 0] = True
    return torch.zeros_like(inside_BV).scatter_(1, index_BV, inside_BV)
