"""Another algorithm for the tasks of each source, in one batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms.algorithm import Algorithm, Needs, Recipe, counted
from arborl.algorithms.own import Find
from arborl.algorithms.selection import select
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig, TrustRegionConfig
from arborl.registry import load
from arborl.types import Group, Ints, Metrics, Terms

DEFAULT = ""
"""The algorithm of sources that none is named for."""


def make_algorithm(config: AlgorithmConfig, find: Find = load, check: bool = False, given: bool = False) -> Algorithm:
    """The algorithm of this configuration.

    Args:
        config: says which.
        find: from the name of an advantage or a loss of the user's own to it.
        check: try those on a small batch.
        given: whether it learns from given rows.
    """
    own = {DEFAULT: config.model_copy(update={"by_source": {}})}
    parts = {name: Recipe(chosen, find, given) for name, chosen in (own | config.by_source).items()}
    for part in parts.values() if check else ():
        part.check()
    return BySource(parts) if config.by_source else parts[DEFAULT]


class BySource(Algorithm):
    """Hands each group to the algorithm of its task's source.

    Each normalises over its own groups; then it weighs as many as its episodes are of the batch's, so a source with
    longer episodes does not weigh more.
    """

    def __init__(self, parts: dict[str, Recipe]):
        self.parts = parts
        self._of_tree: list[str] = []
        """Whose each group of the last credited batch is."""
        self._share: dict[str, float] = {}
        """What part of that batch's terms each has."""

    @property
    def needs(self) -> Needs:
        return reduce(or_, (part.needs for part in self.parts.values()))

    @property
    def whole(self) -> bool:
        return any(part.whole for part in self.parts.values())

    @property
    def trust_region(self) -> TrustRegionConfig | None:
        return self.parts[DEFAULT].trust_region

    def source_of(self, group: Group) -> str:
        return group.task.source if group.task.source in self.parts else DEFAULT

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """In the order given: a minibatch is a part of it, and should hold all sources."""
        kept: list[Group] = []
        dropped: dict[str, Counter[str]] = {name: Counter() for name in self.parts}
        for group in groups:
            name = self.source_of(group)
            found, why = select([group], self.parts[name].config)
            kept += found
            dropped[name] += why
        for name, part in self.parts.items():
            part.dropped = counted(dropped[name], part.config)
        return kept

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        self._of_tree = [self.source_of(group) for group in groups]
        self._share = {}
        columns = {name: getattr(terms, name).copy() for name in ("advantage", "weight", "target")}
        sizes = np.array([len(group.valid_episodes) for group in groups], dtype=np.int64)
        for name, part in self.parts.items():
            mine = np.array([n for n, whose in enumerate(self._of_tree) if whose == name], dtype=np.int64)
            rows = np.flatnonzero(np.isin(terms.tree, mine))
            if not len(rows):
                continue
            own = renumbered(terms.pick(rows), mine, groups)
            found = part.credit([groups[n] for n in mine], own)
            self._share[name] = len(rows) / len(terms)
            for column, values in columns.items():
                values[rows] = getattr(found, column)
            columns["weight"][rows] *= float(sizes[mine].sum() / sizes.sum())
        return dataclasses.replace(terms, **columns)

    def _rows(self, terms: TermBatch) -> dict[str, Tensor]:
        """Terms of each part, in order."""
        groups = [self._of_tree[group] for group in terms.group_M.tolist()]
        return {
            name: torch.tensor([i for i, whose in enumerate(groups) if whose == name], device=terms.group_M.device)
            for name in self.parts
            if name in groups
        }

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        out_M = now_M.new_zeros(len(now_M), 2)
        for name, rows in self._rows(terms).items():
            out_M[rows] = self.parts[name].prepare(now_M[rows], pick_terms(terms, rows))
        return out_M

    def loss(self, said: Said, terms: TermBatch) -> LossParts:
        """Each part's own vectors are scaled so that their means over all terms are means over its terms."""
        loss_M, seen = torch.zeros_like(said.logprob_M), {}
        for name, rows in self._rows(terms).items():
            own = Said(*(None if column is None else column[rows] for column in columns_of(said)))  # type: ignore[arg-type]
            found, vectors = self.parts[name].loss(own, pick_terms(terms, rows))
            loss_M = loss_M.index_put((rows,), found)
            for key, vector in vectors.items():
                whole = torch.zeros(len(loss_M), dtype=vector.dtype, device=vector.device)
                seen[f"source/{name or 'other'}/{key}"] = whole.index_put((rows,), vector / self._share[name])
        return loss_M, seen

    def metrics(self) -> Metrics:
        """Each part's, by source; what was dropped also in all."""
        out: Metrics = {}
        for name, part in self.parts.items():
            out |= {f"source/{name or 'other'}/{key}": value for key, value in part.metrics().items()}
            for key, value in part.dropped.items():
                out[key] = out.get(key, 0.0) + value
        return out

    def state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self.parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state(state.get(name, {}))


def columns_of(record: Said | TermBatch) -> list[Tensor | None]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def pick_terms(terms: TermBatch, rows: Tensor) -> TermBatch:
    return TermBatch(*(None if column is None else column[rows] for column in columns_of(terms)))  # type: ignore[arg-type]


def renumbered(terms: Terms, mine: Ints, groups: Sequence[Group]) -> Terms:
    """The terms of the groups that are `mine`, counted as if there were no others."""
    episodes = np.array([len(group.valid_episodes) for group in groups])
    calls = np.array([sum(len(episode.calls) for episode in group.valid_episodes) for group in groups])
    return dataclasses.replace(
        terms,
        tree=np.searchsorted(mine, terms.tree),
        episode=terms.episode - _before(episodes, mine)[terms.tree],
        call=terms.call - _before(calls, mine)[terms.tree],
    )


def _before(sizes: Ints, mine: Ints) -> Ints:
    """How many things of others stand before each group's own."""
    others = sizes.copy()
    others[mine] = 0
    return np.concatenate([[0], np.cumsum(others)])[:-1].astype(np.int64)
