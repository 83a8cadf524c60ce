"""Importance weights, staleness, and the penalty for length."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from algorithm_batches import episode, group, random_groups, terms_of
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms import Recipe
from arborl.algorithms.importance_weights import (
    importance_weights,
    masked,
    overlong_penalty,
    ratios,
    staleness,
    truncated,
)
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.types import FinishReason, StopReason


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=10))
def test_ratios_equal_a_loop(rows):
    gaps, of = [gap for gap, _ in rows], [owner for _, owner in rows]
    by_token = [math.exp(gap) for gap in gaps]
    assert ratios(np.array(gaps)) == pytest.approx(by_token)
    found = ratios(np.array(gaps), np.array(of))
    for i, owner in enumerate(of):
        own = [gap for gap, other in rows if other == owner]
        assert found[i] == pytest.approx(math.exp(sum(own) / len(own)))


def test_golden_values():
    ratio = np.array([0.25, 1.0, 2.5, 6.0])
    assert truncated(ratio, 2.0).tolist() == [0.25, 1.0, 2.0, 2.0]
    assert masked(ratio, 0.0, 2.0).tolist() == [0.25, 1.0, 0.0, 0.0]
    assert importance_weights("icepop", ratio, 0.5, 5.0).tolist() == [0.0, 1.0, 2.5, 0.0]
    assert staleness(np.array([7, 5, 7]), 0.9).tolist() == pytest.approx([1.0, 0.81, 1.0])
    assert len(staleness(np.zeros(0, dtype=np.int64), 0.9)) == 0
    assert [overlong_penalty(n, 100, 20, 0.5) for n in (80, 90, 100, 999)] == pytest.approx([0.0, -0.25, -0.5, -0.5])


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({"kind": "tis"}, None),
        ({"kind": "mis", "level": "sequence", "high": 1.5}, "episode"),
        ({"kind": "tis", "level": "sequence"}, "call"),
        ({"kind": "icepop"}, None),
    ],
)
def test_a_guard_multiplies_the_advantage_by_its_factor(settings, level):
    groups = random_groups(2)
    terms = terms_of(groups)
    sequence = {"sequence": level} if level else {}
    algorithm = Recipe(AlgorithmConfig(importance_weights=settings, args=sequence))
    assert algorithm.needs.proximal
    assert algorithm.config.ratio_policy == "proximal"
    gap = terms.proximal - terms.logprob
    ratio = ratios(gap, getattr(terms, level) if level else None)
    factor = importance_weights(settings["kind"], ratio, *algorithm.config.importance_weights.bounds)
    plain = Recipe(AlgorithmConfig()).credit(groups, terms).advantage
    assert algorithm.credit(groups, terms).advantage == pytest.approx(plain * factor)
    assert algorithm.metrics()["importance_weight/clipped"] == pytest.approx((factor != ratio).mean())


def test_older_tokens_count_less():
    groups = [group(episode(1.0, version=3), episode(0.0, version=1))]
    found = Recipe(AlgorithmConfig(staleness_decay=0.5, std="none")).credit(groups, terms_of(groups))
    assert found.advantage.tolist() == [0.5, 0.5, -0.125, -0.125]


def test_the_soft_penalty_enters_the_reward_and_the_episode_stays_as_it_was():
    long, short = episode(1.0, tokens=9), episode(1.0, tokens=2)
    algorithm = Recipe(AlgorithmConfig(std="none", overlong={"penalty": 1.0, "max_tokens": 10, "buffer": 4}))
    groups = algorithm.keep([group(long, short)])  # not flat: the long one has 0.25
    found = algorithm.credit(groups, terms_of(groups))
    assert found.advantage.tolist() == pytest.approx([-0.375] * 9 + [0.375] * 2)
    assert long.rewards == {"r": 1.0}


@pytest.mark.parametrize(
    "cut", [{"stop": StopReason.CONTEXT_FULL}, {"stop": StopReason.MAX_TURNS}, {"finish": FinishReason.LENGTH}], ids=str
)
def test_filtered_episodes_leave_baseline_and_loss_together(cut):
    algorithm = Recipe(AlgorithmConfig(std="none", overlong={"filter": True}))
    groups = algorithm.keep([group(episode(1.0), episode(0.0), episode(9.0, **cut))])
    assert [e.reward for e in groups[0].episodes] == [1.0, 0.0]
    assert {name: count for name, count in algorithm.metrics().items() if count} == {"dropped/overlong": 1.0}
    assert set(algorithm.credit(groups, terms_of(groups)).advantage) == {0.5, -0.5}


def test_a_kl_penalty_in_the_reward_is_summed_over_the_episode_and_adapts():
    groups = [group(episode(1.0, tokens=2), episode(1.0, tokens=1))]
    reference = np.array([-1.5, -2.0, -1.0])
    terms = dataclasses.replace(terms_of(groups), proximal=np.full(3, -1.0), reference=reference)
    kl = {"coef": 0.2, "estimator": "k1", "where": "reward", "target": 0.5, "horizon": 20}
    algorithm = Recipe(AlgorithmConfig(std="none", kl=kl))
    assert algorithm.needs.reference
    assert algorithm.needs.proximal  # the engine's log-probabilities differ slightly, which is no KL
    # KL 0.5 + 1.0 and 0: rewards 0.7 and 1.0
    assert algorithm.credit(groups, terms).advantage.tolist() == pytest.approx([-0.15, -0.15, 0.15])
    assert algorithm.metrics() == pytest.approx({"algorithm/kl": 0.75, "algorithm/kl_coef": 0.2})
    # 0.75 / 0.5 - 1 is held at 0.2; 2 episodes of 20
    assert algorithm.state() == pytest.approx({"kl_coef": 0.2 * 1.02})
    again = Recipe(AlgorithmConfig(std="none", kl=kl))
    again.load_state(algorithm.state())
    again.credit(groups, terms)
    assert again.metrics()["algorithm/kl_coef"] == pytest.approx(0.204)
