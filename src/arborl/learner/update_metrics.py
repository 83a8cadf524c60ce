"""Between the columns of `Terms` and numbers worth logging."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.algorithms.algorithm import Needs
from arborl.algorithms.token_losses import Said, TermBatch, ratio
from arborl.learner.packing import MicroBatch
from arborl.learner.peers import ALONE, Peers
from arborl.learner.term_log import Note
from arborl.learner.upload import upload
from arborl.types import NOT_SAMPLED, Metrics, Terms

log = logging.getLogger(__name__)

NAMED = 8
"""Episodes that a warning names; the others it counts."""
GAP = "policy/logprob_diff"
"""Of tokens that the rollout sampled."""


def columns(terms: Terms, device: torch.device, dtype: torch.dtype) -> TermBatch:
    """The terms as tensors, numbers in float32 or the model's precision where finer; None where nothing is known."""
    fine = np.float64 if dtype == torch.float64 else np.float32
    maybe = {name: getattr(terms, name) for name in ("proximal", "reference", "value", "target", "teacher")}
    known = {name: column for name, column in maybe.items() if not np.isnan(column).all()}
    numbers = {"old": terms.logprob, "advantage": terms.advantage, "weight": terms.weight} | known
    whole = {name: getattr(terms, name) for name in ("episode", "call", "turn", "version")} | {"group": terms.tree}
    given: dict[str, Tensor | None] = {f"{name}_M": None for name in maybe}
    for columns, kind in ((numbers, fine), (whole, np.int64)):
        sent = upload(device, *(column.astype(kind) for column in columns.values()))
        given |= {f"{name}_M": tensor for name, tensor in zip(columns, sent, strict=True)}
    return TermBatch(**given)  # type: ignore[arg-type]


def anchored(terms: TermBatch, now_M: Tensor, needs: Needs) -> TermBatch:
    """The terms with an anchor for ratios, if the algorithm wants one: where none was looked up, no weight has moved
    yet, and it is what the policy says now."""
    missing = needs.anchor and terms.proximal_M is None
    return dataclasses.replace(terms, proximal_M=now_M) if missing else terms


def not_finite(terms: Terms) -> NDArray[np.bool_]:
    """Which terms no loss can be computed from. How likely a given token was is not known, and no loss asks."""
    known = np.where(terms.version == NOT_SAMPLED, 0.0, terms.logprob)
    return np.asarray(~np.isfinite(terms.advantage + terms.weight + known))


def without(terms: Terms, bad: NDArray[np.bool_], names: Sequence[str], peers: Peers = ALONE) -> tuple[Terms, Metrics]:
    """The terms without those that are `bad` and their groups; what goes is named and counted."""
    lost = np.isin(terms.tree, terms.tree[bad])
    if lost.any():
        called = [names[n] if n < len(names) else f"number {n}" for n in np.unique(terms.episode[bad])]
        more = f" and {len(called) - NAMED} more" if len(called) > NAMED else ""
        log.warning("not finite, and left out with their groups: episodes %s%s", ", ".join(called[:NAMED]), more)
    dropped = peers.total(len(np.unique(terms.episode[lost])))
    return terms.pick(~lost), {"dropped/not_finite": dropped} if dropped else {}


class Tally:
    """Sums over terms, kept where they were computed until they are asked for."""

    def __init__(self) -> None:
        self.count = self.sampled = 0
        self.sums: dict[str, Tensor] = {}
        self.loss: Tensor | float = 0.0
        self.widest: list[Tensor] = []
        self.noted: list[Note] = []

    def add(self, batch: MicroBatch, loss: Tensor, said: Said, terms: TermBatch, parts: dict[str, Tensor]) -> None:
        """One micro-batch."""
        sampled = np.flatnonzero(batch.terms.version != NOT_SAMPLED)
        found = parts | {"policy/entropy": said.entropy_M}
        if len(sampled):
            gap_M = (said.logprob_M.detach() - terms.old_M).abs()
            gap_M = gap_M if len(sampled) == len(gap_M) else gap_M[torch.from_numpy(sampled).to(gap_M.device)]
            found[GAP] = ratio(gap_M) - 1
            self.widest.append(gap_M.max())
        for name, vector in found.items():
            self.sums[name] = self.sums.get(name, 0.0) + vector.detach().sum()
        self.loss = self.loss + loss.detach()
        self.count += len(batch.rows)
        self.sampled += len(sampled)

    def note(
        self, batch: MicroBatch, said: Said, terms: TermBatch, loss_M: Tensor, parts: dict[str, Tensor], scale: float
    ) -> None:
        """Keep what is known of each term, once the gradient has been taken; it is `scale` times too large."""
        assert batch.terms.place is not None
        now_M, pull_M = said.logprob_M.detach(), said.logprob_M.grad
        ratio_M = parts.get("policy/ratio", ratio(now_M - terms.old_M))
        pull_M = torch.zeros_like(now_M) if pull_M is None else pull_M / scale
        columns = (now_M, said.entropy_M, ratio_M, loss_M * terms.weight_M, pull_M)
        self.noted.append(Note(batch.terms.place, *(column.detach() for column in columns)))

    def metrics(self, peers: Peers = ALONE) -> Metrics:
        """The loss, and means over the terms of all processes."""
        mine = {name: float(value) for name, value in self.sums.items()}
        widest = max((float(gap) for gap in self.widest), default=0.0)
        everyone = peers.gather((self.count, self.sampled, float(self.loss), widest, mine))
        total = max(1, sum(count for count, *_ in everyone))
        sampled = max(1, sum(count for _, count, *_ in everyone))
        names = dict.fromkeys(name for *_, sums in everyone for name in sums)
        means = {
            name: sum(sums.get(name, 0.0) for *_, sums in everyone) / (sampled if name == GAP else total)
            for name in names
        }
        found = means | {"policy/loss": sum(loss for _, _, loss, _, _ in everyone)}
        return found | ({f"{GAP}_max": max(gap for *_, gap, _ in everyone)} if GAP in means else {})


def summed_up(seen: Mapping[str, Sequence[float]]) -> Metrics:
    """The metrics of an update from those of its steps: counts add up, others are means over the steps that have a
    number to show."""
    out: Metrics = {}
    for name, values in seen.items():
        finite = [value for value in values if np.isfinite(value)]
        if name in ("learner/steps", "dropped/not_finite"):
            out[name] = sum(values)
        elif "logprob_diff" in name:  # read before any weight has moved
            out[name] = values[0]
        else:
            out[name] = float(np.mean(finite)) if finite else values[0]
    return out
