"""Every loss behind one signature: what the models say and the terms in, one loss a term out.

Thin: each picks the columns and settings that the pure function (`token_losses.py`, `preference_losses.py`) wants. A
loss that looks at whole sequences has a second half in `PREPARES`, which runs first, without gradient, on whole groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arborl.algorithms import preference_losses, token_losses
from arborl.algorithms.token_losses import LossParts, Said, TermBatch
from arborl.config.algorithm import AlgorithmConfig

Loss = Callable[[Said, TermBatch, AlgorithmConfig], LossParts]
Prepare = Callable[[Tensor, TermBatch, AlgorithmConfig], Tensor]


def known(column: Tensor | None, name: str) -> Tensor:
    """A column that the loss cannot do without."""
    if column is None:
        raise ValueError(f"the loss reads the column `{name}`, which is not filled; `Algorithm.needs` asks for it")
    return column


def anchor(terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """Log-probabilities that ratios are taken against."""
    return known(terms.proximal_M, "proximal") if config.against == "proximal" else terms.old_M


def _ppo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    clips = (config.clip_low, config.clip_high, config.dual_clip)
    return token_losses.ppo_clip(said.logprob_M, anchor(terms, config), terms.advantage_M, *clips)


def _gspo(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    gap_M = known(terms.sequence_M, "sequence")
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
    """The derivative that `prepare` found, times the log-probability: exact in gradient, meaningless in value."""
    pull_M = known(terms.sequence_M, "sequence")
    gain_M = said.logprob_M.detach() - known(terms.reference_M, "reference")
    return pull_M * said.logprob_M, {"policy/pull": pull_M.abs(), "policy/gain": gain_M}


def _dpo_pulled(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    """An episode in one pair only is pulled by beta times the chance of the wrong order, which tells the loss."""
    loss_M, seen = _pulled(said, terms, config)
    if config.pairs == "best_worst":
        wrong_M = (seen["policy/pull"] / config.beta).clamp(max=1 - 1e-7)
        seen["policy/pair_loss"] = -torch.log1p(-wrong_M)
    return loss_M, seen


def _sft(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.likelihood(said.logprob_M)


def _distill(said: Said, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
    return token_losses.distillation(said.logprob_M, terms.old_M, known(terms.reference_M, "reference"))


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
    "dpo": _dpo_pulled,
    "ipo": _pulled,
    "kto": _pulled,
    "sft": _sft,
    "distill": _distill,
}
"""Name to loss; the settings each reads are in `arborl.config.presets`."""


# ------------------------------------------------------------------------------------------------ whole sequences


def _sequence_gap(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    of = terms.call_M if config.sequence == "call" else terms.episode_M
    return token_losses.sequence_mean(now_M - anchor(terms, config), of)


def per_episode(
    rule: Callable[[Tensor, Tensor, Tensor, Tensor, AlgorithmConfig], Tensor],
) -> Prepare:
    """A number an episode, from its gain over the reference, length, score and group; in float64."""

    def prepare(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
        reference_M = known(terms.reference_M, "reference")
        _, index_M, length_E = torch.unique(terms.episode_M, return_inverse=True, return_counts=True)
        size = len(length_E)
        gain_E = torch.zeros(size, dtype=torch.float64, device=now_M.device)
        gain_E = gain_E.index_add(0, index_M, (now_M - reference_M).double())
        score_E, group_E = torch.zeros_like(gain_E), torch.zeros(size, dtype=torch.int64, device=now_M.device)
        score_E[index_M], group_E[index_M] = terms.advantage_M.double(), terms.group_M  # the same for all its terms
        return rule(gain_E, length_E.double(), score_E, group_E, config)[index_M].to(now_M.dtype)

    return prepare


def _dpo(gain_E: Tensor, length_E: Tensor, score_E: Tensor, group_E: Tensor, config: AlgorithmConfig) -> Tensor:
    return preference_losses.dpo(gain_E, preference_losses.pairs(score_E, group_E, config.min_gap), config.beta)


def _ipo(gain_E: Tensor, length_E: Tensor, score_E: Tensor, group_E: Tensor, config: AlgorithmConfig) -> Tensor:
    return preference_losses.ipo(
        gain_E, length_E, preference_losses.pairs(score_E, group_E, config.min_gap), config.beta
    )


def _kto(gain_E: Tensor, length_E: Tensor, score_E: Tensor, group_E: Tensor, config: AlgorithmConfig) -> Tensor:
    return preference_losses.kto(gain_E, score_E > 0, group_E, config.beta)


PREPARES: dict[str, Prepare] = {
    "gspo": _sequence_gap,
    "dpo": per_episode(_dpo),
    "ipo": per_episode(_ipo),
    "kto": per_episode(_kto),
}
"""The first half of the losses that look at whole sequences."""
