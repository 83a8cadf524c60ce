"""The gradient of stale tokens with and without importance correction, as `benchmarks/staleness.py` compares them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from learner_fakes import SAMPLING, random_groups

from arborl.algorithms import make_algorithm
from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.learner.core.update_metrics import TermLog
from arborl.rollout.token_trees import build_token_trees

RATIOS = np.array([0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9, 2.5, 4.9, 6.0])
"""Probability under the current weights divided by that under the weights that sampled the token."""


def clipped(ratio, advantage):
    return np.where(advantage > 0, ratio > 1.2, ratio < 0.8)


FACTORS = {
    "none": lambda ratio, advantage: np.ones(len(ratio)),
    "ratio": lambda ratio, advantage: np.where(clipped(ratio, advantage), 0.0, ratio),
    "tis": lambda ratio, advantage: np.minimum(ratio, 2.0),
    "decoupled": lambda ratio, advantage: np.where(ratio > 5.0, 0.0, ratio),
}
"""What multiplies the on-policy gradient -A d log p of a token."""


def corrections(monkeypatch) -> dict[str, list[str]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from staleness import CORRECTIONS

    return CORRECTIONS


@pytest.mark.parametrize("name", FACTORS)
def test_a_stale_token_has_the_gradient_of_its_correction(tiny_llama, monkeypatch, name):
    algorithm = make_algorithm(load(None, corrections(monkeypatch)[name]).algorithm)
    groups = random_groups(0, groups=6)
    forest = build_token_trees(groups)
    learner = Learner(copy.deepcopy(tiny_llama), LearnerConfig(lr=1e-6, decay="none"), SAMPLING, algorithm.needs)
    current = learner.logprobs(forest.trees, forest.terms).numpy()
    ratio = np.resize(RATIOS, len(current))
    stale = dataclasses.replace(forest.terms, logprob=current - np.log(ratio))
    on_policy = dataclasses.replace(forest.terms, logprob=current)
    advantage = algorithm.credit(groups, learner.score_terms(forest.trees, on_policy, algorithm.needs)).advantage
    assert {(r, a > 0) for r, a in zip(ratio, advantage, strict=True)} >= {
        (r, s) for r in RATIOS for s in (True, False)
    }

    terms = algorithm.credit(groups, learner.score_terms(forest.trees, stale, algorithm.needs))
    learner.term_log = TermLog(len(terms))
    learner.update(forest.trees, terms, algorithm)
    expected = -FACTORS[name](ratio, advantage) * advantage * terms.weight
    np.testing.assert_allclose(learner.term_log.pull, expected, rtol=1e-5, atol=1e-9)


def test_every_correction_of_the_benchmark_has_a_formula(monkeypatch):
    assert set(corrections(monkeypatch)) == set(FACTORS)
