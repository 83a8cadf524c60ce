"""The interface of an algorithm, and `Recipe`: selection of groups, an advantage, and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.algorithms import preference_losses
from arborl.algorithms.advantages import ADVANTAGES, Memory
from arborl.algorithms.custom_functions import FindObject, check_advantage, check_loss, custom_parts
from arborl.algorithms.importance_weights import importance_weights, ratios, staleness
from arborl.algorithms.loss_table import COUNTS, LOSSES, PREPARES, WEIGHTS, known, reweighted
from arborl.algorithms.reward_arrays import kl_costs, with_overlong_penalty
from arborl.algorithms.selection import DropReasons, reasons, select
from arborl.algorithms.statistics import whitened, whitened_by_token
from arborl.algorithms.token_losses import KL, LossParts, ModelOutputs, TermBatch, adapt_kl_coef, value_loss
from arborl.config.algorithm_config import AlgorithmArgs, AlgorithmConfig, settings_read_by_loss
from arborl.registry import load
from arborl.types import Floats, Group, Metrics, Terms


@dataclass(frozen=True, slots=True)
class AlgorithmNeeds:
    """What an algorithm needs to know about each term in addition to what the rollout recorded."""

    proximal: bool = False  # log-probabilities under the weights at the start of the update, before `credit`
    anchor: bool = False  # the same, but only in the loss: the first step of the update computes them itself
    reference: bool = False  # log-probabilities under the frozen reference model
    teacher: bool = False  # log-probabilities under the teacher
    value: bool = False  # the critic's estimates, and their gradient in the loss
    entropy: bool = False  # the gradient of the entropy
    greedy: bool = False  # one extra episode per task at temperature 0; its reward is `Group.greedy`
    after: bool = False  # the critic's estimates after the last token of truncated episodes

    def __or__(self, other: AlgorithmNeeds) -> AlgorithmNeeds:
        return AlgorithmNeeds(*(getattr(self, name) or getattr(other, name) for name in self.__slots__))


class Algorithm(Protocol):
    """What a trainer and a learner use of an algorithm. It is independent of the model."""

    @property
    def needs(self) -> AlgorithmNeeds:
        """The columns that must be filled before `credit`."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the loss depends on whole sequences, so that `prepare` must be called."""
        ...

    @property
    def trust_region(self) -> AlgorithmArgs | None:
        """Settings of TRPO's step, which replaces the optimizer's; None for other algorithms."""
        ...

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that have a gradient, without unusable episodes."""
        ...

    def drop_reasons(self) -> DropReasons:
        """Why the last `keep` dropped episodes that did not fail; those that it does not name are `not_selected`."""
        return {}

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        """The terms with advantage, weight and value target. `groups` are those that the terms came from."""
        ...

    def count(self, terms: Terms) -> float:
        """The number of units (episodes, tokens, calls or pairs) over which the loss of these terms is a mean: it
        renormalizes the weights of `credit`, which are over the whole batch, for a mini-batch."""
        return float(len(np.unique(terms.episode)))

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        """Two numbers per term from the current log-probabilities of whole groups: GSPO's log-ratio; or a preference
        loss's derivative and the token's part of its value."""
        ...

    def loss(self, outputs: ModelOutputs, terms: TermBatch) -> LossParts: ...

    def metrics(self) -> Metrics:
        """Metrics of the last `keep` and `credit`: `dropped/<reason>`, the current KL coefficient, …"""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Recipe(Algorithm):
    """One advantage and one loss, built-in or custom, with the settings around them."""

    def __init__(self, config: AlgorithmConfig, find: FindObject = load, given: bool = False):
        self.config, self.given = config, given
        self.custom = custom_parts(config, find)  # the custom advantage and the custom loss
        self.memory: Memory = {}
        self.dropped: Metrics = {}
        self._drop_reasons: DropReasons = {}
        self.credit_metrics: Metrics = {}

    @property
    def needs(self) -> AlgorithmNeeds:
        config = self.config
        reads, (custom, custom_loss) = settings_read_by_loss(config.loss), self.custom
        credited = "advantage" in reads
        anchored = config.loss == "decoupled_ppo" or ("anchor" in reads and config.ratio_policy == "proximal")
        searched = config.loss == "trpo"  # its line search computes the loss again after weights have moved
        return AlgorithmNeeds(
            proximal=config.importance_weights.kind != "none"
            or config.has_kl_in_reward
            or (anchored and searched)
            or self._needs_mismatched,
            anchor=anchored and not searched,
            reference=config.kl.coef > 0
            or config.loss in ("dpo", "ipo", "kto")
            or (custom_loss is not None and "reference" in custom_loss.inputs),
            teacher=config.loss == "distill",
            value=credited and (config.advantage == "gae" or (custom is not None and "value" in custom.inputs)),
            entropy=config.entropy_coef > 0 or (custom_loss is not None and "entropy" in custom_loss.inputs),
            greedy=credited and config.advantage == "remax",
            after=credited and config.advantage == "gae" and config.options.bootstrap,
        )

    @property
    def whole(self) -> bool:
        return self.config.loss in PREPARES

    @property
    def trust_region(self) -> AlgorithmArgs | None:
        return self.config.options if self.config.loss == "trpo" else None

    def check(self) -> None:
        """Raise ConfigError if a custom advantage or loss fails its check."""
        advantage, loss = self.custom
        if advantage is not None:
            check_advantage(advantage, self.config)
        if loss is not None:
            check_loss(loss, self.config)

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        kept, dropped, self._drop_reasons = select(groups, self.config)
        self.dropped = drop_metrics(dropped, self.config)
        return kept

    def drop_reasons(self) -> DropReasons:
        return self._drop_reasons

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        config, self.credit_metrics = self.config, {}
        groups = [with_overlong_penalty(group, config.overlong) for group in groups]
        if "advantage" not in settings_read_by_loss(config.loss):
            return self._credit_without_advantage(groups, terms)
        rule = self.custom[0] or ADVANTAGES[config.advantage]
        advantage, target = rule(groups, terms, config, self.memory)
        if config.whiten == "token":
            advantage = whitened_by_token(advantage)
        elif config.whiten:
            advantage = whitened(advantage, terms.episode, centre=not config.compares_episodes)
        if config.advantage_clip is not None:
            self.credit_metrics["algorithm/advantage_clipped"] = float(
                (np.abs(advantage) > config.advantage_clip).mean()
            )
            advantage = np.clip(advantage, -config.advantage_clip, config.advantage_clip)
        self._adapt_kl(terms)
        return dataclasses.replace(
            terms,
            advantage=advantage * self._importance_factors(terms),
            weight=WEIGHTS[config.aggregation](terms, config.options.fixed_length),
            target=terms.target if target is None else target,
        )

    @property
    def _needs_mismatched(self) -> bool:
        """Whether KTO estimates the KL from completions paired with other prompts, which are episodes of weight 0."""
        return self.given and self.config.loss == "kto"

    def _credit_without_advantage(self, groups: Sequence[Group], terms: Terms) -> Terms:
        """For losses without an advantage: the column holds the score that orders episodes, if the loss uses one."""
        config = self.config
        episodes = [episode for group in groups for episode in group.valid_episodes]
        score_E = np.array([episode.reward for episode in episodes], dtype=np.float64)
        weight_E = np.array([episode.weight for episode in episodes], dtype=np.float64)
        if config.loss not in ("dpo", "ipo", "kto"):
            weight = WEIGHTS[config.aggregation](terms, config.options.fixed_length)
            return dataclasses.replace(terms, weight=reweighted(weight, weight_E[terms.episode]))
        if config.loss == "kto":
            score_E = np.where(score_E >= config.options.reward_threshold, 1.0, -1.0) * (weight_E > 0)
        if self._needs_mismatched and len(terms):
            terms = dataclasses.replace(terms, target=np.full(len(terms), self._kto_kl(terms, weight_E == 0)))
        terms = dataclasses.replace(terms, advantage=score_E[terms.episode])
        each = weight_E[terms.episode] / max(weight_E[weight_E > 0].mean() if weight_E.any() else 1.0, 1e-12)
        return dataclasses.replace(terms, weight=each / max(self.count(terms), 1.0))

    def _kto_kl(self, terms: Terms, mismatched_E: NDArray[np.bool_]) -> float:
        gain_E = np.bincount(terms.episode, terms.proximal - terms.reference, minlength=len(mismatched_E))
        if not mismatched_E.any():
            raise ValueError("KTO on given rows needs completions of other prompts for its KL, and the batch has none")
        kl = preference_losses.mismatched_kl(torch.from_numpy(gain_E[mismatched_E]))
        self.credit_metrics["algorithm/kl"] = kl
        return kl

    def count(self, terms: Terms) -> float:
        config = self.config
        if config.loss in ("dpo", "ipo"):
            first = np.unique(terms.episode, return_index=True)[1]
            score_E, group_E = torch.from_numpy(terms.advantage[first]), torch.from_numpy(terms.tree[first])
            return float(preference_losses.pairs(score_E, group_E, config.options.min_gap).sum())
        if config.loss == "kto":
            return float(len(np.unique(terms.episode[terms.advantage != 0])))
        return COUNTS[config.aggregation](terms)

    def _importance_factors(self, terms: Terms) -> Floats:
        """The factor of each term's advantage for tokens that another policy or engine sampled."""
        config, factor = self.config, np.ones(len(terms))
        if config.importance_weights.kind != "none" and len(terms):
            of = terms.call if config.options.sequence == "call" else terms.episode
            ratio = ratios(
                terms.proximal - terms.logprob, of if config.importance_weights.level == "sequence" else None
            )
            factor = importance_weights(config.importance_weights.kind, ratio, *config.importance_weights.bounds)
            self.credit_metrics |= {
                "importance_weight/clipped": float((factor != ratio).mean()),
                "importance_weight/mean": float(factor.mean()),
            }
        if config.staleness_decay < 1:
            factor = factor * staleness(terms.version, config.staleness_decay)
        return factor

    def _adapt_kl(self, terms: Terms) -> None:
        """After the advantages of a step: adapt the coefficient of a KL penalty in the reward to its target."""
        kl = self.config.kl
        if not self.config.has_kl_in_reward or not len(terms):
            return
        coef = self.memory.get("kl_coef", kl.coef)
        episodes = len(np.unique(terms.episode))
        per_episode = float(kl_costs(terms, kl, 1.0).sum()) / episodes
        self.credit_metrics |= {"algorithm/kl": per_episode, "algorithm/kl_coef": coef}
        if kl.target is not None:
            self.memory["kl_coef"] = adapt_kl_coef(coef, per_episode, kl.target, episodes, kl.horizon)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        rule = PREPARES.get(self.config.loss)
        return now_M.new_zeros(len(now_M), 2) if rule is None else rule(now_M.detach(), terms, self.config)

    def loss(self, outputs: ModelOutputs, terms: TermBatch) -> LossParts:
        config = self.config
        loss_M, logged = (self.custom[1] or LOSSES[config.loss])(outputs, terms, config)
        if config.kl.coef > 0 and config.kl.where == "loss":
            kl_M = KL[config.kl.estimator](outputs.logprob_M, known(terms.reference_M, "reference"))
            loss_M, logged["policy/kl"] = loss_M + config.kl.coef * kl_M, kl_M.detach()
        if config.entropy_coef > 0:
            loss_M = loss_M - config.entropy_coef * outputs.entropy_M
        if self.needs.value:
            before_M, target_M = known(terms.value_M, "value"), known(terms.target_M, "target")
            value_M = value_loss(known(outputs.value_M, "value"), before_M, target_M, config.options.value_clip)
            loss_M, logged["policy/value_loss"] = loss_M + config.options.value_coef * value_M, value_M.detach()
        return loss_M, logged

    def metrics(self) -> Metrics:
        return self.dropped | self.credit_metrics

    def state(self) -> dict[str, Any]:
        return dict(self.memory)

    def load_state(self, state: dict[str, Any]) -> None:
        self.memory = dict(state)


def drop_metrics(dropped: Mapping[str, int], config: AlgorithmConfig) -> Metrics:
    known = dict.fromkeys(reasons(config), 0) | dict(dropped)
    return {f"dropped/{why}": float(count) for why, count in sorted(known.items())}
