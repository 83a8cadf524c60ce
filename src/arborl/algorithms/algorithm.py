"""An algorithm: which groups to learn from, what each sampled token is credited with, and the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from arborl.algorithms.advantages import grpo, is_flat
from arborl.algorithms.kl import KL
from arborl.algorithms.losses import LossParts, TermBatch, ppo_clip
from arborl.config.run import AlgorithmConfig
from arborl.types import Floats, Group, Ints, Terms


class Algorithm(Protocol):
    """What a trainer and a learner need to know of an algorithm. It knows no model."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the policy as it was at the start."""
        ...

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that can teach something."""
        ...

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        """The same terms with their advantage and their share of the loss. `groups` are those the terms came from."""
        ...

    def loss(self, new_M: Tensor, terms: TermBatch) -> LossParts:
        """The loss of every term."""
        ...


class Grpo(Algorithm):
    """Group-relative policy optimisation: an episode is compared with the other attempts at its task."""

    def __init__(self, config: AlgorithmConfig):
        self.config = config

    @property
    def needs_reference(self) -> bool:
        return self.config.kl.coef > 0

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        kept = [group for group in groups if any(episode.calls for episode in group.survivors)]
        if self.config.skip_zero_variance and self.config.baseline == "mean":
            kept = [group for group in kept if not is_flat(_rewards(group))]
        return kept

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        per_group = grpo([_rewards(group) for group in groups], self.config.baseline, self.config.std)
        per_episode = np.concatenate([np.zeros(0), *per_group])
        return dataclasses.replace(
            terms,
            advantage=per_episode[terms.episode],
            weight=WEIGHTS[self.config.aggregation](terms.episode),
        )

    def loss(self, new_M: Tensor, terms: TermBatch) -> LossParts:
        loss_M, seen = ppo_clip(new_M, terms, self.config.clip_low, self.config.clip_high)
        if terms.reference_M is not None:
            kl_M = KL[self.config.kl.estimator](new_M, terms.reference_M)
            loss_M = loss_M + self.config.kl.coef * kl_M
            seen["policy/kl"] = kl_M.detach()
        return loss_M, seen


def _rewards(group: Group) -> Floats:
    return np.array([episode.reward for episode in group.survivors])


def by_token(episode: Ints) -> Floats:
    """Every token has the same share."""
    return np.full(len(episode), 1.0 / max(len(episode), 1))


def by_episode(episode: Ints) -> Floats:
    """Every episode has the same share, which its tokens divide equally; its number of branches does not matter."""
    _, index, counts = np.unique(episode, return_inverse=True, return_counts=True)
    return 1.0 / (len(counts) * counts[index]) if len(episode) else np.zeros(0)


WEIGHTS: dict[str, Callable[[Ints], Floats]] = {"token": by_token, "episode": by_episode}

ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": Grpo}
