"""In bfloat16 the engine's log-probabilities are not quite the learner's; no loss takes that for a policy in motion."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import numpy as np
import pytest
import torch
from cases import HAS_BFLOAT16, slow_cases

from arborl.algorithms import make_algorithm
from arborl.config.algorithm_config import NARROW_CLIP, AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.learner.core.learner import Learner
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, Group, Sampling, Task

pytestmark = [] if HAS_BFLOAT16 else [pytest.mark.slow]
SAMPLING = Sampling(max_tokens=24)


@pytest.fixture(scope="module")
def model(seedling):
    """The first two layers of seedling."""
    model = copy.deepcopy(seedling[0]).bfloat16()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model


@pytest.fixture(scope="module")
def groups(model) -> list[Group]:
    """Four tasks, four sampled episodes each."""
    engine = LocalEngine(model, max_context=128, max_requests=16, kv_tokens=4096)

    async def sample() -> list[Group]:
        await engine.load({}, 0)
        made = []
        for number in range(4):
            prompt = tuple(np.random.default_rng(number).integers(5, 400, 20 + 5 * number).tolist())
            samplings = [dataclasses.replace(SAMPLING, seed=10 * number + e) for e in range(4)]
            done = await asyncio.gather(*(engine.generate(prompt, one, session=str(one.seed)) for one in samplings))
            task = Task(str(number))
            episodes = [
                Episode(f"{number}/{e}", task, calls=[Call(prompt, completion, 0)], rewards={"r": float(e % 2)})
                for e, completion in enumerate(done)
            ]
            made.append(Group(task, episodes))
        return made

    return asyncio.run(sample())


def clipped(model, groups, settings: dict, **learning) -> tuple[float, dict[str, float]]:
    """The largest share of clipped terms over the steps of an update whose steps are too small to move a weight."""
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    learner = Learner(copy.deepcopy(model), LearnerConfig(lr=1e-30, **learning), SAMPLING, algorithm.needs)
    forest = build_token_trees(groups)
    terms = algorithm.credit(groups, learner.score_terms(forest.trees, forest.terms, algorithm.needs))
    metrics = learner.update(forest.trees, terms, algorithm)
    assert metrics["learner/steps"] > 0
    return metrics.get("policy/clipped", 0.0), metrics | algorithm.metrics()


CASES = [
    {"name": "gspo"},
    {"name": "gspo", "args": {"sequence": "call"}},
    {"name": "gspo", "importance_weights": "tis"},
    {"clip_low": 1e-4, "clip_high": 1e-4},
    {"name": "decoupled_ppo", "clip_low": 1e-4, "clip_high": 1e-4},
    {"name": "cispo", "clip_high": 1e-4},
    {"by_source": {"other": {"name": "gspo"}}, "loss": "gspo"},
]


SEVERAL_STEPS = [({"name": "gspo"}, {"minibatches": 2}), ({"name": "gspo"}, {"epochs": 2}), (CASES[4], {"epochs": 2})]
OTHERS = [
    (case, learning)
    for learning in ({"minibatches": 2}, {"epochs": 2})
    for case in CASES
    if (case, learning) not in SEVERAL_STEPS
]


@pytest.mark.parametrize(
    ("settings", "learning"), [*((case, {}) for case in CASES), *SEVERAL_STEPS, *slow_cases(*OTHERS)], ids=str
)
def test_on_policy_nothing_is_clipped(model, groups, settings, learning):
    share, metrics = clipped(model, groups, settings, **learning)
    assert metrics["policy/logprob_diff"] > 1e-4  # there is something to be mistaken about
    assert share == 0.0


def test_anchored_at_the_engine_it_would_be(model, groups):
    assert clipped(model, groups, {"name": "gspo", "anchor": "rollout"})[0] > 0.05


def test_an_update_of_one_step_needs_no_pass_for_its_anchor(model, groups):
    algorithm = make_algorithm(AlgorithmConfig(name="gspo"))
    forest = build_token_trees(groups)
    for minibatches, known in ((1, False), (2, True)):
        learner = Learner(model, LearnerConfig(minibatches=minibatches), SAMPLING, algorithm.needs)
        found = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
        assert np.isfinite(found.proximal).all() == known


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_policy_that_has_not_moved_pays_no_kl(model, groups, estimator):
    kl = {"coef": 0.1, "estimator": estimator, "where": "reward"}
    assert clipped(model, groups, {"kl": kl})[1]["algorithm/kl"] == 0.0


@pytest.mark.parametrize(
    ("settings", "against"),
    [
        ({}, "rollout"),
        ({"name": "gspo"}, "proximal"),
        ({"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}, "rollout"),
        ({"clip_high": NARROW_CLIP / 2}, "proximal"),
        ({"name": "cispo"}, "rollout"),
        ({"name": "sapo"}, "rollout"),
        ({"name": "sapo", "args": {"tau_negative": 50.0}}, "proximal"),
        ({"name": "topr"}, "rollout"),
        ({"importance_weights": "mis"}, "proximal"),
        ({"name": "gspo", "anchor": "rollout"}, "rollout"),
    ],
    ids=str,
)
def test_ratios_with_little_leeway_are_taken_against_the_learner(settings, against):
    assert AlgorithmConfig(**settings).ratio_policy == against


def test_cut_into_pieces_a_sequence_has_the_same_anchor(model, groups):
    share, _ = clipped(model, groups, {"name": "gspo"}, micro_batch_tokens=40)
    assert share == 0.0


def test_a_log_ratio_beyond_reason_counts_as_20(model, groups):
    algorithm = make_algorithm(AlgorithmConfig(name="grpo"))
    learner = Learner(copy.deepcopy(model), LearnerConfig(lr=1e-30), SAMPLING, algorithm.needs)
    forest = build_token_trees(groups)
    terms = algorithm.credit(groups, dataclasses.replace(forest.terms, logprob=forest.terms.logprob - 1e4))
    metrics = learner.update(forest.trees, terms, algorithm)
    assert metrics["learner/steps"] == 1.0
    assert metrics["policy/ratio"] == pytest.approx(np.exp(20.0), rel=1e-5)
    assert torch.isfinite(torch.tensor(list(metrics.values()))).all()
