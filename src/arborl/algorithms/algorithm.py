"""An algorithm: which groups to learn from, what each sampled token is credited with, and the loss."""

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
from arborl.algorithms.aggregation import COUNTS, WEIGHTS, weighed
from arborl.algorithms.kl import KL, adapted
from arborl.algorithms.losses import LOSSES, PREPARES, known
from arborl.algorithms.off_policy import guard, ratios, staleness
from arborl.algorithms.own import Find, own_parts
from arborl.algorithms.own_check import check_advantage, check_loss
from arborl.algorithms.reward_arrays import kl_costs, penalised
from arborl.algorithms.selection import reasons, select
from arborl.algorithms.statistics import whitened, whitened_by_token
from arborl.algorithms.token_losses import LossParts, Said, TermBatch, value_loss
from arborl.config.algorithm_config import AlgorithmConfig, TrustRegionConfig, settings_read_by_loss
from arborl.registry import load
from arborl.types import Floats, Group, Metrics, Terms


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm wants to know of each term besides what the rollout recorded."""

    proximal: bool = False
    """Log-probabilities under the weights as they were when the update began, before `credit`."""
    anchor: bool = False
    """The same in the loss alone, which the update's first step says itself."""
    reference: bool = False
    """Log-probabilities under the frozen reference policy."""
    teacher: bool = False
    """Log-probabilities under the teacher."""
    value: bool = False
    """A critic's estimates, and its gradient in the loss."""
    entropy: bool = False
    """The gradient of the entropy."""
    greedy: bool = False
    """One extra episode a task at temperature 0; its reward is `Group.greedy`."""
    after: bool = False
    """A critic's estimates also of what follows the last token of episodes that were cut short."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, name) or getattr(other, name) for name in self.__slots__))


class Algorithm(Protocol):
    """What a trainer and a learner need to know of an algorithm. It knows no model."""

    @property
    def needs(self) -> Needs:
        """What must be filled in before `credit`."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the loss looks at whole sequences, so that `prepare` must be called."""
        ...

    @property
    def trust_region(self) -> TrustRegionConfig | None:
        """Where the step is not the optimiser's but the largest inside a bound on the policy's KL (TRPO)."""
        ...

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that can teach something, without the episodes that cannot."""
        ...

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        """The same terms with advantage, share of the loss, and target. `groups` are those the terms came from."""
        ...

    def count(self, terms: Terms) -> float:
        """How many of what the loss is a mean over (episodes, tokens, calls, pairs) these credited terms hold.

        The weights of `credit` are a mean over the whole batch; by this, a part of it becomes a mean over its own.
        """
        return float(len(np.unique(terms.episode)))

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        """Two numbers a term, from the present log-probabilities (no gradient) of whole groups; which, is the loss's
        affair: GSPO's gap; a preference's derivative, and the token's part of its loss."""
        ...

    def loss(self, said: Said, terms: TermBatch) -> LossParts:
        """The loss of every term."""
        ...

    def metrics(self) -> Metrics:
        """What the last `keep` and `credit` found: `dropped/<why>`, the present KL coefficient, …"""
        ...

    def state(self) -> dict[str, Any]:
        """What it remembers from step to step, as JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what `state` said."""
        ...


class Recipe(Algorithm):
    """One advantage and one loss, from the tables or the user's own, with what stands around them, as a configuration
    says.

    Args:
        config: says which.
        find: from the name of one of the user's own to it.
        given: whether it learns from given rows, which no policy sampled.

    Example:
        algorithm = Recipe(AlgorithmConfig(name="gspo", kl={"coef": 0.01}))
        kept = algorithm.keep(groups)
        terms = algorithm.credit(kept, plant(kept).terms)
    """

    def __init__(self, config: AlgorithmConfig, find: Find = load, given: bool = False):
        self.config, self.given = config, given
        self.own = own_parts(config, find)
        """The advantage and the loss, where they are the user's own."""
        self.memory: Memory = {}
        self.dropped: Metrics = {}
        self.found: Metrics = {}

    @property
    def needs(self) -> Needs:
        config = self.config
        reads, (own, own_loss) = settings_read_by_loss(config.loss), self.own
        credited = "advantage" in reads
        anchored = config.loss == "decoupled_ppo" or ("anchor" in reads and config.ratio_policy == "proximal")
        searched = config.loss == "trpo"  # its line search asks for the loss again when weights have moved
        return Needs(
            proximal=config.importance_weights.kind != "none"
            or config.has_kl_in_reward
            or (anchored and searched)
            or self._asks_strangers,
            anchor=anchored and not searched,
            reference=config.kl.coef > 0
            or config.loss in ("dpo", "ipo", "kto")
            or (own_loss is not None and "reference" in own_loss.takes),
            teacher=config.loss == "distill",
            value=credited and (config.advantage == "gae" or (own is not None and "value" in own.takes)),
            entropy=config.entropy_coef > 0 or (own_loss is not None and "entropy" in own_loss.takes),
            greedy=credited and config.advantage == "remax",
            after=credited and config.advantage == "gae" and config.bootstrap,
        )

    @property
    def whole(self) -> bool:
        return self.config.loss in PREPARES

    @property
    def trust_region(self) -> TrustRegionConfig | None:
        return self.config.trust_region if self.config.loss == "trpo" else None

    def check(self) -> None:
        """ConfigError where an advantage or a loss of the user's own does not do what it should."""
        advantage, loss = self.own
        if advantage is not None:
            check_advantage(advantage, self.config)
        if loss is not None:
            check_loss(loss, self.config)

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        kept, dropped = select(groups, self.config)
        self.dropped = counted(dropped, self.config)
        return kept

    def credit(self, groups: Sequence[Group], terms: Terms) -> Terms:
        config, self.found = self.config, {}
        groups = [penalised(group, config.overlong) for group in groups]
        if "advantage" not in settings_read_by_loss(config.loss):
            return self._preferred(groups, terms)
        rule = self.own[0] or ADVANTAGES[config.advantage]
        advantage, target = rule(groups, terms, config, self.memory)
        if config.whiten == "token":
            advantage = whitened_by_token(advantage)
        elif config.whiten:
            advantage = whitened(advantage, terms.episode, centre=not config.compares_episodes)
        if config.advantage_clip is not None:
            self.found["algorithm/advantage_clipped"] = float((np.abs(advantage) > config.advantage_clip).mean())
            advantage = np.clip(advantage, -config.advantage_clip, config.advantage_clip)
        self._adapt_kl(terms)
        return dataclasses.replace(
            terms,
            advantage=advantage * self._guards(terms),
            weight=WEIGHTS[config.aggregation](terms, config.fixed_length),
            target=terms.target if target is None else target,
        )

    @property
    def _asks_strangers(self) -> bool:
        """Whether the policy's KL is read off completions under prompts of others: episodes of weight 0."""
        return self.given and self.config.loss == "kto"

    def _preferred(self, groups: Sequence[Group], terms: Terms) -> Terms:
        """Losses without an advantage: the column says which episodes are better, or nothing."""
        config = self.config
        episodes = [episode for group in groups for episode in group.valid_episodes]
        score_E = np.array([episode.reward for episode in episodes], dtype=np.float64)
        weight_E = np.array([episode.weight for episode in episodes], dtype=np.float64)
        if config.loss not in ("dpo", "ipo", "kto"):
            weight = WEIGHTS[config.aggregation](terms, config.fixed_length)
            return dataclasses.replace(terms, weight=weighed(weight, weight_E[terms.episode]))
        if config.loss == "kto":
            score_E = np.where(score_E >= config.reward_threshold, 1.0, -1.0) * (weight_E > 0)
        if self._asks_strangers and len(terms):
            terms = dataclasses.replace(terms, target=np.full(len(terms), self._level(terms, weight_E == 0)))
        terms = dataclasses.replace(terms, advantage=score_E[terms.episode])
        each = weight_E[terms.episode] / max(weight_E[weight_E > 0].mean() if weight_E.any() else 1.0, 1e-12)
        return dataclasses.replace(terms, weight=each / max(self.count(terms), 1.0))  # every term whole

    def _level(self, terms: Terms, stranger_E: NDArray[np.bool_]) -> float:
        """KTO's reference point, under the weights that the update begins with."""
        gain_E = np.bincount(terms.episode, terms.proximal - terms.reference, minlength=len(stranger_E))
        if not stranger_E.any():
            raise ValueError("KTO on given rows reads its reference point off strangers, and the batch has none")
        found = preference_losses.stranger_level(torch.from_numpy(gain_E[stranger_E]))
        self.found["algorithm/kl"] = found
        return found

    def count(self, terms: Terms) -> float:
        config = self.config
        if config.loss in ("dpo", "ipo"):
            first = np.unique(terms.episode, return_index=True)[1]
            score_E, group_E = torch.from_numpy(terms.advantage[first]), torch.from_numpy(terms.tree[first])
            return float(preference_losses.pairs(score_E, group_E, config.min_gap).sum())
        if config.loss == "kto":
            return float(len(np.unique(terms.episode[terms.advantage != 0])))
        return COUNTS[config.aggregation](terms)

    def _guards(self, terms: Terms) -> Floats:
        """Factor on each term's advantage for not having been sampled from the policy that learns."""
        config, factor = self.config, np.ones(len(terms))
        if config.importance_weights.kind != "none" and len(terms):
            of = terms.call if config.sequence == "call" else terms.episode
            ratio = ratios(
                terms.proximal - terms.logprob, of if config.importance_weights.level == "sequence" else None
            )
            factor = guard(config.importance_weights.kind, ratio, *config.importance_weights.bounds)
            self.found |= {
                "importance_weight/clipped": float((factor != ratio).mean()),
                "importance_weight/mean": float(factor.mean()),
            }
        if config.staleness_decay < 1:
            factor = factor * staleness(terms.version, config.staleness_decay)
        return factor

    def _adapt_kl(self, terms: Terms) -> None:
        """After the step's advantages: move the coefficient of a KL penalty in the reward towards its target."""
        kl = self.config.kl
        if not self.config.has_kl_in_reward or not len(terms):
            return
        coef = self.memory.get("kl_coef", kl.coef)
        episodes = len(np.unique(terms.episode))
        per_episode = float(kl_costs(terms, kl, 1.0).sum()) / episodes
        self.found |= {"algorithm/kl": per_episode, "algorithm/kl_coef": coef}
        if kl.target is not None:
            self.memory["kl_coef"] = adapted(coef, per_episode, kl.target, episodes, kl.horizon)

    def prepare(self, now_M: Tensor, terms: TermBatch) -> Tensor:
        rule = PREPARES.get(self.config.loss)
        return now_M.new_zeros(len(now_M), 2) if rule is None else rule(now_M.detach(), terms, self.config)

    def loss(self, said: Said, terms: TermBatch) -> LossParts:
        config = self.config
        loss_M, seen = (self.own[1] or LOSSES[config.loss])(said, terms, config)
        if config.kl.coef > 0 and config.kl.where == "loss":
            kl_M = KL[config.kl.estimator](said.logprob_M, known(terms.reference_M, "reference"))
            loss_M, seen["policy/kl"] = loss_M + config.kl.coef * kl_M, kl_M.detach()
        if config.entropy_coef > 0:
            loss_M = loss_M - config.entropy_coef * said.entropy_M
        if self.needs.value:
            before_M, target_M = known(terms.value_M, "value"), known(terms.target_M, "target")
            value_M = value_loss(known(said.value_M, "value"), before_M, target_M, config.value.clip)
            loss_M, seen["policy/value_loss"] = loss_M + config.value.coef * value_M, value_M.detach()
        return loss_M, seen

    def metrics(self) -> Metrics:
        return self.dropped | self.found

    def state(self) -> dict[str, Any]:
        return dict(self.memory)

    def load_state(self, state: dict[str, Any]) -> None:
        self.memory = dict(state)


def counted(dropped: Mapping[str, int], config: AlgorithmConfig) -> Metrics:
    """What was dropped, by reason, as metrics; reasons for which nothing was, too."""
    known = dict.fromkeys(reasons(config), 0) | dict(dropped)
    return {f"dropped/{why}": float(count) for why, count in sorted(known.items())}
