"""The training batch of a step: token trees and terms, with log-probabilities, values, advantages and weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.algorithms.reward_arrays import cut_rows
from arborl.config.run_config import RunConfig
from arborl.errors import EpisodeError
from arborl.learner.core.learner import Learner
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.rollout.accounting import NO_TERMS, NOT_SELECTED, TRAINED, EpisodeKey, episode_key, failure_reason
from arborl.rollout.token_trees import SchemaMasks, build_token_trees, downsample_branches
from arborl.seeds import derive
from arborl.trainer.step_metrics import batch_metrics
from arborl.types import NOT_SAMPLED, Forest, Group, Metrics, Terms

log = logging.getLogger(__name__)

NO_EXTRA_NEEDS = AlgorithmNeeds()
COLUMN_SOURCES = {
    "logprob": "engine", "proximal": "learner", "reference": "reference policy", "value": "critic", "after": "critic",
    "teacher": "teacher",
}  # fmt: skip
"""The model that computes each column of the terms."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What the learner trains on in one step."""

    groups: list[Group]
    """The groups that have a gradient, without unusable episodes."""
    forest: Forest
    terms: Terms
    outcomes: dict[EpisodeKey, str]
    """Of each episode: whether it is trained, or why not."""
    metrics: Metrics

    @property
    def episode_ids(self) -> list[str]:
        return [episode.id for group in self.groups for episode in group.valid_episodes]


def credited_batch(
    algorithm: Algorithm,
    learner: Learner | LearnerGroup,
    config: RunConfig,
    groups: Sequence[Group],
    step: int,
    schema_masks: SchemaMasks | None = None,
) -> TrainingBatch:
    """The batch with advantages and weights; `step` steps are done before it. With
    `learner.max_samples_per_trajectory` it has some branches of each episode."""
    kept, forest, terms = prepare_batch(algorithm, learner, groups, schema_masks=schema_masks)
    outcomes = episode_outcomes(groups, kept, terms, algorithm.drop_reasons())
    terms = algorithm.credit(kept, terms)
    settings, dropped = config.learner, Metrics()
    if settings.max_samples_per_trajectory is not None:
        seed = derive(derive(config.seed, "step", step), "thin")
        forest, terms, dropped = downsample_branches(
            kept, terms, settings.max_samples_per_trajectory, settings.downsample_mode, seed
        )
    metrics = batch_metrics(forest, terms, step) | algorithm.metrics() | dropped
    return TrainingBatch(kept, forest, terms, outcomes, metrics)


def prepare_batch(
    algorithm: Algorithm,
    learner: Learner | LearnerGroup,
    groups: Sequence[Group],
    extra_needs: AlgorithmNeeds = NO_EXTRA_NEEDS,
    schema_masks: SchemaMasks | None = None,
) -> tuple[list[Group], Forest, Terms]:
    """The groups to train on, their token trees, and their terms with the columns that the algorithm needs. An episode
    for which a model computes a number that is not finite fails: it is logged and counted, and leaves baseline and loss
    together. The batch is then prepared again without it."""
    while True:
        kept = algorithm.keep(groups)
        needs = algorithm.needs | extra_needs
        forest = build_token_trees(kept, schema_masks)
        cut = cut_rows(kept, forest.terms) if needs.after else np.zeros(0, dtype=np.int64)
        terms = learner.score_terms(forest.trees, forest.terms, needs, cut)
        columns = ["logprob", *(name for name in ("proximal", "reference", "value", "teacher") if getattr(needs, name))]
        is_given = terms.version == NOT_SAMPLED  # demonstrations have no sampling log-probability
        not_finite = {
            name: np.unique(terms.episode[~np.isfinite(getattr(terms, name)) & ~(is_given & (name == "logprob"))])
            for name in columns
        }
        not_finite["after"] = terms.episode[cut[~np.isfinite(terms.after[cut])]]
        if not any(len(indices) for indices in not_finite.values()):
            return kept, forest, terms
        episodes = [episode for group in kept for episode in group.valid_episodes]
        for name, indices in not_finite.items():
            for index in indices:
                if (episode := episodes[index]).failure is None:
                    what = "value" if COLUMN_SOURCES[name] == "critic" else "log-probability"
                    cause = ArithmeticError(f"the {what} of a token is not finite")
                    failure = episode.fail(EpisodeError(COLUMN_SOURCES[name], cause))
                    log.warning("episode %s failed and is left out: %s", episode.id, failure)


def episode_outcomes(
    groups: Sequence[Group], kept: Sequence[Group], terms: Terms, drop_reasons: Mapping[EpisodeKey, str]
) -> dict[EpisodeKey, str]:
    """What an update does with each episode of its groups: `TRAINED`, or the reason for which it is left out. `kept`
    are the groups of the terms. Episodes of weight 0 are not training episodes."""
    selected = [episode_key(episode) for group in kept for episode in group.valid_episodes]
    trained = {selected[number] for number in np.unique(terms.episode)}
    left_out = dict.fromkeys(selected, NO_TERMS)
    outcomes: dict[EpisodeKey, str] = {}
    for episode in (episode for group in groups for episode in group.episodes if episode.weight > 0):
        key = episode_key(episode)
        if key in trained:
            outcomes[key] = TRAINED
        elif episode.failure is not None:
            outcomes[key] = failure_reason(episode.failure)
        else:
            outcomes[key] = left_out.get(key) or drop_reasons.get(key, NOT_SELECTED)
    return outcomes
