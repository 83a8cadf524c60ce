"""Algorithms that combine others: one per source, weights per source, and imitation of demonstrations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms.custom_functions import FindObject
from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds, Recipe, drop_metrics
from arborl.algorithms.selection import DropReasons, select
from arborl.algorithms.token_losses import LossParts, ModelOutputs, TermBatch, pick_rows
from arborl.config.algorithm_config import AlgorithmArgs, AlgorithmConfig
from arborl.registry import load
from arborl.types import NOT_SAMPLED, Group, Ints, Metrics, Terms

DEFAULT = ""  # the source name of the algorithm for sources without their own
CREDITED = ("advantage", "weight", "target")  # the columns that `credit` fills


def make_algorithm(
    config: AlgorithmConfig, find: FindObject = load, check: bool = False, given: bool = False
) -> Algorithm:
    default = {DEFAULT: config.model_copy(update={"by_source": {}})}
    parts = {name: Recipe(chosen, find, given) for name, chosen in (default | config.by_source).items()}
    for part in parts.values() if check else ():
        part.check()
    return PerSourceAlgorithm(parts) if config.by_source else parts[DEFAULT]


class PerSourceAlgorithm(Algorithm):
    """Applies to each group the algorithm of its task's source. Each part normalizes over its own groups and weighs as
    much as its share of the batch's episodes."""

    def __init__(self, parts: dict[str, Recipe]):
        self.parts = parts
        self._drop_reasons: DropReasons = {}
        self._sources: list[str] = []  # the source of each group of the last credited batch
        self._share: dict[str, float] = {}  # the share of that batch's terms that each part has

    @property
    def needs(self) -> AlgorithmNeeds:
        return reduce(or_, (part.needs for part in self.parts.values()))

    @property
    def whole(self) -> bool:
        return any(part.whole for part in self.parts.values())

    @property
    def trust_region(self) -> AlgorithmArgs | None:
        return self.parts[DEFAULT].trust_region

    def source_of(self, group: Group) -> str:
        return group.task.source if group.task.source in self.parts else DEFAULT

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        kept: list[Group] = []
        dropped: dict[str, Counter[str]] = {name: Counter() for name in self.parts}
        self._drop_reasons = {}
        for group in groups:
            name = self.source_of(group)
            selected, numbers, reasons = select([group], self.parts[name].config)
            kept += selected
            dropped[name] += numbers
            self._drop_reasons |= reasons
        for name, part in self.parts.items():
            part.dropped = drop_metrics(dropped[name], part.config)
        return kept

    def drop_reasons(self) -> DropReasons:
        return self._drop_reasons

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        self._sources = [self.source_of(group) for group in groups]
        self._share = {}
        columns = {name: getattr(terms, name).copy() for name in CREDITED}
        sizes = np.array([len(group.valid_episodes) for group in groups], dtype=np.int64)
        for name, part in self.parts.items():
            numbers = np.array([n for n, source in enumerate(self._sources) if source == name], dtype=np.int64)
            rows = credit_part(part, groups, terms, numbers, columns)
            if len(rows):
                self._share[name] = len(rows) / len(terms)
                columns["weight"][rows] *= float(sizes[numbers].sum() / sizes.sum())
        return dataclasses.replace(terms, **columns)

    def _rows(self, terms: TermBatch) -> dict[str, Tensor]:
        """Terms of each part, in order."""
        sources = [self._sources[group] for group in terms.group_M.tolist()]
        return {
            name: torch.tensor([i for i, source in enumerate(sources) if source == name], device=terms.group_M.device)
            for name in self.parts
            if name in sources
        }

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        out_M = now_M.new_zeros(len(now_M), 2)
        for name, rows in self._rows(terms).items():
            out_M[rows] = self.parts[name].prepare(now_M[rows], pick_rows(terms, rows))
        return out_M

    def loss(self, outputs: ModelOutputs, terms: TermBatch) -> LossParts:
        """The vectors of each part are scaled so that their means over all terms are means over the part's terms."""
        loss_M, logged = torch.zeros_like(outputs.logprob_M), dict[str, Tensor]()
        for name, rows in self._rows(terms).items():
            part_M, vectors = self.parts[name].loss(pick_rows(outputs, rows), pick_rows(terms, rows))
            loss_M = loss_M.index_put((rows,), part_M)
            for key, vector in vectors.items():
                logged[f"source/{name or 'other'}/{key}"] = spread(vector / self._share[name], rows, len(loss_M))
        return loss_M, logged

    def metrics(self) -> Metrics:
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


class WrappedAlgorithm(Algorithm):
    """Delegates everything to another algorithm; subclasses override what they change."""

    def __init__(self, inner: Algorithm):
        self.inner = inner

    @property
    def needs(self) -> AlgorithmNeeds:
        return self.inner.needs

    @property
    def whole(self) -> bool:
        return self.inner.whole

    @property
    def trust_region(self) -> AlgorithmArgs | None:
        return self.inner.trust_region

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        return self.inner.keep(groups)

    def drop_reasons(self) -> DropReasons:
        return self.inner.drop_reasons()

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        return self.inner.credit(groups, terms)

    def count(self, terms: Terms) -> float:
        return self.inner.count(terms)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        return self.inner.prepare(now_M, terms)

    def loss(self, outputs: ModelOutputs, terms: TermBatch) -> LossParts:
        return self.inner.loss(outputs, terms)

    def metrics(self) -> Metrics:
        return self.inner.metrics()

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state)


class SourceWeightedAlgorithm(WrappedAlgorithm):
    """Multiplies the weights of each source's terms by a factor, normalized to mean 1 over all episodes."""

    def __init__(self, inner: Algorithm, weights: Mapping[str, float]):
        super().__init__(inner)
        self.weights = dict(weights)

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        credited = self.inner.credit(groups, terms)
        factors = np.array([self.weights.get(group.task.source, 1.0) for group in groups])
        episodes = np.array([len(group.valid_episodes) for group in groups], dtype=np.float64)
        if not len(credited):
            return credited
        mean = float((factors * episodes).sum() / episodes.sum())
        return dataclasses.replace(credited, weight=credited.weight * factors[credited.tree] / mean)


class DemonstrationAlgorithm(Algorithm):
    """Imitates demonstrations in addition to the run's algorithm: the loss is the algorithm's plus `weight` times
    theirs, each a mean over its own episodes. A batch of demonstrations alone has only their loss."""

    def __init__(self, inner: Algorithm, weight: float):
        self.inner, self.weight = inner, weight
        self.imitation = Recipe(AlgorithmConfig(name="sft"), given=True)
        self._only_demonstrations = False  # whether the last batch had no sampled episodes
        self._num_terms = self._num_sampled = 0  # terms of the last batch, and those of them that were sampled
        self._sampled_number_G = np.zeros(0, dtype=np.int64)
        """The number of each group of the last batch among the sampled groups."""

    @property
    def needs(self) -> AlgorithmNeeds:
        return AlgorithmNeeds() if self._only_demonstrations else self.inner.needs

    @property
    def whole(self) -> bool:
        return not self._only_demonstrations and self.inner.whole

    @property
    def trust_region(self) -> AlgorithmArgs | None:
        return None if self._only_demonstrations else self.inner.trust_region

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Demonstrations are spread among the others: a mini-batch is a part of the batch and should contain both."""
        demonstrations = self.imitation.keep([group for group in groups if _is_demonstration(group)])
        sampled = [group for group in groups if not _is_demonstration(group)]
        self._only_demonstrations = not sampled
        kept = self.inner.keep(sampled) if sampled else []
        count = len(demonstrations)
        places = np.linspace(0, len(kept), count, endpoint=False).astype(int).tolist() if count else []
        out: list[Group] = []
        for number, group in enumerate(kept or [None]):
            out += [one for one, place in zip(demonstrations, places, strict=True) if place == number]
            out += [group] if group is not None else []
        return out

    def drop_reasons(self) -> DropReasons:
        sampled = {} if self._only_demonstrations else self.inner.drop_reasons()
        return sampled | self.imitation.drop_reasons()

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        columns = {name: getattr(terms, name).copy() for name in CREDITED}
        demonstration_G = np.array([_is_demonstration(group) for group in groups], dtype=bool)
        self._sampled_number_G = np.cumsum(~demonstration_G) - 1
        self._num_terms, self._num_sampled = len(terms), int((terms.version != NOT_SAMPLED).sum())
        credit_part(self.inner, groups, terms, np.flatnonzero(~demonstration_G), columns)
        rows = credit_part(self.imitation, groups, terms, np.flatnonzero(demonstration_G), columns)
        columns["weight"][rows] *= self._factor
        return dataclasses.replace(terms, **columns)

    @property
    def _factor(self) -> float:
        return 1.0 if self._only_demonstrations else self.weight

    def count(self, terms: Terms) -> float:
        sampled = terms.version != NOT_SAMPLED
        return self.inner.count(terms.pick(sampled)) if sampled.any() else self.imitation.count(terms)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        out_M = now_M.new_zeros(len(now_M), 2)
        rows = (terms.version_M != NOT_SAMPLED).nonzero()[:, 0]
        if len(rows):
            out_M[rows] = self.inner.prepare(now_M[rows], self._pick(terms, rows))
        return out_M

    def _pick(self, terms: TermBatch, rows: Tensor) -> TermBatch:
        """These terms, with groups numbered among the sampled groups."""
        number_G = torch.from_numpy(self._sampled_number_G).to(rows.device)
        picked = pick_rows(terms, rows)
        return dataclasses.replace(picked, group_M=number_G[picked.group_M])

    def loss(self, outputs: ModelOutputs, terms: TermBatch) -> LossParts:
        loss_M, logged = torch.zeros_like(outputs.logprob_M), dict[str, Tensor]()
        demonstration_M = terms.version_M == NOT_SAMPLED
        for part, chosen_M in ((self.inner, ~demonstration_M), (self.imitation, demonstration_M)):
            rows = chosen_M.nonzero()[:, 0]
            if not len(rows):
                continue
            picked = self._pick(terms, rows)
            part_M, vectors = part.loss(pick_rows(outputs, rows), picked)
            loss_M = loss_M.index_put((rows,), part_M)
            scale = self._num_terms / max(self._num_sampled, 1)
            if part is self.imitation:
                vectors = {"sft/loss": (part_M * picked.weight_M).detach() / self._factor}
                scale = float(self._num_terms)
            logged |= {key: spread(vector * scale, rows, len(loss_M)) for key, vector in vectors.items()}
        return loss_M, logged

    def metrics(self) -> Metrics:
        return self.imitation.metrics() if self._only_demonstrations else self.inner.metrics()

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state)


def credit_part(part: Algorithm, groups: Sequence[Group], terms: Terms, numbers: Ints, columns: dict[str, Any]) -> Ints:
    """Credit the groups with these numbers by `part` and write the results into `columns`; returns their rows."""
    rows = np.flatnonzero(np.isin(terms.tree, numbers))
    if len(rows):
        credited = part.credit([groups[int(n)] for n in numbers], renumbered(terms.pick(rows), numbers, groups))
        for name, values in columns.items():
            values[rows] = getattr(credited, name)
    return rows


def renumbered(terms: Terms, numbers: Ints, groups: Sequence[Group]) -> Terms:
    """The terms of the groups with these numbers, numbered as if there were no other groups."""
    episodes = np.array([len(group.valid_episodes) for group in groups])
    calls = np.array([sum(len(episode.calls) for episode in group.valid_episodes) for group in groups])
    return dataclasses.replace(
        terms,
        tree=np.searchsorted(numbers, terms.tree),
        episode=terms.episode - _others_before(episodes, numbers)[terms.tree],
        call=terms.call - _others_before(calls, numbers)[terms.tree],
    )


def _others_before(sizes: Ints, numbers: Ints) -> Ints:
    """How many items of other groups come before each group's own."""
    others = sizes.copy()
    others[numbers] = 0
    return np.concatenate([[0], np.cumsum(others)])[:-1].astype(np.int64)


def spread(vector: Tensor, rows: Tensor, size: int) -> Tensor:
    """A vector of `size` with the values at `rows`, 0 elsewhere."""
    return torch.zeros(size, dtype=vector.dtype, device=vector.device).index_put((rows,), vector)


def _is_demonstration(group: Group) -> bool:
    return any(episode.is_offline for episode in group.episodes)
