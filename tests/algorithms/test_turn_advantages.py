"""Credit by turn and by token: golden values and independent loops."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from algorithm_batches import episode, group, random_groups, terms_of
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms import Recipe
from arborl.algorithms.reward_arrays import cut_rows, turn_rewards
from arborl.algorithms.turn_advantages import discounted, gae, gigpo, reinforce_plus_plus
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.load_config import load
from arborl.rewards import Rewards
from arborl.rewards.answers import environment
from arborl.training_run.part_factory import RunPartFactory
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, StopReason, Task, Turn

NUMBERS = st.lists(st.floats(-10, 10), min_size=1, max_size=6)


def returns_of(one, gamma: float) -> list[float]:
    rewards = turn_rewards(one).tolist()
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@given(NUMBERS, st.floats(0, 1), st.floats(0, 1), st.integers(0, 100))
def test_gae_equals_the_sum_of_discounted_surprises(rewards, gamma, lam, seed):
    values = np.random.default_rng(seed).normal(size=len(rewards))
    advantage, target = gae(np.array(rewards), values, gamma, lam)
    surprise = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < len(rewards) else 0.0) - values[t] for t in range(len(rewards))
    ]
    for t in range(len(rewards)):
        expected = sum((gamma * lam) ** (k - t) * surprise[k] for k in range(t, len(rewards)))
        assert advantage[t] == pytest.approx(expected, abs=1e-6)
        assert target[t] == pytest.approx(expected + values[t], abs=1e-6)


def test_gae_by_turn_uses_the_value_of_the_first_token():
    groups = [group(episode(turns=[0.0, 1.0], tokens=[2, 1]))]
    terms = dataclasses.replace(terms_of(groups), value=np.array([0.5, 99.0, 0.25]))
    config = AlgorithmConfig(advantage="gae", args={"gae_lambda": 0.5})
    found = Recipe(config).credit(groups, terms)
    assert found.advantage.tolist() == [0.125, 0.125, 0.75]  # the example of `gae`; 99 is never read
    assert found.target.tolist() == [0.625, 0.625, 1.0]


def test_gae_by_token_puts_a_turn_reward_at_the_turns_last_token():
    groups = [group(episode(turns=[1.0, 0.0], tokens=[2, 1]))]
    terms = dataclasses.replace(terms_of(groups), value=np.zeros(3))
    config = AlgorithmConfig(advantage="gae", gamma=0.5, args={"gae_level": "token", "gae_lambda": 1.0})
    assert Recipe(config).credit(groups, terms).advantage.tolist() == [0.5, 1.0, 0.0]


def test_gae_with_lambda_one_and_no_critic_is_the_return():
    groups = random_groups(5)
    terms = dataclasses.replace(terms_of(groups), value=np.zeros(len(terms_of(groups))))
    found = Recipe(AlgorithmConfig(advantage="gae", gamma=0.9, args={"gae_lambda": 1.0})).credit(groups, terms)
    for number, one in enumerate(e for g in groups for e in g.episodes):
        expected = returns_of(one, 0.9)
        rows = terms.episode == number
        assert found.advantage[rows] == pytest.approx([expected[t] for t in terms.turn[rows]])


def test_whitened_advantages_have_mean_0_and_deviation_1_over_episodes():
    groups = random_groups(6)
    terms = terms_of(groups)
    found = Recipe(AlgorithmConfig(name="ppo")).credit(groups, terms)
    plain = Recipe(AlgorithmConfig(name="ppo", whiten=False)).credit(groups, terms)
    means, squares = [], []
    middle = np.mean([plain.advantage[plain.episode == e].mean() for e in np.unique(plain.episode)])
    for e in np.unique(found.episode):
        means.append(found.advantage[found.episode == e].mean())
        squares.append(((plain.advantage[plain.episode == e] - middle) ** 2).mean())
    assert np.mean(means) == pytest.approx(0.0, abs=1e-9)
    spread = (sum(squares) / (len(squares) - 1)) ** 0.5
    assert found.advantage == pytest.approx((plain.advantage - middle) / (spread + 1e-6))
    assert found.target == pytest.approx(plain.target)  # the critic's scale is the rewards'


def gigpo_by_hand(groups: list[Group], gamma: float, omega: float, std: bool) -> dict[tuple[int, int], float]:
    """(episode, turn) -> advantage, by loops over plain lists."""

    def compare(rows: list[tuple[int, float]]) -> dict[int, float]:
        """Rows are (episode, value); index in rows -> normalised value."""
        episodes = {e for e, _ in rows}
        if len(episodes) < 2 or len({v for _, v in rows}) < 2:
            return dict.fromkeys(range(len(rows)), 0.0)
        votes = [1 / sum(other == e for other, _ in rows) for e, _ in rows]
        mean = sum(w * v for w, (_, v) in zip(votes, rows, strict=True)) / len(episodes)
        variance = sum(w * (v - mean) ** 2 for w, (_, v) in zip(votes, rows, strict=True)) / (len(episodes) - 1)
        scale = variance**0.5 + 1e-6 if std else 1.0
        return {i: (v - mean) / scale for i, (_, v) in enumerate(rows)}

    out: dict[tuple[int, int], float] = {}
    number = 0
    for one in groups:
        mine = list(range(number, number + len(one.episodes)))
        whole = compare([(e, one.episodes[e - number].reward) for e in mine])
        anchors: dict[str, list[tuple[int, int, float]]] = {}
        for place, e in enumerate(mine):
            played = one.episodes[e - number]
            for t, value in enumerate(returns_of(played, gamma)):
                out[e, t] = whole[place]
                if played.turns[t].state_key:
                    anchors.setdefault(played.turns[t].state_key, []).append((e, t, value))
        for rows in anchors.values():
            for i, value in compare([(e, v) for e, _, v in rows]).items():
                out[rows[i][0], rows[i][1]] += omega * value
        number += len(one.episodes)
    return out


@pytest.mark.parametrize("std", ["none", "group"])
@pytest.mark.parametrize("seed", range(5))
def test_gigpo_equals_loops_over_task_groups_and_states(seed, std):
    groups = random_groups(seed)
    terms = terms_of(groups)
    found = (
        Recipe(AlgorithmConfig(name="gigpo", std=std, gamma=0.8, args={"step_weight": 0.5}))
        .credit(groups, terms)
        .advantage
    )
    expected = gigpo_by_hand(groups, 0.8, 0.5, std == "group")
    wanted = [expected[e, t] for e, t in zip(terms.episode, terms.turn, strict=True)]
    assert found == pytest.approx(wanted, abs=1e-9)


def test_equal_states_of_different_tasks_are_not_compared():
    won, lost = episode(turns=[1.0], states=["s"]), episode(turns=[0.0], states=["s"])
    apart = [group(won, episode(turns=[1.0], states=["x"])), group(lost, episode(turns=[0.0], states=["x"]))]
    found = Recipe(AlgorithmConfig(name="gigpo")).credit(apart, terms_of(apart)).advantage
    assert not found.any()


def test_a_state_without_a_name_is_no_state():
    none = gigpo(np.array([1.0, 0.0]), np.array([0, 0]), np.array([1.0, 0.0]), np.array([0, 1]), ["", ""])
    assert none.tolist() == [0.5, -0.5]  # whole episodes only


def test_step_reinforce_starpo_and_turn_discount_equal_loops():
    groups = random_groups(8)
    terms = terms_of(groups)
    episodes = [e for g in groups for e in g.episodes]
    of = [n for n, g in enumerate(groups) for _ in g.episodes]
    step = Recipe(AlgorithmConfig(name="step_reinforce", gamma=0.7)).credit(groups, terms).advantage
    star = Recipe(AlgorithmConfig(name="starpo", gamma=0.7, std="none")).credit(groups, terms).advantage
    fade = Recipe(AlgorithmConfig(name="turn_discounted", gamma=0.7)).credit(groups, terms).advantage
    for row, (e, t) in enumerate(zip(terms.episode, terms.turn, strict=True)):
        mates = [other for other, g in zip(episodes, of, strict=True) if g == of[e]]
        mean = np.mean([np.mean(returns_of(other, 0.7)) for other in mates])
        assert step[row] == pytest.approx(returns_of(episodes[e], 0.7)[t] - mean, abs=1e-9)
        starts = [returns_of(other, 0.7)[0] for other in mates]
        assert star[row] == pytest.approx(returns_of(episodes[e], 0.7)[0] - np.mean(starts), abs=1e-9)
        whole = episodes[e].reward - np.mean([other.reward for other in mates])
        last = len(episodes[e].turns) - 1
        assert fade[row] == pytest.approx(0.7 ** (last - t) * whole, abs=1e-9)


def test_reinforce_plus_plus_golden_values():
    # to go: 2 1 | -1; one vote each: means 1.5 and -1, mean 0.25; variance (((1.75^2 + 0.75^2) / 2) + 1.25^2) / 1
    found = reinforce_plus_plus(np.array([1.0, 1.0, -1.0]), np.array([0, 0, 1]))
    spread = ((1.75**2 + 0.75**2) / 2 + 1.25**2) ** 0.5 + 1e-6
    assert found == pytest.approx(np.array([1.75, 0.75, -1.25]) / spread)


def test_reinforce_plus_plus_takes_the_kl_of_the_tokens_ahead_off_the_reward():
    groups = [group(episode(1.0, tokens=2), episode(0.0, tokens=1))]
    terms = dataclasses.replace(
        terms_of(groups), proximal=np.array([-1.0, -1.0, -1.0]), reference=np.array([-2.0, -3.0, -1.0])
    )
    kl = {"coef": 0.1, "estimator": "k1", "where": "reward"}
    found = Recipe(AlgorithmConfig(name="reinforce_plus_plus", kl=kl)).credit(groups, terms).advantage
    raw = np.array([1.0 - 0.1 - 0.2, 1.0 - 0.2, 0.0])
    mean = (raw[:2].mean() + raw[2]) / 2
    spread = (((raw[:2] - mean) ** 2).mean() + (raw[2] - mean) ** 2) ** 0.5
    assert found == pytest.approx((raw - mean) / (spread + 1e-6))
    centred = np.array([0.5 - 0.3, 0.5 - 0.2, -0.5])
    base = Recipe(AlgorithmConfig(name="reinforce_plus_plus_baseline", kl=kl)).credit(groups, terms).advantage
    mean = (centred[:2].mean() + centred[2]) / 2
    spread = (((centred[:2] - mean) ** 2).mean() + (centred[2] - mean) ** 2) ** 0.5
    assert base == pytest.approx(centred / (spread + 1e-6))


@given(NUMBERS, st.floats(-3, 3), st.floats(-5, 5))
def test_turn_rewards_are_what_the_environment_gave_times_its_weight(given_turns, weight, style):
    """However nearly they cancel; what else there is stands at the last turn."""
    turns = [Turn(Message("assistant"), reward=value) for value in given_turns]
    one = Episode("e", Task("t"), turns=turns)

    def judged(episode):
        return style

    scored = Rewards([("environment", environment, weight), ("judged", judged, 2.0)], seconds=60)
    asyncio.run(scored.score([Group(one.task, [one])]))
    found = turn_rewards(one)
    assert found[:-1].tolist() == [weight * value for value in given_turns[:-1]]
    assert found[-1] == pytest.approx(weight * given_turns[-1] + 2.0 * style, abs=1e-9)
    assert found.sum() == pytest.approx(one.reward, abs=1e-9)


def test_a_run_by_its_configuration_credits_turns():
    """The reward `env` of a run's configuration keeps Sokoban's own -0.1 per step."""
    config = load(None, ["env=sokoban", "rewards=[{name: env, weight: 0.5}]"])
    one = Episode("e", Task("t"), turns=[Turn(Message("assistant"), reward=r) for r in (-0.1, 0.9, -0.1, -0.6)])
    asyncio.run(RunPartFactory(config, {}).rewards().score([Group(one.task, [one])]))
    assert turn_rewards(one) == pytest.approx([-0.05, 0.45, -0.05, -0.3])


def test_turn_rewards_add_up_to_the_episodes_reward():
    weighted = episode(rewards={"env": 1.0, "style": 0.25}, turns=[1.0, 1.0], turn_weight=0.5)
    assert turn_rewards(weighted).tolist() == [0.5, 0.75]
    judged = episode(rewards={"judge": 2.0}, turns=[1.0, 1.0])  # the environment's does not count
    assert turn_rewards(judged).tolist() == [0.0, 2.0]
    cancelled = episode(rewards={"env": 0.0}, turns=[1.0, -1.0])
    assert turn_rewards(cancelled).tolist() == [1.0, -1.0]
    silent = episode(3.0)
    silent.turns.clear()
    assert turn_rewards(silent).tolist() == [3.0]


def test_a_reward_of_a_turn_without_a_sampled_token_is_not_lost():
    one = episode(turns=[1.0, 2.0, 4.0], tokens=[1, 1, 1])
    one.calls.pop(1)  # the second turn was the agent's own
    groups = [group(one)]
    terms = dataclasses.replace(terms_of(groups), value=np.zeros(2))
    for level in ("token", "turn"):
        config = AlgorithmConfig(advantage="gae", args={"gae_lambda": 0.0, "gae_level": level})
        assert Recipe(config).credit(groups, terms).advantage.tolist() == [3.0, 4.0]


def test_branches_follow_the_tokens():
    def call(prompt: tuple[int, ...], *sampled: int) -> Call:
        return Call(prompt, Completion(sampled, (-1.0,) * len(sampled), FinishReason.STOP), 0)

    assert Episode("e", Task("t"), calls=[call((1,), 2), call((1, 2, 9), 3), call((1, 2, 9, 3, 9), 4)]).branches == [
        0,
        0,
        0,
    ]
    assert Episode("e", Task("t"), calls=[call((1,), 2), call((7,), 3), call((7, 3, 9), 4)]).branches == [0, 1, 1]
    assert Episode("e", Task("t"), calls=[call((1,), 2), call((7,), 3), call((1, 2, 9), 4)]).branches == [
        1,
        0,
        1,
    ]  # a helper's, then back


CUTS = {StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.CONTEXT_FULL}


def gae_by_hand(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """One episode, from its end backwards."""
    out, ahead, following = [], 0.0, after
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + gamma * following - value + gamma * lam * ahead
        following = value
        out.insert(0, ahead)
    return out


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gae_bootstraps_truncated_episodes_only(seed, level, bootstrap):
    groups, random = random_groups(seed), np.random.default_rng(seed)
    episodes = [e for g in groups for e in g.episodes]
    for number, one in enumerate(episodes):
        one.stop = [StopReason.DONE, *CUTS][number % 4]
    terms = terms_of(groups)
    rows = cut_rows(groups, terms)
    after = np.full(len(terms), np.nan)
    after[rows] = random.normal(size=len(rows))
    terms = dataclasses.replace(terms, after=after)
    config = AlgorithmConfig(
        advantage="gae", gamma=0.9, args={"gae_level": level, "gae_lambda": 0.7, "bootstrap": bootstrap}
    )
    assert Recipe(config).needs.after is bootstrap
    found = Recipe(config).credit(groups, terms)
    for number, one in enumerate(episodes):
        mine = np.flatnonzero(terms.episode == number)
        cut = one.stop in CUTS
        assert (mine[-1] in rows) == cut
        last = float(after[mine[-1]]) if cut and bootstrap else 0.0
        turns, earned = terms.turn[mine].tolist(), turn_rewards(one).tolist()
        first = [turns.index(turn) for turn in range(len(earned))]
        if level == "turn":
            values = [float(terms.value[mine[place]]) for place in first]
            expected = gae_by_hand(earned, values, last, 0.9, 0.7)
            wanted = [expected[turn] for turn in turns]
        else:
            paid = [earned[t] if place == len(turns) - 1 or turns[place + 1] != t else 0.0
                    for place, t in enumerate(turns)]  # fmt: skip
            wanted = gae_by_hand(paid, terms.value[mine].tolist(), last, 0.9, 0.7)
        assert found.advantage[mine] == pytest.approx(wanted, abs=1e-9)


def test_failed_and_silent_episodes_have_nothing_to_go_on_from():
    silent = dataclasses.replace(episode(1.0, stop=StopReason.MAX_TURNS), calls=[])
    groups = [
        group(
            silent,
            episode(0.0, stop=StopReason.MAX_TURNS, tokens=3),
            episode(0.0, failed=True, stop=StopReason.CONTEXT_FULL),
        ),
        group(episode(0.0, tokens=1), episode(0.0, stop=StopReason.TRUNCATED, tokens=1)),
    ]
    terms = terms_of(groups)
    assert cut_rows(groups, terms).tolist() == [2, 4]
    assert cut_rows([], terms_of([])).tolist() == []


@given(NUMBERS, st.floats(0, 1))
def test_discounted_returns_equal_the_double_sum(rewards, gamma):
    expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    assert discounted(np.array(rewards), gamma) == pytest.approx(expected, abs=1e-6)


def test_gigpo_golden_values():
    # one task; rewards 1 and 0; discounted returns (0.5): [0.5, 1.0] and [0.0]; both start in "s"
    groups = [
        group(episode(turns=[0.0, 1.0], states=["s", "m"], tokens=1), episode(turns=[0.0], states=["s"], tokens=1))
    ]
    config = AlgorithmConfig(name="gigpo", gamma=0.5, args={"step_weight": 2.0})
    assert Recipe(config).credit(groups, terms_of(groups)).advantage.tolist() == [1.0, 0.5, -1.0]
