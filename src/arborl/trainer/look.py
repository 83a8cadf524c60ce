"""Before credit: what can be learned from, and what the models say about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.algorithms.reward_arrays import cut_rows
from arborl.errors import EpisodeError
from arborl.learner.group import LearnerGroup
from arborl.learner.learner import Learner
from arborl.rollout.tree import plant
from arborl.types import NOT_SAMPLED, Forest, Group, Terms

log = logging.getLogger(__name__)

NOTHING = Needs()
WHO = {
    "logprob": "engine", "proximal": "learner", "reference": "reference policy", "value": "critic", "after": "critic",
    "teacher": "teacher",
}  # fmt: skip
"""Whose number stands in which column of the terms."""


def look(
    algorithm: Algorithm, learner: Learner | LearnerGroup, groups: Sequence[Group], more: Needs = NOTHING
) -> tuple[list[Group], Forest, Terms]:
    """The groups to learn from, their trees, and the terms with what the algorithm needs to know before credit.

    An episode about which some model says what is not a finite number has failed: it is named and counted, and leaves
    baseline and loss together. Then its siblings are looked at again, alone.

    Args:
        more: what is asked besides what the algorithm needs.
    """
    while True:
        kept = algorithm.keep(groups)
        needs = algorithm.needs | more
        forest = plant(kept)
        cut = cut_rows(kept, forest.terms) if needs.after else np.zeros(0, dtype=np.int64)
        terms = learner.look(forest.trees, forest.terms, needs, cut)
        asked = ["logprob", *(name for name in ("proximal", "reference", "value", "teacher") if getattr(needs, name))]
        episodes = [episode for group in kept for episode in group.valid_episodes]
        given = terms.version == NOT_SAMPLED  # nobody has said how likely that was
        bad = {
            name: np.unique(terms.episode[~np.isfinite(getattr(terms, name)) & ~(given & (name == "logprob"))])
            for name in asked
        }
        bad["after"] = terms.episode[cut[~np.isfinite(terms.after[cut])]]
        if not any(len(numbers) for numbers in bad.values()):
            return kept, forest, terms
        for name, numbers in bad.items():
            for number in numbers:
                if (episode := episodes[number]).failure is None:
                    what = "value" if WHO[name] == "critic" else "log-probability"
                    cause = ArithmeticError(f"the {what} of a token is not finite")
                    failure = episode.fail(EpisodeError(WHO[name], cause))
                    log.warning("episode %s failed and is left out: %s", episode.id, failure)
