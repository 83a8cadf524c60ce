"""Branch downsampling with a real model: the mean over all draws is the gradient of all branches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from learner_fakes import SAMPLING, Fake, assert_same

from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.rollout.token_trees import build_token_trees, downsample_branches
from arborl.types import Call, Completion, Episode, FinishReason, Group, Task

BRANCHES = 4


def forgetful() -> list[Group]:
    """One episode whose every prompt forgets the last, each reply of another length."""
    calls = [
        Call(
            (1, 2, 10 + b), Completion(tuple(20 + b + n for n in range(b + 1)), (-3.9,) * (b + 1), FinishReason.STOP), b
        )
        for b in range(BRANCHES)
    ]
    return [Group(Task("t"), [Episode("e", Task("t"), calls=calls, rewards={"r": 0.7})])]


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("kind", ["clip", "value"])
def test_the_mean_over_all_draws_is_the_gradient_of_all_branches(tiny_llama, kind, most):
    algorithm = Fake(kind, reference=True, proximal=True)
    learner = Learner(tiny_llama, LearnerConfig(), SAMPLING, algorithm.needs)
    groups = forgetful()
    forest = build_token_trees(groups)
    terms = algorithm.credit(groups, learner.score_terms(forest.trees, forest.terms, algorithm.needs))
    terms = dataclasses.replace(terms, reference=terms.reference - 0.1)  # one that differs, so that it pulls

    def gradient(trees, of):
        loss = learner.backward(trees, of, algorithm)["policy/loss"]
        return loss, [g.clone() for g in learner.optimizer.gradients()]

    draws = {}
    for seed in range(200):
        fewer, kept, _ = downsample_branches(groups, terms, most, "random", seed)
        draws.setdefault(tuple(np.unique(kept.turn)), (fewer.trees, kept))
    assert len(draws) == {1: BRANCHES, 2: BRANCHES - 1, 3: 3}[most]  # every one there is, all as likely
    found = [gradient(*draw) for draw in draws.values()]
    mean = (
        float(np.mean([loss for loss, _ in found])),
        [torch.stack(parts).mean(0) for parts in zip(*(parts for _, parts in found), strict=True)],
    )
    whole = gradient(forest.trees, terms)
    assert_same(whole, mean)
    with pytest.raises(AssertionError):  # no single draw is
        assert_same(whole, found[0])
    learner.optimizer.zero_grad()
