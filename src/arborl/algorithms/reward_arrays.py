"""The rewards of a batch as arrays from which advantages are computed.

Rewards exist at three levels: by name per episode, per turn from the environment, and per token as a KL penalty.
`RewardArrays` adds them up once for all advantages.

G groups, E episodes (survivors of all groups, in order), N turns of all episodes, M terms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from arborl.algorithms.importance_weights import overlong_penalty
from arborl.algorithms.token_losses import KL
from arborl.config.algorithm_config import KLConfig, OverlongConfig
from arborl.types import Episode, FinishReason, Floats, Group, Ints, StopReason, Terms

OUT_OF_ROOM = (StopReason.CONTEXT_FULL, StopReason.MAX_TURNS)
TRUNCATED_STOPS = (*OUT_OF_ROOM, StopReason.TRUNCATED)
"""Stop reasons that are limits: the episode would have continued. (An episode past its deadline has failed.)"""


def is_overlong(episode: Episode) -> bool:
    """Whether a limit of length ended the episode."""
    return episode.stop in OUT_OF_ROOM or bool(
        episode.calls and episode.calls[-1].completion.finish is FinishReason.LENGTH
    )


def cut_rows(groups: Sequence[Group], terms: Terms) -> Ints:
    cut = np.array(
        [episode.stop in TRUNCATED_STOPS for group in groups for episode in group.valid_episodes], dtype=bool
    )
    episodes, ahead = np.unique(terms.episode[::-1], return_index=True)
    return np.asarray(len(terms) - 1 - ahead[cut[episodes]], dtype=np.int64)


def with_overlong_penalty(group: Group, overlong: OverlongConfig) -> Group:
    """The group with the penalty for length as a reward named `overlong`; the given episodes are not changed."""
    if not overlong.penalty:
        return group

    def with_penalty(episode: Episode) -> Episode:
        penalty = overlong_penalty(episode.sampled, overlong.max_tokens, overlong.buffer, overlong.penalty)
        return dataclasses.replace(episode, rewards=episode.rewards | {"overlong": penalty})

    return dataclasses.replace(group, episodes=[with_penalty(e) if e.failure is None else e for e in group.episodes])


def turn_rewards(episode: Episode) -> Floats:
    """The environment's reward of each turn, times the weight of `env`; other rewards belong to the last turn."""
    turns = max([len(episode.turns), *(call.turn + 1 for call in episode.calls)], default=0)
    out = np.zeros(max(turns, 1))
    if episode.turn_weight:
        out[: len(episode.turns)] = [episode.turn_weight * turn.reward for turn in episode.turns]
    out[-1] += episode.reward - out.sum()
    return out


def kl_costs(terms: Terms, kl: KLConfig, coef: float) -> Floats:
    """The KL penalty of each term if it is part of the reward, else 0."""
    if kl.where != "reward" or coef == 0 or not len(terms):
        return np.zeros(len(terms))
    policy, reference = torch.from_numpy(terms.proximal), torch.from_numpy(terms.reference)
    return np.asarray(coef * KL[kl.estimator](policy, reference).numpy(), dtype=np.float64)


class RewardArrays:
    """The rewards of a batch at every level, minus the KL penalty `cost_M` of each term (`kl_costs`)."""

    def __init__(self, groups: Sequence[Group], terms: Terms, cost_M: Floats):
        self.groups, self.terms, self.cost_M = groups, terms, cost_M
        self.episodes = [episode for group in groups for episode in group.valid_episodes]
        self.sizes = [len(group.valid_episodes) for group in groups]
        self.group_E: Ints = np.repeat(np.arange(len(groups)), self.sizes)
        self.cost_E: Floats = np.bincount(terms.episode, cost_M, minlength=len(self.episodes)).astype(np.float64)
        self.reward_E = np.array([episode.reward for episode in self.episodes], dtype=np.float64) - self.cost_E
        self.length_E = np.array([episode.sampled for episode in self.episodes], dtype=np.float64)  # sampled tokens

    def by_group(self, value_E: Floats) -> list[Floats]:
        return np.split(value_E, np.cumsum(self.sizes)[:-1]) if self.sizes else []

    def named(self) -> dict[str, list[Floats]]:
        """Each reward by name, group by group; 0 for an episode without it. The KL penalty is named `kl`."""
        names = dict.fromkeys(name for episode in self.episodes for name in episode.rewards) or ("none",)
        columns = {name: np.array([e.rewards.get(name, 0.0) for e in self.episodes]) for name in names}
        if self.cost_M.any():
            columns["kl"] = -self.cost_E
        return {name: self.by_group(column) for name, column in columns.items()}

    @cached_property
    def turns(self) -> list[Floats]:
        found = [turn_rewards(episode) for episode in self.episodes]
        for episode, rows in self.rows.items():
            np.subtract.at(found[episode], self.terms.turn[rows], self.cost_M[rows])
        return found

    @property
    def episode_N(self) -> Ints:
        return np.repeat(np.arange(len(self.turns)), [len(turns) for turns in self.turns])

    @property
    def state_N(self) -> list[str]:
        """Key of the state before each turn; empty if there is none."""
        keys = [[turn.state_key for turn in episode.turns] for episode in self.episodes]
        return [
            own[t] if t < len(own) else ""
            for own, turns in zip(keys, self.turns, strict=True)
            for t in range(len(turns))
        ]

    def per_term(self, value_N: Floats) -> Floats:
        sizes = [len(turns) for turns in self.turns]
        first_E = np.cumsum(sizes) - sizes
        return value_N[first_E[self.terms.episode] + self.terms.turn] if len(self.terms) else np.zeros(0)

    @property
    def reward_M(self) -> Floats:
        """The reward of each term: a turn's reward is at the last term up to the end of that turn."""
        out = -self.cost_M
        for episode, rows in self.rows.items():
            for t, reward in enumerate(turn_rewards(self.episodes[episode])):
                so_far = np.flatnonzero(self.terms.turn[rows] <= t)
                out[rows[so_far[-1] if len(so_far) else 0]] += reward
        return out

    @cached_property
    def rows(self) -> dict[int, Ints]:
        """Terms of each episode that has any, in order."""
        numbers, begins = np.unique(self.terms.episode, return_index=True)
        ends = np.append(begins, len(self.terms))[1:]
        return {int(e): np.arange(a, b) for e, a, b in zip(numbers, begins, ends, strict=True)}
