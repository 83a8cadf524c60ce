"""Columns of `Terms` as tensors, the metrics of an update, and the per-token log."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.algorithms.token_losses import ModelOutputs, TermBatch, ratio
from arborl.learner.core.packing import MicroBatch, upload
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.types import NOT_SAMPLED, Ints, Metrics, Terms

log = logging.getLogger(__name__)

MAX_NAMED = 8  # episodes that a warning names; further ones are counted
ROLLOUT_GAP = "policy/logprob_diff"
"""Metric: difference between the learner's and the engine's probabilities, over tokens that the rollout sampled."""


def term_tensors(terms: Terms, device: torch.device, dtype: torch.dtype) -> TermBatch:
    """The terms as tensors, in float32 or in the model's dtype if that is float64; None for a column of NaN."""
    precision = np.float64 if dtype == torch.float64 else np.float32
    optional = {name: getattr(terms, name) for name in ("proximal", "reference", "value", "target", "teacher")}
    known = {name: column for name, column in optional.items() if not np.isnan(column).all()}
    floats = {"old": terms.logprob, "advantage": terms.advantage, "weight": terms.weight} | known
    ints = {name: getattr(terms, name) for name in ("episode", "call", "turn", "version")} | {"group": terms.tree}
    tensors: dict[str, Tensor | None] = {f"{name}_M": None for name in optional}
    for arrays, kind in ((floats, precision), (ints, np.int64)):
        uploaded = upload(device, *(column.astype(kind) for column in arrays.values()))
        tensors |= {f"{name}_M": tensor for name, tensor in zip(arrays, uploaded, strict=True)}
    return TermBatch(**tensors)  # type: ignore[arg-type]


def with_proximal(terms: TermBatch, new_M: Tensor, needs: AlgorithmNeeds) -> TermBatch:
    """Fill the proximal log-probabilities with the current ones if the algorithm needs them and they were not scored:
    then no weight has moved yet."""
    missing = needs.anchor and terms.proximal_M is None
    return dataclasses.replace(terms, proximal_M=new_M) if missing else terms


def non_finite_terms(terms: Terms) -> NDArray[np.bool_]:
    """Terms without a finite loss. The log-probability of a demonstration's token is unknown and unused."""
    logprob = np.where(terms.version == NOT_SAMPLED, 0.0, terms.logprob)
    return np.asarray(~np.isfinite(terms.advantage + terms.weight + logprob))


def drop_groups(
    terms: Terms, bad: NDArray[np.bool_], names: Sequence[str], ranks: RankGroup = SINGLE_RANK
) -> tuple[Terms, Metrics]:
    """Remove the groups of the `bad` terms; their episodes are named in a warning and counted."""
    lost = np.isin(terms.tree, terms.tree[bad])
    if lost.any():
        ids = [names[n] if n < len(names) else f"number {n}" for n in np.unique(terms.episode[bad])]
        more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
        log.warning("groups dropped: loss or gradient not finite in episodes %s%s", ", ".join(ids[:MAX_NAMED]), more)
    dropped = ranks.sum(len(np.unique(terms.episode[lost])))
    return terms.pick(~lost), {"dropped/not_finite": dropped} if dropped else {}


class UpdateSums:
    """Sums over the terms of an optimizer step; they stay on the device until `metrics`."""

    def __init__(self) -> None:
        self.count = self.sampled = 0
        self.sums: dict[str, Tensor] = {}
        self.loss: Tensor | float = 0.0
        self.max_gaps: list[Tensor] = []
        self.records: list[TermRecord] = []

    def add(
        self, batch: MicroBatch, loss: Tensor, outputs: ModelOutputs, terms: TermBatch, parts: dict[str, Tensor]
    ) -> None:
        sampled = np.flatnonzero(batch.terms.version != NOT_SAMPLED)
        vectors = parts | {"policy/entropy": outputs.entropy_M}
        if len(sampled):
            gap_M = (outputs.logprob_M.detach() - terms.old_M).abs()
            gap_M = gap_M if len(sampled) == len(gap_M) else gap_M[torch.from_numpy(sampled).to(gap_M.device)]
            vectors[ROLLOUT_GAP] = ratio(gap_M) - 1
            self.max_gaps.append(gap_M.max())
        for name, vector in vectors.items():
            self.sums[name] = self.sums.get(name, 0.0) + vector.detach().sum()
        self.loss = self.loss + loss.detach()
        self.count += len(batch.rows)
        self.sampled += len(sampled)

    def record(
        self, batch: MicroBatch, outputs: ModelOutputs, terms: TermBatch, loss_M: Tensor, parts: dict[str, Tensor],
        scale: float,
    ) -> None:  # fmt: skip
        """Keep the per-token results of a micro-batch after its backward pass; gradients are divided by `scale`."""
        assert batch.terms.place is not None
        new_M, pull_M = outputs.logprob_M.detach(), outputs.logprob_M.grad
        ratio_M = parts.get("policy/ratio", ratio(new_M - terms.old_M))
        pull_M = torch.zeros_like(new_M) if pull_M is None else pull_M / scale
        clipped = [vector for name, vector in parts.items() if name.endswith("policy/clipped")]
        unknown_M = torch.full_like(new_M, torch.nan)
        clipped_M = (torch.stack(clipped).sum(0) != 0).to(new_M) if clipped else unknown_M
        vectors = (new_M, outputs.entropy_M, ratio_M, loss_M * terms.weight_M, pull_M, clipped_M)
        self.records.append(TermRecord(batch.terms.place, *(column.detach() for column in vectors)))

    def metrics(self, ranks: RankGroup = SINGLE_RANK) -> Metrics:
        own = {name: float(value) for name, value in self.sums.items()}
        max_gap = max((float(gap) for gap in self.max_gaps), default=0.0)
        all_ranks = ranks.all_gather((self.count, self.sampled, float(self.loss), max_gap, own))
        total = max(1, sum(count for count, *_ in all_ranks))
        sampled = max(1, sum(count for _, count, *_ in all_ranks))
        names = dict.fromkeys(name for *_, sums in all_ranks for name in sums)
        means = {
            name: sum(sums.get(name, 0.0) for *_, sums in all_ranks) / (sampled if name == ROLLOUT_GAP else total)
            for name in names
        }
        metrics = means | {"policy/loss": sum(loss for _, _, loss, _, _ in all_ranks)}
        return metrics | ({f"{ROLLOUT_GAP}_max": max(gap for *_, gap, _ in all_ranks)} if ROLLOUT_GAP in means else {})


def combine_metrics(values: Mapping[str, Sequence[float]]) -> Metrics:
    """The metrics of an update from those of its steps: counts are summed, others are means over finite values."""
    out: Metrics = {}
    for name, numbers in values.items():
        finite = [value for value in numbers if np.isfinite(value)]
        if name in ("learner/steps", "dropped/not_finite"):
            out[name] = sum(numbers)
        elif "logprob_diff" in name:  # measured before any weight has moved
            out[name] = numbers[0]
        else:
            out[name] = float(np.mean(finite)) if finite else numbers[0]
    return out


@dataclass(frozen=True, slots=True)
class TermRecord:
    place: Ints  # rows of the terms in the batch's forest
    logprob_M: Tensor
    entropy_M: Tensor
    ratio_M: Tensor
    loss_M: Tensor  # weighted: the sum is the loss of the step
    pull_M: Tensor  # derivative of the loss with respect to the log-probability
    clipped_M: Tensor  # 1 if the loss clipped its ratio; NaN for losses without clipping


class TermLog:
    """Per-token results of an update, one row per term of the forest; NaN for terms that were not trained. `logprob`
    and `entropy` are those before the weights moved, `ratio`, `clipped` and `loss` those of the last step. `pull` is
    the derivative of the loss with respect to the log-probability, summed over steps: negative if the token became
    more likely."""

    def __init__(self, size: int):
        self.logprob, self.entropy, self.ratio, self.loss, self.pull, self.clipped = (
            np.full(size, np.nan, dtype=np.float32) for _ in range(6)
        )

    def add(self, records: Sequence[TermRecord]) -> None:
        for record in records:
            at = record.place
            first = np.isnan(self.logprob[at])
            self.logprob[at] = np.where(first, _to_numpy(record.logprob_M), self.logprob[at])
            self.entropy[at] = np.where(first, _to_numpy(record.entropy_M), self.entropy[at])
            self.ratio[at], self.loss[at] = _to_numpy(record.ratio_M), _to_numpy(record.loss_M)
            self.clipped[at] = _to_numpy(record.clipped_M)
            self.pull[at] = np.where(first, 0.0, self.pull[at]) + _to_numpy(record.pull_M)

    def merge(self, other: TermLog) -> None:
        """Take the rows that another rank trained."""
        known = np.isfinite(other.logprob)
        for name in ("logprob", "entropy", "ratio", "loss", "pull", "clipped"):
            getattr(self, name)[known] = getattr(other, name)[known]


def _to_numpy(vector: Tensor) -> NDArray[np.float32]:
    return np.asarray(vector.float().cpu().numpy())
