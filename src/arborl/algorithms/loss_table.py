"""The table of losses, and the normalization of the loss.

Each entry passes columns and settings to a function of `token_losses.py` or `preference_losses.py`. A loss over whole
sequences has a first part in `PREPARES`, which runs on whole groups without gradient. The loss of a step is the
weighted sum over terms; the weights (`WEIGHTS`) contain all normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms import preference_losses, token_losses
from arborl.algorithms.statistics import shares
from arborl.algorithms.token_losses import LossParts, ModelOutputs, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.types import Floats, Ints, Terms

Loss = Callable[[ModelOutputs, TermBatch, AlgorithmConfig], LossParts]
Prepare = Callable[[Tensor, TermBatch, AlgorithmConfig], Tensor]


def known(column: Tensor | None, name: str) -> Tensor:
    """A column that the loss requires."""
    if column is None:
        raise ValueError(f"the loss needs the column `{name}`, which is not filled; declare it in `Algorithm.needs`")
    return column


def anchor(terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """The log-probabilities in the denominator of the ratio."""
    return known(terms.proximal_M, "proximal") if config.ratio_policy == "proximal" else terms.old_M


def _ppo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    clips = (config.clip_low, config.clip_high, config.options.dual_clip)
    return token_losses.ppo_clip(outputs.logprob_M, anchor(terms, config), terms.advantage_M, *clips)


def _gspo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    gap_M = known(terms.sequence_M, "sequence")[:, 0]
    return token_losses.gspo(outputs.logprob_M, gap_M, terms.advantage_M, config.clip_low, config.clip_high)


def _cispo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.cispo(outputs.logprob_M, anchor(terms, config), terms.advantage_M, config.clip_high)


def _sapo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    taus = (config.options.tau_positive, config.options.tau_negative)
    return token_losses.sapo(outputs.logprob_M, anchor(terms, config), terms.advantage_M, *taus)


def _topr(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.topr(outputs.logprob_M, anchor(terms, config), terms.advantage_M)


def _policy_gradient(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.policy_gradient(outputs.logprob_M, terms.advantage_M)


def _decoupled_ppo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    policies = (outputs.logprob_M, known(terms.proximal_M, "proximal"), terms.old_M)
    clips = (config.clip_low, config.clip_high, config.options.behaviour_cap)
    return token_losses.decoupled_ppo(*policies, terms.advantage_M, *clips)


def _trpo(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.surrogate(outputs.logprob_M, anchor(terms, config), terms.advantage_M)


def _pulled(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    """In gradient the derivative that `prepare` found, times the log-probability; in value the token's part of the loss
    that it found."""
    pull_M, part_M = known(terms.sequence_M, "sequence").unbind(1)
    gain_M = outputs.logprob_M.detach() - known(terms.reference_M, "reference")
    moved_M = outputs.logprob_M - outputs.logprob_M.detach()
    return part_M + pull_M * moved_M, {"policy/pull": pull_M.abs(), "policy/gain": gain_M}


def _sft(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.likelihood(outputs.logprob_M)


def _distill(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.distillation(outputs.logprob_M, terms.old_M, known(terms.teacher_M, "teacher"))


LOSSES: dict[str, Loss] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "topr": _topr,
    "a2c": _policy_gradient,
    "pg": _policy_gradient,
    "decoupled_ppo": _decoupled_ppo,
    "trpo": _trpo,
    "dpo": _pulled,
    "ipo": _pulled,
    "kto": _pulled,
    "sft": _sft,
    "distill": _distill,
}
"""Name to loss; the settings each reads are in `arborl.config.algorithm_config`."""


# ------------------------------------------------------------------------------------------------ whole sequences


def _sequence_gap(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    of = terms.call_M if config.options.sequence == "call" else terms.episode_M
    gap_M = token_losses.sequence_mean(now_M - anchor(terms, config), of)
    return torch.stack([gap_M, torch.zeros_like(gap_M)], 1)


@dataclass(frozen=True, slots=True)
class EpisodeSums:
    """Per-episode inputs of preference losses, in float64."""

    gain_E: Tensor
    """Log-ratio to the reference model, summed over tokens."""
    length_E: Tensor
    score_E: Tensor
    group_E: Tensor
    kl_E: Tensor | None
    """The KL that `credit` computed (`Terms.target`); None if it computed none."""


def per_episode(rule: Callable[[EpisodeSums, AlgorithmConfig], preference_losses.EpisodeLosses]) -> Prepare:
    """From a loss over whole episodes: for each term its episode's derivative, and its own part of the loss."""

    def prepare(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
        gain_M = now_M - known(terms.reference_M, "reference")
        _, index_M, length_E = torch.unique(terms.episode_M, return_inverse=True, return_counts=True)
        gain_E = torch.zeros(len(length_E), dtype=torch.float64, device=now_M.device)
        gain_E = gain_E.index_add(0, index_M, gain_M.double())

        def one_each(column_M: Tensor) -> Tensor:
            return torch.zeros_like(length_E, dtype=column_M.dtype).index_put((index_M,), column_M)

        kl_E = None if terms.target_M is None else one_each(terms.target_M.double())
        sums = EpisodeSums(
            gain_E, length_E.double(), one_each(terms.advantage_M.double()), one_each(terms.group_M), kl_E
        )
        pull_E, loss_E = rule(sums, config)
        return torch.stack([pull_E, loss_E / sums.length_E], 1)[index_M].to(now_M.dtype)

    return prepare


def _dpo(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.EpisodeLosses:
    pair_EE = preference_losses.pairs(sums.score_E, sums.group_E, config.options.min_gap)
    return preference_losses.dpo(sums.gain_E, pair_EE, config.options.beta)


def _ipo(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.EpisodeLosses:
    pair_EE = preference_losses.pairs(sums.score_E, sums.group_E, config.options.min_gap)
    return preference_losses.ipo(sums.gain_E, sums.length_E, pair_EE, config.options.beta)


def _kto(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.EpisodeLosses:
    kl_E = preference_losses.group_kl(sums.gain_E, sums.group_E)
    if sums.kl_E is not None:
        kl_E = torch.where(sums.kl_E.isnan(), kl_E, sums.kl_E)
    return preference_losses.kto(sums.gain_E, sums.score_E > 0, kl_E, config.options.beta)


PREPARES: dict[str, Prepare] = {
    "gspo": _sequence_gap,
    "dpo": per_episode(_dpo),
    "ipo": per_episode(_ipo),
    "kto": per_episode(_kto),
}
"""The first part of losses over whole sequences."""


def by_token(episode: Ints) -> Floats:
    """Every token has the same weight (DAPO, BNPO).

    >>> by_token(np.array([0, 0, 1, 1])).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return np.full(len(episode), 1.0 / max(len(episode), 1))


def by_episode(episode: Ints) -> Floats:
    """Every episode has the same weight, divided equally among its tokens, however many branches it has (GRPO).

    >>> by_episode(np.array([0, 0, 1])).tolist()
    [0.25, 0.25, 0.5]
    """
    return shares(episode) / len(np.unique(episode)) if len(episode) else np.zeros(0)


def by_length(episode: Ints, length: int) -> Floats:
    """Every token has the weight of one in an episode of this length, whatever the length of its own (Dr. GRPO).

    >>> by_length(np.array([0, 0, 1]), 10).tolist()
    [0.05, 0.05, 0.05]
    """
    return np.full(len(episode), 1.0 / max(len(np.unique(episode)) * length, 1))


def reweighted(weight: Floats, factor: Floats) -> Floats:
    """The weights times a factor each, with the same sum: a row of weight 2 counts as two of weight 1.

    >>> reweighted(np.array([0.5, 0.5]), np.array([1.0, 3.0])).tolist()
    [0.25, 0.75]
    """
    total = float((weight * factor).sum())
    return weight if not total or (factor == 1).all() else weight * factor * (weight.sum() / total)


WEIGHTS: dict[str, Callable[[Terms, int], Floats]] = {
    "token": lambda terms, length: by_token(terms.episode),
    "episode": lambda terms, length: by_episode(terms.episode),
    "call": lambda terms, length: by_episode(terms.call),
    "fixed": lambda terms, length: by_length(terms.episode, length),
}

COUNTS: dict[str, Callable[[Terms], float]] = {
    "token": lambda terms: float(len(terms)),
    "episode": lambda terms: float(len(np.unique(terms.episode))),
    "call": lambda terms: float(len(np.unique(terms.call))),
    "fixed": lambda terms: float(len(np.unique(terms.episode))),
}
"""The number of units over which each aggregation is a mean."""
