"""Evaluation on held-out demonstrations and preference pairs: nothing is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.algorithms.token_losses import ModelOutputs
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import RunConfig
from arborl.data.task_source import TaskSource
from arborl.learner.core.learner import Learner
from arborl.learner.core.update_metrics import term_tensors
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.rollout.runner import Rollout
from arborl.trainer.evaluation import EvaluationResult, metrics_by_source
from arborl.trainer.training_batch import prepare_batch
from arborl.types import Floats, Group, Metrics, Terms


class OfflineEvaluator:
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

    async def measure(self) -> EvaluationResult:
        """`loss`; for demonstrations `perplexity`; for pairs and labels `accuracy` and `margin`. By source too."""
        groups = self.rollout.offline_groups(self.source.evaluation(self.tasks))
        return EvaluationResult(metrics_by_source(groups, self.scores), groups)

    def scores(self, groups: Sequence[Group]) -> Metrics:
        metrics: Metrics = {"tasks": float(len(groups))}
        if not groups:
            return metrics
        kept, _, terms = prepare_batch(self.algorithm, self.learner, groups, AlgorithmNeeds(proximal=True))
        if not len(terms):
            return metrics
        terms = self.algorithm.credit(kept, terms)
        metrics["loss"] = self._loss(terms)
        if self.config.loss == "sft":
            return metrics | {"perplexity": float(np.exp(-terms.proximal.mean()))}
        return metrics | preference_metrics(kept, terms, self.config)

    def _loss(self, terms: Terms) -> float:
        batch = term_tensors(terms, torch.device("cpu"), torch.float64)
        logprob_M = torch.from_numpy(terms.proximal)
        if self.algorithm.whole:
            batch = dataclasses.replace(batch, sequence_M=self.algorithm.prepare(logprob_M, batch))
        loss_M, _ = self.algorithm.loss(ModelOutputs(logprob_M, torch.zeros_like(logprob_M)), batch)
        return float((loss_M * batch.weight_M).sum())


def preference_metrics(groups: Sequence[Group], terms: Terms, config: AlgorithmConfig) -> Metrics:
    """Accuracy and mean margin of implicit rewards, `beta · (log π - log π_ref)` summed over a reply's tokens. Of a
    pair, the chosen reply must have the higher one. With KTO, single replies are compared with its reference point."""
    episodes = [episode for group in groups for episode in group.valid_episodes]
    reward_E = config.options.beta * np.bincount(
        terms.episode, terms.proximal - terms.reference, minlength=len(episodes)
    )
    chosen_E = np.array([episode.reward >= config.options.reward_threshold for episode in episodes])
    if config.loss == "kto":
        counts_E = np.array([episode.weight > 0 for episode in episodes])
        reference_point = config.options.beta * float(terms.target[0])
        margin_E = (reward_E - reference_point) * np.where(chosen_E, 1.0, -1.0)
        metrics = {"accuracy": share_positive(margin_E[counts_E])}
        chosen, rejected = reward_E[counts_E & chosen_E], reward_E[counts_E & ~chosen_E]
        return metrics | ({"margin": float(chosen.mean() - rejected.mean())} if len(chosen) and len(rejected) else {})
    margin = reward_E[chosen_E] - reward_E[~chosen_E]  # one of each per group, groups in order
    return {"accuracy": share_positive(margin), "margin": float(margin.mean())}


def share_positive(margin: Floats) -> float:
    """Share of positive numbers; 0 counts as a half."""
    return float((margin > 0).mean() + (margin == 0).mean() / 2)
