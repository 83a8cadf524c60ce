"""Advantages of whole episodes: golden values, independent loops, and law 4."""

from __future__ import annotations

import numpy as np
import pytest
from algorithm_batches import episode, group, random_groups, terms_of
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms import ADVANTAGES, Recipe
from arborl.algorithms.episode_advantages import (
    gdpo,
    grpo,
    maxrl,
    opo,
    pass_k,
    rae,
    reinforce,
    remax,
    rloo,
    split_shares,
)
from arborl.algorithms.loss_table import by_episode, by_length, by_token
from arborl.config.algorithm_config import GROUP_ADVANTAGES, AlgorithmConfig
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Group, Terms

REWARD = st.floats(-100, 100, allow_nan=False)
GROUPS = st.lists(st.lists(REWARD, min_size=1, max_size=6), min_size=1, max_size=4)


def credited(groups: list[Group], terms: Terms, **settings) -> np.ndarray:
    return Recipe(AlgorithmConfig(**settings)).credit(groups, terms).advantage


def by_episodes(groups: list[Group], **settings) -> list[float]:
    """The advantage of each episode, where all its terms share it."""
    terms = terms_of(groups)
    found = credited(groups, terms, **settings)
    each = [found[terms.episode == number] for number in range(terms.episode.max() + 1)]
    assert all(np.ptp(values) == 0 for values in each)
    return [float(values[0]) for values in each]


def test_grpo_golden_values():
    # rewards 1, 0, 0, 1: mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 0.57735
    rewards = [np.array([1.0, 0.0, 0.0, 1.0])]
    assert grpo(rewards)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert grpo(rewards, std="group")[0] == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / (1 / 3**0.5 + 1e-6))
    # the batch's deviation is over all six episodes, one vote each: 1 0 0 1 3 1 -> mean 1, variance (0+1+1+0+4+0)/5
    both = grpo([*rewards, np.array([3.0, 1.0])], std="batch")
    assert both[1] == pytest.approx(np.array([1.0, -1.0]) / (1.2**0.5 + 1e-6))
    assert grpo(rewards, baseline="none")[0].tolist() == [1.0, 0.0, 0.0, 1.0]


@given(GROUPS)
def test_grpo_equals_a_loop(rewards):
    found = grpo([np.array(row) for row in rewards], std="group")
    for values, group_ in zip(found, rewards, strict=True):
        mean = sum(group_) / len(group_)
        for value, reward in zip(values, group_, strict=True):
            if len(set(group_)) < 2:
                assert value == 0.0
            else:
                variance = sum((r - mean) ** 2 for r in group_) / (len(group_) - 1)
                assert value == pytest.approx((reward - mean) / (variance**0.5 + 1e-6), abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16), st.floats(0, 1))
def test_a_groups_deviation_never_makes_an_advantage_large(rewards, scale):
    """However little the rewards differ: (n - 1) / sqrt(n) is the most that one of n can stand out."""
    found = grpo([np.array(rewards) * scale**8], std="group")[0]
    assert np.abs(found).max() <= (len(rewards) - 1) / len(rewards) ** 0.5 + 1e-6


@given(GROUPS)
def test_rloo_equals_a_loop_over_the_others(rewards):
    for values, group_ in zip(rloo([np.array(row) for row in rewards]), rewards, strict=True):
        for i, value in enumerate(values):
            others = [r for j, r in enumerate(group_) if j != i]
            expected = group_[i] - sum(others) / len(others) if others and len(set(group_)) > 1 else 0.0
            assert value == pytest.approx(expected, abs=1e-9)


def test_rloo_opo_maxrl_remax_reinforce_golden_values():
    rewards = np.array([2.0, 0.0, 1.0])
    assert rloo([rewards])[0].tolist() == [1.5, -1.5, 0.0]  # 2 - 0.5, 0 - 1.5, 1 - 1
    assert opo([rewards], [np.array([1.0, 2.0, 1.0])])[0].tolist() == [1.25, -0.75, 0.25]  # (2 + 0 + 1) / 4
    assert maxrl([rewards])[0].tolist() == [1.0, -1.0, 0.0]  # mean 1
    assert remax([rewards], [0.5])[0].tolist() == [1.5, -0.5, 0.5]
    assert reinforce([rewards])[0].tolist() == [2.0, 0.0, 1.0]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=8))
def test_maxrl_has_the_gradient_of_the_log_of_the_success_rate(outcomes):
    # mean of A times score function = mean over successes of the score function, minus the plain mean
    rewards = np.array(outcomes, dtype=float)
    scores = np.random.default_rng(0).normal(size=len(rewards))
    found = (maxrl([rewards])[0] * scores).mean()
    expected = scores[rewards == 1].mean() - scores.mean() if 0 < rewards.sum() < len(rewards) else 0.0
    assert found == pytest.approx(expected, abs=1e-9)


@given(GROUPS)
def test_pass_k_is_the_best_reward_minus_the_best_without_the_episode(rewards):
    """Leave one out of max@k, arXiv 2503.19595."""
    for values, group_ in zip(pass_k([np.array(row) for row in rewards]), rewards, strict=True):
        for i, value in enumerate(values):
            others = [r for j, r in enumerate(group_) if j != i]
            assert value == (max(group_) - max(others) if others else 0.0)


def test_pass_k_divides_by_the_deviation_if_asked():
    rewards = [np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0])]
    assert pass_k(rewards, std="group")[0] == pytest.approx([2.0 / (rewards[0].std(ddof=1) + 1e-6), 0.0, 0.0])
    assert pass_k(rewards, std="batch")[0] == pytest.approx([2.0 / (np.concatenate(rewards).std(ddof=1) + 1e-6), 0, 0])
    assert pass_k(rewards)[1].tolist() == [0.0, 0.0, 0.0]  # two share the lead


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="must not be negative"):
        maxrl([np.array([-1.0, 1.0])])


def test_gdpo_golden_values_and_loop():
    random = np.random.default_rng(1)
    columns = {name: [random.normal(size=3), random.normal(size=4)] for name in ("right", "short")}
    found = gdpo(columns, {"short": 0.3})
    for number in range(2):
        right, short = columns["right"][number], columns["short"][number]
        expected = [
            (r - right.mean()) / (right.std(ddof=1) + 1e-6) + 0.3 * (s - short.mean()) / (short.std(ddof=1) + 1e-6)
            for r, s in zip(right, short, strict=True)
        ]
        assert found[number] == pytest.approx(expected, abs=1e-12)
    # a reward a thousand times larger does not drown the other
    small, large = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1000.0])
    a, b, c = gdpo({"small": [small], "large": [large]})[0]
    assert a == pytest.approx(c, abs=1e-3)
    assert a > b


def test_rae_moves_once_a_step_and_remembers():
    groups = [group(episode(1.0), episode(0.0), source="ttt", role="x"), group(episode(1.0), source="ttt", role="o")]
    algorithm = Recipe(AlgorithmConfig(name="rae", args={"baseline_decay": 0.8}))
    terms = terms_of(groups)
    first = algorithm.credit(groups, terms)
    assert first.advantage.tolist() == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]  # new roles start at the step's mean
    assert algorithm.state() == {"baselines": {"ttt/x": 0.5, "ttt/o": 1.0}}
    lost = [group(episode(0.0), source="ttt", role="o")]
    again = Recipe(AlgorithmConfig(name="rae", args={"baseline_decay": 0.8}))
    again.load_state(algorithm.state())
    assert again.credit(lost, terms_of(lost)).advantage == pytest.approx(-0.8)  # 0.8 * 1 + 0.2 * 0
    assert again.state()["baselines"] == pytest.approx({"ttt/x": 0.5, "ttt/o": 0.8})


@pytest.mark.parametrize("name", sorted(GROUP_ADVANTAGES))
@given(reward=st.floats(0, 1), size=st.integers(1, 4))
def test_every_advantage_that_compares_gives_exactly_zero_to_one_alone_and_to_equals(name, reward, size):
    flat = group(*(episode(turns=[reward, reward], states=["a", "b"]) for _ in range(size)))
    other = group(episode(turns=[1.0, 0.5], states=["a", "b"]), episode(turns=[0.25, 0.0], states=["a", "b"]))
    terms = terms_of([flat, other])
    settings = {"name": name, "gamma": 1.0} if name in ("gigpo", "starpo", "turn_discounted") else {"name": name}
    found = credited([flat, other], terms, **settings)
    if name != "step_reinforce":  # which compares turns, and those differ within an episode
        assert found[terms.tree == 0].tolist() == [0.0] * int((terms.tree == 0).sum())
    elif size == 1:
        assert not found[terms.tree == 0].any()
    assert found[terms.tree == 1].any()


def test_a_failed_episode_leaves_baseline_and_loss_together():
    groups = [group(episode(1.0), episode(0.0), episode(50.0, failed=True))]
    terms = Recipe(AlgorithmConfig(std="none")).credit(groups, build_token_trees(groups).terms)
    assert terms.advantage.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert terms.weight.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_advantage_looks_at_a_failed_episode(name):
    config = AlgorithmConfig(name="ppo" if name == "gae" else name)
    good = [group(episode(1.0), episode(0.0))] if name == "maxrl" else random_groups(3)
    with_failed = [Group(g.task, [episode(-1e6, failed=True), *g.episodes], g.greedy) for g in good]
    terms = terms_of(good)
    wanted = ADVANTAGES[name](good, terms, config, {})[0]
    assert wanted.any()
    assert np.array_equal(ADVANTAGES[name](with_failed, terms, config, {})[0], wanted)


def test_an_episode_has_one_vote_whatever_its_number_of_branches():
    many, few = episode(1.0, tokens=[2] * 5, turns=[0.0] * 5, rewards={"r": 1.0}), episode(0.0)
    groups = [group(many, few)]
    terms = Recipe(AlgorithmConfig(aggregation="episode", std="none")).credit(groups, build_token_trees(groups).terms)
    assert terms.weight[terms.episode == 0].sum() == pytest.approx(0.5)
    assert terms.weight[terms.episode == 1].sum() == pytest.approx(0.5)
    assert set(terms.advantage.tolist()) == {0.5, -0.5}  # the mean is over 2 episodes, not over 6 rows


def test_weights_add_up_to_one_and_fixed_ones_do_not_know_the_length():
    ids = np.array([0, 0, 0, 2, 2, 5])
    assert by_token(ids).tolist() == pytest.approx([1 / 6] * 6)
    assert by_episode(ids).tolist() == pytest.approx([1 / 9] * 3 + [1 / 6] * 2 + [1 / 3])
    assert by_length(ids, 4).tolist() == pytest.approx([1 / 12] * 6)
    assert len(by_token(ids[:0])) == len(by_episode(ids[:0])) == len(by_length(ids[:0], 4)) == 0


def test_aggregation_by_call_gives_every_call_one_vote():
    groups = [group(episode(1.0, tokens=[1, 3], turns=[0.0, 0.0], rewards={"r": 1.0}), episode(0.0, tokens=4))]
    terms = Recipe(AlgorithmConfig(aggregation="call")).credit(groups, build_token_trees(groups).terms)
    assert terms.weight.tolist() == pytest.approx([1 / 3] + [1 / 9] * 3 + [1 / 12] * 4)


def test_split_gives_branches_parts_of_the_advantage_and_never_of_the_reward():
    assert split_shares(4, "broadcast").tolist() == [1.0] * 4
    assert split_shares(4, "last").tolist() == [0.0, 0.0, 0.0, 1.0]
    assert split_shares(4, "uniform").tolist() == [0.25] * 4
    assert split_shares(3, "geometric", 0.5).tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    forgetful = episode(1.0, tokens=[1, 1, 1], turns=[0.0] * 3, rewards={"r": 1.0})
    forgetful.calls[1] = type(forgetful.calls[1])((9,), forgetful.calls[1].completion, 1)  # a context of its own
    groups = [group(forgetful, episode(0.0, tokens=1))]
    terms = terms_of(groups)
    # calls 0 and 2 are one branch, the last; call 1 is another
    assert credited(groups, terms, std="none", split="last").tolist() == [0.5, 0.0, 0.5, -0.5]
    assert credited(groups, terms, std="none", split="uniform").tolist() == [0.25, 0.25, 0.25, -0.5]
    found = credited(groups, terms, std="none", split="geometric", args={"split_ratio": 0.5})
    assert found.tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 3, -0.5])


def test_named_rewards_reach_gdpo_with_the_kl_penalty_as_one_of_them():
    groups = [group(episode(rewards={"a": 1.0, "b": 0.0}), episode(rewards={"a": 0.0, "b": 9.0}))]
    assert by_episodes(groups, advantage="gdpo") == pytest.approx([0.0, 0.0], abs=1e-6)
    weighted = by_episodes(groups, advantage="gdpo", args={"reward_weights": {"b": 0.0}})
    assert weighted == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    terms = terms_of(groups)
    off = credited(groups, terms, advantage="gdpo", args={"reward_weights": {"b": 0.0}})
    on = credited(
        groups, terms, advantage="gdpo", args={"reward_weights": {"b": 0.0}}, kl={"coef": 0.1, "where": "reward"}
    )
    assert not np.allclose(off, on)


@pytest.mark.parametrize("name", [*ADVANTAGES])
@pytest.mark.parametrize("by", ["episode", "token"])
def test_every_advantage_is_whitened_over_episodes_or_tokens_as_loops_would(name, by):
    groups = random_groups(3, groups=4)
    if name == "maxrl":
        for one in (e for g in groups for e in g.episodes):
            one.rewards = {"env": abs(one.reward)}
    terms = terms_of(groups)
    config = AlgorithmConfig(advantage=name, loss="ppo")
    plain = Recipe(config).credit(groups, terms).advantage.tolist()
    found = Recipe(AlgorithmConfig(advantage=name, loss="ppo", whiten=by)).credit(groups, terms)
    owner = terms.episode.tolist()
    votes = [1.0 if by == "token" else 1 / owner.count(e) for e in owner]
    n = sum(votes)
    mean = sum(v * x for v, x in zip(votes, plain, strict=True)) / n
    spread = sum(v * (x - mean) ** 2 for v, x in zip(votes, plain, strict=True)) / (n - 1)
    scale = (spread + 1e-8) ** 0.5 if by == "token" else spread**0.5 + 1e-6
    off = 0.0 if by == "episode" and config.compares_episodes else mean
    assert found.advantage == pytest.approx([(x - off) / scale for x in plain], abs=1e-9)
    if by == "token":
        assert found.advantage.mean() == pytest.approx(0.0, abs=1e-9)
        assert found.advantage.std(ddof=1) == pytest.approx(1.0, abs=1e-6)


def test_a_flat_group_stays_at_exactly_0_when_episodes_are_whitened():
    groups = [group(episode(1.0), episode(1.0)), group(episode(3.0), episode(0.0, tokens=5))]
    config = AlgorithmConfig(whiten=True, skip_zero_variance=False)
    found = Recipe(config).credit(groups, terms_of(groups)).advantage
    assert found[:4].tolist() == [0.0] * 4
    by_token = Recipe(AlgorithmConfig(whiten="token", skip_zero_variance=False)).credit(groups, terms_of(groups))
    assert (by_token.advantage[:4] != 0).all()  # as in the systems that do so


def test_an_empty_batch_and_one_token_are_whitened_to_nothing():
    one = [group(episode(1.0, tokens=1))]
    for how in ("token", "episode"):
        config = AlgorithmConfig(advantage="reinforce", loss="pg", whiten=how)
        assert Recipe(config).credit([], terms_of([])).advantage.tolist() == []
        assert Recipe(config).credit(one, terms_of(one)).advantage.tolist() == [0.0]


def test_rae_does_not_depend_on_the_order_of_episodes():
    one, _ = rae([np.array([1.0, 0.0, 5.0])], ["a"], {"a": 0.3})
    other, _ = rae([np.array([5.0, 1.0, 0.0])], ["a"], {"a": 0.3})
    assert sorted(one[0]) == pytest.approx(sorted(other[0]))


@pytest.mark.parametrize("std", ["none", "group", "batch"])
@given(reward=REWARD, size=st.integers(1, 6), other=st.lists(REWARD, min_size=2, max_size=5))
def test_a_group_of_one_and_a_flat_group_have_advantage_exactly_zero(std, reward, size, other):
    one, flat, _ = grpo([np.array([reward]), np.full(size, reward), np.array(other)], std=std)
    assert one.tolist() == [0.0]
    assert flat.tolist() == [0.0] * size


@given(st.lists(REWARD, min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing(rewards):
    for rule in (grpo, rloo):
        assert rule([np.array(rewards)])[0].sum() == pytest.approx(0.0, abs=1e-9)
