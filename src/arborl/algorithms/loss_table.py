"""The table of losses, and the normalization of the loss.

Each entry names the columns and settings that a function of `token_losses.py` takes. A loss over whole sequences has a
first part in `PREPARES`, which runs on whole groups without gradient. The loss of a step is the weighted sum over
terms; the weights (`WEIGHTS`) contain all normalization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    if column is None:
        raise ValueError(f"the loss needs the column `{name}`, which is not filled; declare it in `Algorithm.needs`")
    return column


def anchor(terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """The log-probabilities in the denominator of the ratio."""
    return known(terms.proximal_M, "proximal") if config.ratio_policy == "proximal" else terms.old_M


def loss_inputs(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> dict[str, Callable[[], Tensor]]:
    """The columns that losses read, by name."""
    return {
        "new": lambda: outputs.logprob_M,
        "old": lambda: anchor(terms, config),
        "sampled": lambda: terms.old_M,
        "proximal": lambda: known(terms.proximal_M, "proximal"),
        "reference": lambda: known(terms.reference_M, "reference"),
        "teacher": lambda: known(terms.teacher_M, "teacher"),
        "sequence": lambda: known(terms.sequence_M, "sequence"),
        "gap": lambda: known(terms.sequence_M, "sequence")[:, 0],
        "advantage": lambda: terms.advantage_M,
        "entropy": lambda: outputs.entropy_M,
        "episode": lambda: terms.episode_M,
        "call": lambda: terms.call_M,
        "turn": lambda: terms.turn_M,
        "group": lambda: terms.group_M,
        "version": lambda: terms.version_M,
    }


def _loss(
    function: Callable[..., LossParts],
    inputs: str,
    settings: Callable[[AlgorithmConfig], tuple[float | None, ...]] = lambda config: (),
) -> Loss:
    def run(outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
        columns = loss_inputs(outputs, terms, config)
        values: list[Any] = [columns[name]() for name in inputs.split()]
        return function(*values, *settings(config))

    return run


def _pulled(new_M: Tensor, reference_M: Tensor, sequence_M: Tensor) -> LossParts:
    """In gradient the derivative that `prepare` found, times the log-probability; in value the token's part of the loss
    that it found."""
    pull_M, part_M = sequence_M.unbind(1)
    moved_M = new_M - new_M.detach()
    return part_M + pull_M * moved_M, {"policy/pull": pull_M.abs(), "policy/gain": new_M.detach() - reference_M}


_policy_gradient = _loss(token_losses.policy_gradient, "new advantage")
_preference = _loss(_pulled, "new reference sequence")
LOSSES: dict[str, Loss] = {
    "ppo": _loss(token_losses.ppo_clip, "new old advantage", lambda c: (c.clip_low, c.clip_high, c.options.dual_clip)),
    "gspo": _loss(token_losses.gspo, "new gap advantage", lambda c: (c.clip_low, c.clip_high)),
    "gmpo": _loss(token_losses.gmpo, "new old gap advantage", lambda c: (c.clip_low, c.clip_high)),
    "cispo": _loss(token_losses.cispo, "new old advantage", lambda c: (c.clip_high,)),
    "sapo": _loss(token_losses.sapo, "new old advantage", lambda c: (c.options.tau_positive, c.options.tau_negative)),
    "topr": _loss(token_losses.topr, "new old advantage"),
    "a2c": _policy_gradient,
    "pg": _policy_gradient,
    "decoupled_ppo": _loss(
        token_losses.decoupled_ppo,
        "new proximal sampled advantage",
        lambda c: (c.clip_low, c.clip_high, c.options.behaviour_cap),
    ),
    "trpo": _loss(token_losses.surrogate, "new old advantage"),
    "dpo": _preference,
    "ipo": _preference,
    "kto": _preference,
    "sft": _loss(token_losses.likelihood, "new"),
    "distill": _loss(token_losses.distillation, "new sampled teacher"),
}  # name to loss; the settings each reads are in `arborl.config.algorithm_config`


def _sequence_gap(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """The mean log-ratio of a term's sequence; of GMPO the mean of the clipped ones."""
    of, old_M = terms.call_M if config.options.sequence == "call" else terms.episode_M, anchor(terms, config)
    if config.loss == "gmpo":
        gap_M = token_losses.gmpo_log_ratio(now_M, old_M, terms.advantage_M, config.clip_low, config.clip_high)
    else:
        gap_M = now_M - old_M
    mean_M = token_losses.sequence_mean(gap_M, of)
    return torch.stack([mean_M, torch.zeros_like(mean_M)], 1)


def _episode_losses(now_M: Tensor, terms: TermBatch, config: AlgorithmConfig) -> Tensor:
    """For each term the derivative of its episode's preference loss, and its own part of that loss; in float64."""
    gain_M = now_M - known(terms.reference_M, "reference")
    _, index_M, length_E = torch.unique(terms.episode_M, return_inverse=True, return_counts=True)
    gain_E = torch.zeros(len(length_E), dtype=torch.float64, device=now_M.device)
    gain_E = gain_E.index_add(0, index_M, gain_M.double())

    def one_each(column_M: Tensor) -> Tensor:
        return torch.zeros_like(length_E, dtype=column_M.dtype).index_put((index_M,), column_M)

    length_E, score_E, group_E = length_E.double(), one_each(terms.advantage_M.double()), one_each(terms.group_M)
    if config.loss == "kto":
        kl_E = preference_losses.group_kl(gain_E, group_E)
        if terms.target_M is not None:  # the KL that `credit` computed
            computed_E = one_each(terms.target_M.double())
            kl_E = torch.where(computed_E.isnan(), kl_E, computed_E)
        pull_E, loss_E = preference_losses.kto(gain_E, score_E > 0, kl_E, config.options.beta)
    else:
        pair_EE = preference_losses.pairs(score_E, group_E, config.options.min_gap)
        if config.loss == "dpo":
            pull_E, loss_E = preference_losses.dpo(gain_E, pair_EE, config.options.beta)
        else:
            pull_E, loss_E = preference_losses.ipo(gain_E, length_E, pair_EE, config.options.beta)
    return torch.stack([pull_E, loss_E / length_E], 1)[index_M].to(now_M.dtype)


PREPARES: dict[str, Prepare] = {
    "gspo": _sequence_gap,
    "gmpo": _sequence_gap,
    "dpo": _episode_losses,
    "ipo": _episode_losses,
    "kto": _episode_losses,
}
"""The first part of losses over whole sequences."""


def by_token(episode: Ints) -> Floats:
    """Every token has the same weight (DAPO, BNPO)."""
    return np.full(len(episode), 1.0 / max(len(episode), 1))


def by_episode(episode: Ints) -> Floats:
    """Every episode has the same weight, divided equally among its tokens, however many branches it has (GRPO)."""
    return shares(episode) / len(np.unique(episode)) if len(episode) else np.zeros(0)


def by_length(episode: Ints, length: int) -> Floats:
    """Every token has the weight of one in an episode of this length, whatever the length of its own (Dr. GRPO)."""
    return np.full(len(episode), 1.0 / max(len(np.unique(episode)) * length, 1))


def reweighted(weight: Floats, factor: Floats) -> Floats:
    """The weights times a factor each, with the same sum: a row of weight 2 counts as two of weight 1."""
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
}  # the number of units over which each aggregation is a mean
