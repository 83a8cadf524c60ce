"""Law 4 and golden values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms.advantages import grpo
from arborl.algorithms.algorithm import Grpo, by_episode, by_token
from arborl.algorithms.kl import k1, k2, k3
from arborl.algorithms.losses import TermBatch, ppo_clip
from arborl.config.run import AlgorithmConfig
from arborl.rollout.tree import plant
from arborl.types import Call, Completion, Episode, Failure, Finish, Group, Task

REWARD = st.floats(-100, 100, allow_nan=False)


def episode(reward: float, *, failed: bool = False, calls: int = 1, tokens: int = 2) -> Episode:
    made = [Call((1, i), Completion(tuple(range(tokens)), (-1.0,) * tokens, Finish.STOP), turn=i) for i in range(calls)]
    failure = Failure("environment 'x'", "ValueError", "boom") if failed else None
    return Episode("e", Task("t"), calls=made, rewards={"r": reward}, failure=failure)


def test_grpo_golden_values():
    # rewards 1, 0, 0, 1: mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735
    rewards = [np.array([1.0, 0.0, 0.0, 1.0])]
    assert grpo(rewards)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert grpo(rewards, std="group")[0] == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / (1 / 3**0.5 + 1e-6))
    # the batch's deviation is over all six episodes, one vote each: 1 0 0 1 3 1 -> mean 1, variance (0+1+1+0+4+0)/5
    both = grpo([*rewards, np.array([3.0, 1.0])], std="batch")
    assert both[1] == pytest.approx(np.array([1.0, -1.0]) / (1.2**0.5 + 1e-6))
    assert grpo(rewards, baseline="none")[0].tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@given(reward=REWARD, size=st.integers(1, 6), other=st.lists(REWARD, min_size=2, max_size=5))
def test_a_group_of_one_and_a_flat_group_have_advantage_exactly_zero(std, reward, size, other):
    one, flat, _ = grpo([np.array([reward]), np.full(size, reward), np.array(other)], std=std)
    assert one.tolist() == [0.0]
    assert flat.tolist() == [0.0] * size


@given(st.lists(REWARD, min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing(rewards):
    assert grpo([np.array(rewards)])[0].sum() == pytest.approx(0.0, abs=1e-9)


def test_a_failed_episode_leaves_baseline_and_loss_together():
    group = Group(Task("t"), [episode(1.0), episode(0.0), episode(50.0, failed=True)])
    forest = plant([group])
    terms = Grpo(AlgorithmConfig()).credit([group], forest.terms)
    assert terms.advantage.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert terms.weight.sum() == pytest.approx(1.0)


def test_an_episode_has_one_vote_whatever_its_number_of_branches():
    many, few = episode(1.0, calls=5), episode(0.0, calls=1)
    group = Group(Task("t"), [many, few])
    terms = Grpo(AlgorithmConfig(aggregation="episode")).credit([group], plant([group]).terms)
    assert terms.weight[terms.episode == 0].sum() == pytest.approx(0.5)
    assert terms.weight[terms.episode == 1].sum() == pytest.approx(0.5)
    assert set(terms.advantage.tolist()) == {0.5, -0.5}  # the mean is over 2 episodes, not over 6 rows


def test_weights_add_up_to_one():
    ids = np.array([0, 0, 0, 2, 2, 5])
    assert by_token(ids).tolist() == pytest.approx([1 / 6] * 6)
    assert by_episode(ids).tolist() == pytest.approx([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3])
    assert len(by_token(ids[:0])) == len(by_episode(ids[:0])) == 0


def test_flat_groups_are_skipped_only_when_asked():
    flat, live = Group(Task("t"), [episode(1.0), episode(1.0)]), Group(Task("t"), [episode(1.0), episode(0.0)])
    dead = Group(Task("t"), [episode(1.0, failed=True), episode(0.0, failed=True)])
    assert Grpo(AlgorithmConfig()).keep([flat, live, dead]) == [live]
    assert Grpo(AlgorithmConfig(skip_zero_variance=False)).keep([flat, live, dead]) == [flat, live]


def test_kl_estimators_golden_values():
    policy, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    assert k1(policy, reference).tolist() == pytest.approx([0.5, -1.0])
    assert k2(policy, reference).tolist() == pytest.approx([0.125, 0.5])
    assert k3(policy, reference).tolist() == pytest.approx([np.exp(-0.5) - 1 + 0.5, np.exp(1) - 1 - 1])


def test_k1_and_k3_are_unbiased_over_a_whole_distribution():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = float((p * (p / q).log()).sum())
    assert float((p * k1(p.log(), q.log())).sum()) == pytest.approx(exact)
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(exact)


def test_ppo_clip_golden_values():
    # ratios 1.5 and 0.5 with clip 0.2: gains beyond 1.2 (or below 0.8 for a bad token) are not rewarded
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).double().log()
    terms = TermBatch(torch.zeros(4).double(), torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), *[torch.zeros(4)] * 3)
    loss, seen = ppo_clip(new, terms, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert seen["policy/clipped"].tolist() == [1.0, 0.0, 0.0, 1.0]
