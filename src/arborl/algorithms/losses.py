"""Every loss behind one signature: what the models say and the terms in, one loss a term out.

Thin: each picks the columns and settings that the pure function (`token_losses.py`, `preference_losses.py`) wants. A
loss that looks at whole sequences has a second half in `PREPARES`, which runs first, without gradient, on whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arborl.algorithms import preference_losses, token_losses
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm_config import AlgorithmConfig

Loss = Callable[[Said, TermBatch, AlgorithmConfig], LossParts]
Prepare = Callable[[Tensor, TermBatch, AlgorithmConfig], Tensor]


def known(column: Tensor | None, name: str) -> Tensor:
    """A column that the loss cannot do without."""
    if column is None:
        raise ValueError(f"the loss reads the column `{name}`, which is not filled; `Algorithm.needs` asks for it")
    return column


def anchor(terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """Log-probabilities that ratios are taken against."""
    return known(terms.proximal_M, "proximal") if config.ratio_policy == "proximal" else terms.old_M


def _ppo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    clips = (config.clip_low, config.clip_high, config.dual_clip)
    return token_losses.ppo_clip(said.logprob_M, anchor(terms, config), terms.advantage_M, *clips)


def _gspo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    gap_M = known(terms.sequence_M, "sequence")[:, 0]
    return token_losses.gspo(said.logprob_M, gap_M, terms.advantage_M, config.clip_low, config.clip_high)


def _cispo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.cispo(said.logprob_M, anchor(terms, config), terms.advantage_M, config.clip_high)


def _sapo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    taus = (config.tau_positive, config.tau_negative)
    return token_losses.sapo(said.logprob_M, anchor(terms, config), terms.advantage_M, *taus)


def _topr(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.topr(said.logprob_M, anchor(terms, config), terms.advantage_M)


def _policy_gradient(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.policy_gradient(said.logprob_M, terms.advantage_M)


def _decoupled_ppo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    policies = (said.logprob_M, known(terms.proximal_M, "proximal"), terms.old_M)
    clips = (config.clip_low, config.clip_high, config.behaviour_cap)
    return token_losses.decoupled_ppo(*policies, terms.advantage_M, *clips)


def _trpo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.surrogate(said.logprob_M, anchor(terms, config), terms.advantage_M)


def _pulled(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    """In gradient the derivative that `prepare` found, times the log-probability; in value the token's part of the loss
    that it found."""
    pull_M, part_M = known(terms.sequence_M, "sequence").unbind(1)
    gain_M = said.logprob_M.detach() - known(terms.reference_M, "reference")
    moved_M = said.logprob_M - said.logprob_M.detach()
    return part_M + pull_M * moved_M, {"policy/pull": pull_M.abs(), "policy/gain": gain_M}


def _sft(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.likelihood(said.logprob_M)


def _distill(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.distillation(said.logprob_M, terms.old_M, known(terms.teacher_M, "teacher"))


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
    of = terms.call_M if config.sequence == "call" else terms.episode_M
    gap_M = token_losses.sequence_mean(now_M - anchor(terms, config), of)
    return torch.stack([gap_M, torch.zeros_like(gap_M)], 1)


@dataclass(frozen=True, slots=True)
class EpisodeSums:
    """What a rule about whole episodes reads of each; in float64."""

    gain_E: Tensor
    """Over the reference."""
    length_E: Tensor
    score_E: Tensor
    group_E: Tensor
    level_E: Tensor | None
    """What credit wants of it besides (`Terms.target`); None where it wants nothing."""


def per_episode(rule: Callable[[EpisodeSums, AlgorithmConfig], preference_losses.Pulls]) -> Prepare:
    """From a rule about whole episodes, for each term its episode's derivative and its own part of the loss."""

    def prepare(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
        gain_M = now_M - known(terms.reference_M, "reference")
        _, index_M, length_E = torch.unique(terms.episode_M, return_inverse=True, return_counts=True)
        gain_E = torch.zeros(len(length_E), dtype=torch.float64, device=now_M.device)
        gain_E = gain_E.index_add(0, index_M, gain_M.double())

        def one_each(column_M: Tensor) -> Tensor:
            return torch.zeros_like(length_E, dtype=column_M.dtype).index_put((index_M,), column_M)

        level_E = None if terms.target_M is None else one_each(terms.target_M.double())
        sums = EpisodeSums(
            gain_E, length_E.double(), one_each(terms.advantage_M.double()), one_each(terms.group_M), level_E
        )
        pull_E, loss_E = rule(sums, config)
        return torch.stack([pull_E, loss_E / sums.length_E], 1)[index_M].to(now_M.dtype)

    return prepare


def _dpo(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.Pulls:
    found_EE = preference_losses.pairs(sums.score_E, sums.group_E, config.min_gap)
    return preference_losses.dpo(sums.gain_E, found_EE, config.beta)


def _ipo(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.Pulls:
    found_EE = preference_losses.pairs(sums.score_E, sums.group_E, config.min_gap)
    return preference_losses.ipo(sums.gain_E, sums.length_E, found_EE, config.beta)


def _kto(sums: EpisodeSums, config: AlgorithmConfig) -> preference_losses.Pulls:
    level_E = preference_losses.group_level(sums.gain_E, sums.group_E)
    if sums.level_E is not None:
        level_E = torch.where(sums.level_E.isnan(), level_E, sums.level_E)
    return preference_losses.kto(sums.gain_E, sums.score_E > 0, level_E, config.beta)


PREPARES: dict[str, Prepare] = {
    "gspo": _sequence_gap,
    "dpo": per_episode(_dpo),
    "ipo": per_episode(_ipo),
    "kto": per_episode(_kto),
}
"""The first half of the losses that look at whole sequences."""
