"""Sources that count more, or less, than their episodes do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import TrustRegionConfig
from arborl.types import Group, Metrics, Terms


class SourceWeights(Algorithm):
    """An algorithm whose loss weighs the terms of each source by a factor; over all episodes its mean is 1."""

    def __init__(self, inner: Algorithm, weights: Mapping[str, float]):
        self.inner, self.weights = inner, dict(weights)

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    @property
    def whole(self) -> bool:
        return self.inner.whole

    @property
    def trust_region(self) -> TrustRegionConfig | None:
        return self.inner.trust_region

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        return self.inner.keep(groups)

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        found = self.inner.credit(groups, terms)
        factors = np.array([self.weights.get(group.task.source, 1.0) for group in groups])
        episodes = np.array([len(group.valid_episodes) for group in groups], dtype=np.float64)
        if not len(found):
            return found
        mean = float((factors * episodes).sum() / episodes.sum())
        return dataclasses.replace(found, weight=found.weight * factors[found.tree] / mean)

    def count(self, terms: Terms) -> float:
        return self.inner.count(terms)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        return self.inner.prepare(now_M, terms)

    def loss(self, said: Said, terms: TermBatch) -> LossParts:
        return self.inner.loss(said, terms)

    def metrics(self) -> Metrics:
        return self.inner.metrics()

    def state(self) -> dict[str, Any]:
        return self.inner.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state)
