"""Drawing tokens. A token depends on the seed and the position of its request, and on no other request.

B requests, V tokens of the vocabulary. Hashing (seed, position) gives one uniform number; the token is where the
cumulative probability passes it. There is no state, so a request can be preempted, moved or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from arborl.chat.json_schema import SchemaMatcher
from arborl.models.sampling import DistributionParams, exclude_tokens, sampling_logprobs
from arborl.types import Sampling

TopTokens = tuple[NDArray[np.int64], NDArray[np.float64]]
"""The likeliest tokens of each row, likeliest first, and their log-probabilities."""


def uniform_numbers(seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by two rounds of the splitmix64 mixer (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seeds, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Changes to the logits of one request's next token, before temperature and truncation."""

    penalized: NDArray[np.int64]
    """Distinct tokens of the completion so far, if the request has penalties."""
    penalty: NDArray[np.float32]
    """Subtracted from their logits."""
    allowed: bytes | None
    """As `SchemaMatcher.allowed`; None for all tokens."""


@dataclass(frozen=True, slots=True)
class LogitEditor:
    """The schema and the penalties of one request."""

    sampling: Sampling
    matcher: SchemaMatcher | None

    def edit(self, sampled: NDArray[np.int32]) -> LogitEdit:
        """The edit of the token behind the sampled ones. Raises SchemaError if the schema allows none."""
        seen = sampled.astype(np.int64) if self.sampling.penalizes else np.zeros(0, np.int64)
        tokens, counts = np.unique(seen, return_counts=True)
        penalty = self.sampling.frequency_penalty * counts + self.sampling.presence_penalty
        allowed = None if self.matcher is None else self.matcher.allowed(sampled.tolist())
        return LogitEdit(tokens, penalty.astype(np.float32), allowed)


def edit_logits(logits_BV: Tensor, edits: Mapping[int, LogitEdit]) -> Tensor:
    """The logits with the edits of these rows."""
    row = np.concatenate([np.full(len(edit.penalized), row) for row, edit in edits.items()])
    if len(row):
        token = np.concatenate([edit.penalized for edit in edits.values()])
        penalty = torch.from_numpy(np.concatenate([edit.penalty for edit in edits.values()]))
        index = tuple(torch.from_numpy(column).to(logits_BV.device) for column in (row, token))
        logits_BV = logits_BV.index_put(index, -penalty.to(logits_BV), accumulate=True)
    masks = [edits[row].allowed if row in edits else None for row in range(len(logits_BV))]
    return exclude_tokens(logits_BV, masks)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters and uniform numbers of the next token of B requests."""

    temperature_B: NDArray[np.float64]
    """0 selects the likeliest token and reports its probability at temperature 1."""
    top_k_B: NDArray[np.int64]
    top_p_B: NDArray[np.float64]
    min_p_B: NDArray[np.float64]
    uniform_B: NDArray[np.float64]
    top: int = 0
    """Number of likeliest tokens to report; the largest of any request."""
    edits: Mapping[int, LogitEdit] = field(default_factory=dict)
    """By row."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], counts: Sequence[int]) -> SamplingBatch:
        columns = zip(*((s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings), strict=True)
        temperature, top_k, top_p, min_p = (np.asarray(column) for column in columns)
        return cls(temperature, top_k, top_p, min_p, uniform_numbers([s.seed for s in samplings], counts))

    @property
    def truncated_B(self) -> NDArray[np.bool_]:
        """Which requests exclude tokens by top-k, top-p or min-p."""
        return (self.top_k_B != 0) | (self.top_p_B < 1) | (self.min_p_B != 0)

    @property
    def truncates(self) -> bool:
        return bool(self.truncated_B.any())

    @property
    def edited_B(self) -> NDArray[np.bool_]:
        edited_B = np.zeros(len(self.uniform_B), dtype=bool)
        edited_B[list(self.edits)] = True
        return edited_B

    def redrawn_rows(self) -> NDArray[np.int64]:
        """Rows whose logits `redraw` needs."""
        return np.arange(len(self.uniform_B)) if self.top else np.flatnonzero(self.truncated_B | self.edited_B)

    def select(self, rows: NDArray[np.int64]) -> SamplingBatch:
        edits = {index: self.edits[row] for index, row in enumerate(rows.tolist()) if row in self.edits}
        return SamplingBatch(
            self.temperature_B[rows], self.top_k_B[rows], self.top_p_B[rows], self.min_p_B[rows], self.uniform_B[rows],
            self.top, edits,
        )  # fmt: skip

    def without_edits(self) -> SamplingBatch:
        return replace(self, edits={}) if self.edits else self

    def distribution(self, device: torch.device) -> DistributionParams:
        temperature = np.where(self.temperature_B == 0, 1.0, self.temperature_B)
        columns = (temperature, self.top_k_B, self.top_p_B, self.min_p_B)
        heat, k, p, m = (torch.from_numpy(column).to(device) for column in columns)
        return DistributionParams(heat, k, p, m, self.truncates)


def redraw(
    logits_RV: Tensor, rows: NDArray[np.int64], batch: SamplingBatch, token_B: Tensor, logprob_B: Tensor
) -> TopTokens | None:
    """Write the tokens of truncated and edited rows over those of a fused sampler, which neither truncates nor edits.
    Returns the likeliest tokens of all rows if requested; no token depends on whether they are."""
    chosen, device = batch.select(rows), token_B.device
    token_R, logprob_R, top = sample_tokens(logits_RV, chosen)
    changed = np.flatnonzero(chosen.truncated_B | chosen.edited_B)
    from_C, to_C = (torch.from_numpy(column).to(device) for column in (changed, rows[changed]))
    token_B[to_C] = token_R[from_C]
    logprob_B[to_C] = logprob_R[from_C].to(logprob_B.dtype)
    return top


def sample_tokens(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor, TopTokens | None]:
    """A token per row, its log-probability under the sampling distribution, and the likeliest tokens if requested."""
    device = logits_BV.device
    if batch.edits:
        logits_BV = edit_logits(logits_BV, batch.edits)
    logprob_BV = sampling_logprobs(logits_BV, batch.distribution(device))
    total_BV = logprob_BV.exp().cumsum(-1, dtype=torch.float64)
    point_B1 = torch.from_numpy(batch.uniform_B).to(device)[:, None] * total_BV[:, -1:]
    token_B = torch.searchsorted(total_BV, point_B1, right=True)[:, 0]
    if batch.edits or batch.truncates:
        token_B = token_B.minimum((total_BV < total_BV[:, -1:]).sum(-1))  # the last token that is not excluded
    token_B = token_B.clamp(max=logits_BV.shape[1] - 1)
    greedy = batch.temperature_B == 0
    if greedy.any():
        token_B = torch.where(torch.from_numpy(greedy).to(device), logprob_BV.argmax(-1), token_B)
    top: TopTokens | None = None
    if batch.top:
        top_BT, index_BT = logprob_BV.topk(min(batch.top, logprob_BV.shape[1]))
        top = index_BT.cpu().numpy(), top_BT.double().cpu().numpy()
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0], top
