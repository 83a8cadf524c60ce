import asyncio
import math

import numpy as np
import pytest

from arborl.rewards import REWARDS, Rewards, reward
from arborl.rewards.efficiency import Efficient
from arborl.rewards.reward import as_finite_numbers
from arborl.rewards.text.composite import CompositeReward, MultiObjectiveReward
from arborl.rewards.text.library_rewards import ConcisenessReward, CorrectnessReward, HelpfulnessReward
from arborl.rewards.text.text_reward import RewardFunction, reward_function
from arborl.types import Episode, Failure, Group, Message, StopReason, Task, Turn


def episode(text="42", name="e", **fields):
    return Episode(name, Task("t", fields=fields), turns=[Turn(Message("assistant", text))])


def group(*texts, **fields):
    episodes = [episode(text, f"e{i}", **fields) for i, text in enumerate(texts)]
    return Group(episodes[0].task, episodes)


def score(groups, *rewards, seconds=5.0):
    asyncio.run(Rewards(rewards, seconds).score(groups))


@reward
def right(episode, answer):
    return float(episode.answer == answer)


def test_defaults_hold_where_the_task_has_no_such_field_and_the_rest_can_be_collected():
    @reward
    def f(episode, answer, tolerance=0.5, **fields):
        return {"tolerance": tolerance, "fields": len(fields), "answer": answer}

    assert asyncio.run(f(episode(answer=1, a=1, b=2))) == {"tolerance": 0.5, "fields": 2, "answer": 1}


def test_a_missing_field_names_the_reward_the_field_and_what_there_is():
    with pytest.raises(LookupError, match="reward 'right' needs the field 'answer'; task 't' has: question, split"):
        asyncio.run(right(episode(question="?", split="train")))


def test_a_reward_can_be_named_and_weighted():
    @reward(name="short", weight=0.1)
    def brevity(episode):
        return 1

    assert (brevity.name, brevity.weight) == ("short", 0.1)
    assert (right.name, right.weight) == ("right", 1.0)


def test_a_function_that_takes_no_episode_is_refused():
    with pytest.raises(TypeError, match="has no argument `episode`"):

        @reward
        def f(answer):
            return 1


def test_scores_are_weighted_named_and_summed():
    async def tone(episode):
        await asyncio.sleep(0)
        return {"warm": 0.5, "clear": np.float32(1)}

    one = group("42", "41", answer="42")
    score([one], ("right", right, 2.0), ("tone", tone, 0.5))
    assert one.episodes[0].rewards == {"right": 2.0, "tone/warm": 0.25, "tone/clear": 0.5}
    assert one.episodes[0].reward == 2.75
    assert one.episodes[1].rewards["right"] == 0


def test_success_is_a_reward_of_one_unless_the_environment_stated():
    one = group("42", "41", "42", answer="42")
    one.episodes[2].metrics["success"] = 0.0
    score([one], ("right", right, 1.0))
    assert [e.metrics["success"] for e in one.episodes] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (math.nan, "ValueError", "bad is nan"),
        (math.inf, "ValueError", "bad is inf"),
        ("1.0", "TypeError", "'1.0' (str); return a number"),
        (None, "TypeError", "None (NoneType)"),
        ([1.0], "TypeError", "list"),
        (1j, "TypeError", "complex"),
        ({"a": math.nan}, "ValueError", "bad/a is nan"),
        ({"a": {"b": 1}}, "TypeError", "bad/a is"),
        (10**400, "OverflowError", ""),
    ],
)
def test_a_value_that_is_no_finite_number_costs_one_episode(value, kind, says):
    def bad(episode, answer):
        return value if episode.id == "e1" else 1.0

    one, other = group("42", "42", "42", answer="42"), group("42", answer="42")
    score([one, other], ("right", right, 1.0), ("bad", bad, 1.0))
    failed = one.episodes[1]
    assert failed.stop is StopReason.ERROR
    assert failed.rewards == {}
    assert (failed.failure.where, failed.failure.kind) == ("reward 'bad'", kind)
    assert says in failed.failure.message
    assert [e.id for e in one.valid_episodes] == ["e0", "e2"]
    assert [e.reward for e in (*one.valid_episodes, *other.valid_episodes)] == [2.0, 2.0, 2.0]


def test_a_reward_that_raises_costs_one_episode_and_keeps_its_traceback():
    def raises(episode):
        if episode.id == "e0":
            raise RuntimeError("no such judge")
        return 1

    one = group("a", "b")
    score([one], ("raises", raises, 1.0))
    assert str(one.episodes[0].failure) == "reward 'raises': RuntimeError: no such judge"
    assert 'raise RuntimeError("no such judge")' in one.episodes[0].failure.traceback
    assert one.episodes[1].reward == 1


def test_the_failure_named_is_the_first_by_order_of_the_rewards():
    async def late(episode):
        await asyncio.sleep(0.02)
        raise ValueError("late")

    def early(episode):
        raise ValueError("early")

    one = group("a")
    score([one], ("late", late, 1.0), ("early", early, 1.0))
    assert one.episodes[0].failure.where == "reward 'late'"


def test_a_failed_episode_is_not_scored():
    one = group("42", "42", answer="42")
    one.episodes[0].failure = Failure("environment 'shop'", "OSError", "gone")
    score([one], ("right", right, 1.0))
    assert one.episodes[0].rewards == one.episodes[0].metrics == {}
    assert one.episodes[1].reward == 1


def test_numbers_of_numpy_and_tensors_without_dimensions_are_numbers():
    import numpy as np
    import torch

    ones = [np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0), np.array(True), torch.tensor(1.0)]
    for one in ones:
        assert as_finite_numbers("r", one) == {"r": 1.0}
        assert as_finite_numbers("r", {"a": one}) == {"r/a": 1.0}
        assert type(as_finite_numbers("r", one)["r"]) is float
    for wrong in (np.array([1.0]), np.float32("nan"), np.array("text"), np.array(1j)):
        with pytest.raises((TypeError, ValueError), match="return a"):
            as_finite_numbers("r", wrong)


def test_a_reward_of_weight_zero_is_measured_and_shown_and_nothing_else():
    @reward
    def length(episode):
        return {"words": 2.0, "letters": 3.0}

    made = group("42", "7", answer="42")
    several = CompositeReward([ConcisenessReward()])
    rewards = Rewards([("right", right, 1.0), ("length", length, 0.0), ("several", several, 0.0)], 5.0)
    asyncio.run(rewards.score([made]))
    assert [one.rewards for one in made.episodes] == [{"right": 1.0}, {"right": 0.0}]
    assert [one.metrics["reward/length"] for one in made.episodes] == [5.0, 5.0]
    assert [one.metrics["reward/several"] for one in made.episodes] == [1.0, 1.0]
    assert [one.metrics["success"] for one in made.episodes] == [1.0, 0.0]


def test_success_that_no_one_judged_is_not_claimed_whatever_the_environments_reward_is_called():
    named = REWARDS.get("env")
    judge = ("right", right, 1.0)
    for rewards, claimed in (([(named.name, named, 1.0)], False), ([(named.name, named, 1.0), judge], True)):
        one = group("42", answer="42")
        one.episodes[0].metrics["judged"] = 0.0  # as an environment says that does not know what success is
        score([one], *rewards)
        assert ("success" in one.episodes[0].metrics) == claimed
    known = group("42")
    score([known], (named.name, named, 1.0))
    assert known.episodes[0].metrics["success"] == 0.0


@reward_function
def share(turns, context=None):
    return 1.0


@reward_function(graded=False)
def greets(turns, context=None):
    return 1.0


@reward(graded=True)
def length(episode):
    return len(episode.answer) / 2


class Lasting(RewardFunction):
    graded = False

    async def compute_reward(self, turns, context=None):
        return 1.0


@pytest.mark.parametrize(
    ("rewards", "has_success"),
    [
        ([HelpfulnessReward()], False),
        ([share], False),
        ([length], False),
        ([CompositeReward([HelpfulnessReward(), share])], False),
        ([MultiObjectiveReward([{"reward": share}, {"reward": CompositeReward([length])}])], False),
        ([Efficient(HelpfulnessReward())], False),
        ([right], True),
        ([greets], True),
        ([Lasting()], True),
        ([CorrectnessReward()], True),
        ([Efficient("exact")], True),
        ([HelpfulnessReward(), right], True),
        ([CompositeReward([share, CompositeReward([right])])], True),
        ([HelpfulnessReward(), REWARDS.get("env")], True),
    ],
)
def test_an_episode_has_success_only_if_a_reward_has_a_value_that_means_it(rewards, has_success):
    made = group("42", "4", answer="42")
    score([made], *((f"r{number}", one, 0.5) for number, one in enumerate(rewards)))
    assert [("success" in one.metrics) for one in made.episodes] == [has_success] * 2
    assert all(one.failure is None and one.rewards for one in made.episodes)


def test_a_rule_of_weight_zero_defines_no_success():
    made = group("42", answer="42")
    score([made], ("share", share, 1.0), ("right", right, 0.0))
    assert "success" not in made.episodes[0].metrics
    assert made.episodes[0].metrics["reward/right"] == 1.0


def test_a_task_whose_environment_reports_success_has_it_in_every_episode():
    made = group("42", "41", answer="42")
    made.episodes[0].metrics["success"] = 1.0
    score([made], ("share", share, 0.5))
    assert [one.metrics["success"] for one in made.episodes] == [1.0, 0.0]


def test_a_reward_that_hangs_costs_its_episode_alone():
    async def hangs(episode):
        await asyncio.sleep(60 if episode.id == "e0" else 0)
        return 1

    one = group("a", "b")
    score([one], ("hangs", hangs, 1.0), seconds=0.05)
    assert (one.episodes[0].failure.where, one.episodes[0].failure.kind) == ("reward 'hangs'", "timeout")
    assert one.episodes[1].reward == 1


def test_every_reward_in_the_table_loads():
    for name in REWARDS:
        assert callable(REWARDS[name])
