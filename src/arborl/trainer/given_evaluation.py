"""How well a policy does on given rows that it is never trained on: nothing is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.algorithms.token_losses import Said
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import RunConfig
from arborl.data.source import TaskSource
from arborl.learner.group import LearnerGroup
from arborl.learner.learner import Learner
from arborl.learner.update_metrics import columns
from arborl.rollout.runner import Rollout
from arborl.trainer.evaluate import Measured
from arborl.trainer.look import look
from arborl.types import Floats, Group, Metrics, Terms


class GivenEvaluator:
    """The loss on held-out rows, and what else can be said about them.

    Args:
        source: of held-out rows.
        rollout: makes episodes of them.
        algorithm, config: what is learned, by which settings.
        learner: holds the policy.
    """

    def __init__(
        self,
        source: TaskSource,
        rollout: Rollout,
        algorithm: Algorithm,
        config: RunConfig,
        learner: Learner | LearnerGroup,
    ):
        self.source, self.rollout, self.algorithm = source, rollout, algorithm
        self.config, self.learner, self.tasks = config.algorithm, learner, config.evaluation.tasks

    async def measure(self) -> Measured:
        """`loss`; for transcripts `perplexity`; for pairs and labels `accuracy` and `margin`. By source too."""
        groups = self.rollout.shown(self.source.evaluation(self.tasks))
        metrics = self.scores(groups)
        sources = list(dict.fromkeys(group.task.source for group in groups))
        for source in sources if len(sources) > 1 else ():
            own = self.scores([group for group in groups if group.task.source == source])
            metrics |= {f"{name}/{source}": value for name, value in own.items()}
        return Measured(metrics, groups)

    def scores(self, groups: Sequence[Group]) -> Metrics:
        """Of these rows. Where none is held out, nothing was measured, and nothing is said."""
        found: Metrics = {"tasks": float(len(groups))}
        if not groups:
            return found
        kept, _, terms = look(self.algorithm, self.learner, groups, Needs(proximal=True))
        if not len(terms):
            return found
        terms = self.algorithm.credit(kept, terms)
        found["loss"] = self._loss(terms)
        if self.config.loss == "sft":
            return found | {"perplexity": float(np.exp(-terms.proximal.mean()))}
        return found | preferred(kept, terms, self.config)

    def _loss(self, terms: Terms) -> float:
        """The objective, from what the policy says of each term."""
        batch = columns(terms, torch.device("cpu"), torch.float64)
        now_M = torch.from_numpy(terms.proximal)
        if self.algorithm.whole:
            batch = dataclasses.replace(batch, sequence_M=self.algorithm.prepare(now_M, batch))
        loss_M, _ = self.algorithm.loss(Said(now_M, torch.zeros_like(now_M)), batch)
        return float((loss_M * batch.weight_M).sum())


def preferred(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig) -> Metrics:
    """How often the better side is preferred, and by how much: `beta` times its gain over the reference, less the
    other's. Single answers are on the right side where their gain is above KTO's reference point if they are good."""
    episodes = [episode for group in groups for episode in group.valid_episodes]
    gain_E = config.beta * np.bincount(terms.episode, terms.proximal - terms.reference, minlength=len(episodes))
    good_E = np.array([episode.reward >= config.reward_threshold for episode in episodes])
    if config.loss == "kto":
        counts_E = np.array([episode.weight > 0 for episode in episodes])
        level = config.beta * float(terms.target[0])
        right = (gain_E - level) * np.where(good_E, 1.0, -1.0)
        found = {"accuracy": share_above_0(right[counts_E])}
        good, bad = gain_E[counts_E & good_E], gain_E[counts_E & ~good_E]
        return found | ({"margin": float(good.mean() - bad.mean())} if len(good) and len(bad) else {})
    margin = gain_E[good_E] - gain_E[~good_E]  # one of each a group, and groups in order
    return {"accuracy": share_above_0(margin), "margin": float(margin.mean())}


def share_above_0(margin: Floats) -> float:
    """Of the numbers; one that is 0 is undecided, and counts half."""
    return float((margin > 0).mean() + (margin == 0).mean() / 2)
