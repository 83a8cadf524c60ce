"""An algorithm beside which demonstrations are imitated: alone at first, then with a weight in every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms.algorithm import Algorithm, Needs, Recipe
from arborl.algorithms.by_source import columns_of, pick_terms, renumbered
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig, TrustRegionConfig
from arborl.types import NOT_SAMPLED, Group, Metrics, Terms


class Demonstrated(Algorithm):
    """Hands groups that were given to supervised learning, all others to the algorithm of the run.

    The loss is the algorithm's own plus `weight` times the demonstrations', each a mean over its own episodes; of a
    batch of demonstrations alone, theirs.

    Args:
        inner: the run's.
        weight: of the demonstrations in steps that also learn from episodes.
    """

    def __init__(self, inner: Algorithm, weight: float):
        self.inner, self.weight = inner, weight
        self.imitation = Recipe(AlgorithmConfig(name="sft"), given=True)
        self._alone = False
        """Whether the last batch was of demonstrations only."""
        self._terms = self._played = 0
        """Of the last batch, and those of them that were sampled."""
        self._number_G = np.zeros(0, dtype=np.int64)
        """Of each group of the last batch, among those that were played."""

    @property
    def needs(self) -> Needs:
        return Needs() if self._alone else self.inner.needs

    @property
    def whole(self) -> bool:
        return not self._alone and self.inner.whole

    @property
    def trust_region(self) -> TrustRegionConfig | None:
        return None if self._alone else self.inner.trust_region

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Demonstrations spread among the others: a minibatch is a part of the batch, and should hold both."""
        shown = self.imitation.keep([group for group in groups if _given(group)])
        played = [group for group in groups if not _given(group)]
        self._alone = not played
        kept = self.inner.keep(played) if played else []
        places = np.linspace(0, len(kept), len(shown), endpoint=False).astype(int).tolist() if shown else []
        out: list[Group] = []
        for number, group in enumerate(kept or [None]):
            out += [one for one, place in zip(shown, places, strict=True) if place == number]
            out += [group] if group is not None else []
        return out

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        columns = {name: getattr(terms, name).copy() for name in ("advantage", "weight", "target")}
        given_G = np.array([_given(group) for group in groups], dtype=bool)
        self._number_G = np.cumsum(~given_G) - 1
        self._terms, self._played = len(terms), int((terms.version != NOT_SAMPLED).sum())
        for part, mine in ((self.inner, np.flatnonzero(~given_G)), (self.imitation, np.flatnonzero(given_G))):
            rows = np.flatnonzero(np.isin(terms.tree, mine))
            if len(rows):
                own = renumbered(terms.pick(rows), mine, groups)
                found = part.credit([groups[int(n)] for n in mine], own)
                for column, values in columns.items():
                    values[rows] = getattr(found, column)
                if part is self.imitation:
                    columns["weight"][rows] *= self._factor
        return dataclasses.replace(terms, **columns)

    @property
    def _factor(self) -> float:
        return 1.0 if self._alone else self.weight

    def count(self, terms: Terms) -> float:
        played = terms.version != NOT_SAMPLED
        return self.inner.count(terms.pick(played)) if played.any() else self.imitation.count(terms)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        out_M = now_M.new_zeros(len(now_M), 2)
        rows = (terms.version_M != NOT_SAMPLED).nonzero()[:, 0]
        if len(rows):
            out_M[rows] = self.inner.prepare(now_M[rows], self._own(terms, rows))
        return out_M

    def _own(self, terms: TermBatch, rows: Tensor) -> TermBatch:
        """These terms, their groups counted as if there were no others."""
        number_G = torch.from_numpy(self._number_G).to(rows.device)
        mine = pick_terms(terms, rows)
        return dataclasses.replace(mine, group_M=number_G[mine.group_M])

    def loss(self, said: Said, terms: TermBatch) -> LossParts:
        """Each part's own vectors are scaled so that their means over all terms are means over its terms."""
        loss_M, seen = torch.zeros_like(said.logprob_M), dict[str, Tensor]()
        given_M = terms.version_M == NOT_SAMPLED
        for part, rows in ((self.inner, (~given_M).nonzero()[:, 0]), (self.imitation, given_M.nonzero()[:, 0])):
            if not len(rows):
                continue
            own = Said(*(None if column is None else column[rows] for column in columns_of(said)))  # type: ignore[arg-type]
            mine = self._own(terms, rows)
            found, vectors = part.loss(own, mine)
            loss_M = loss_M.index_put((rows,), found)
            scale = self._terms / max(self._played, 1)
            if part is self.imitation:
                vectors = {"sft/loss": (found * mine.weight_M).detach() / self._factor}
                scale = float(self._terms)
            for key, vector in vectors.items():
                whole = torch.zeros(len(loss_M), dtype=vector.dtype, device=vector.device)
                seen[key] = whole.index_put((rows,), vector * scale)
        return loss_M, seen

    def metrics(self) -> Metrics:
        return self.imitation.metrics() if self._alone else self.inner.metrics()

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state)


def _given(group: Group) -> bool:
    return any(episode.is_offline for episode in group.episodes)
