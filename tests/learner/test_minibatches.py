"""A minibatch's gradient is that of the mean over its own part, and rates follow the run."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from learner_fakes import SAMPLING, Fake, batch_of, forest_of, random_groups

from arborl.algorithms import make_algorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.types import Group

CONFIGS = {
    "episode": {},
    "token": {"aggregation": "token"},
    "call": {"aggregation": "call"},
    "fixed": {"aggregation": "fixed", "args": {"fixed_length": 7}},
    "dpo": {"name": "dpo", "args": {"pairs": "all"}},
    "kto": {"name": "kto", "args": {"reward_threshold": 0.0}},
}


def steps_of(model, groups: list[Group], settings: dict, minibatches: int) -> list[list[torch.Tensor]]:
    """The gradients of each optimiser step, taken where the weights do not move."""
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    config = LearnerConfig(lr=1e-300, minibatches=minibatches)
    learner = Learner(copy.deepcopy(model), config, SAMPLING, algorithm.needs)
    taken, step = [], learner.optimizer.step

    def watched(scale, only=None):
        taken.append([g.clone() for g in learner.optimizer.gradients()])
        return step(scale, only)

    learner.optimizer.step = watched
    trees, terms = forest_of(groups)
    learner.update(trees, algorithm.credit(groups, learner.score_terms(trees, terms, algorithm.needs)), algorithm)
    return taken


@pytest.mark.parametrize("minibatches", [2, 3, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_step_has_the_gradient_its_groups_would_have_alone(tiny_llama, name, minibatches):
    groups = random_groups(5, groups=5)
    parts = [part for part in np.array_split(np.arange(5), minibatches) if len(part)]
    found = steps_of(tiny_llama, groups, CONFIGS[name], minibatches)
    assert len(found) == len(parts)
    for part, ours in zip(parts, found, strict=True):
        (alone,) = steps_of(tiny_llama, [groups[n] for n in part], CONFIGS[name], 1)
        scale = max(float(g.abs().max()) for g in alone)
        for a, b in zip(ours, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("skipped", [(), (1, 2), (0,)], ids=str)
def test_a_linear_decay_follows_the_run_however_many_updates_are_skipped(tiny_llama, skipped):
    config = LearnerConfig(lr=1.0e-3, epochs=2, minibatches=3, decay="linear")
    learner = Learner(copy.deepcopy(tiny_llama), config, SAMPLING, total_steps=4)
    forest, terms = batch_of(random_groups(0, groups=2), Fake())  # two groups: the third minibatch is always empty
    empty = forest_of([])
    rates = {}
    for step in range(4):
        metrics = learner.update(*(empty if step in skipped else (forest.trees, terms)), Fake())
        rates[step] = metrics.get("learner/lr")
    assert learner.done == 4 * 6
    for step, rate in rates.items():
        places = [6 * step + place for place in (0, 1, 3, 4)]
        expected = None if step in skipped else np.mean([1e-3 * (1 - place / 24) for place in places])
        assert rate == (None if expected is None else pytest.approx(expected))


def test_more_minibatches_than_groups_do_not_make_gradients_larger(tiny_llama):
    groups = [random_groups(5, groups=1)[0], random_groups(6, groups=1)[0]]
    norms = {}
    for minibatches in (2, 4):
        taken = steps_of(tiny_llama, groups, {}, minibatches)
        norms[minibatches] = [float(torch.cat([g.reshape(-1) for g in step]).norm()) for step in taken]
    assert norms[4] == pytest.approx(norms[2])
