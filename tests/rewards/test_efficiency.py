import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.errors import ConfigError
from arborl.rewards import REWARDS, Rewards, reward
from arborl.rewards.answers import Format, Repetition
from arborl.rewards.efficiency import Efficient, efficiency
from arborl.types import Episode, Group, Message, Task, Turn


def episode(text, calls=0, **metrics):
    made = Episode(f"{text}-{calls}", Task("t", fields={"answer": "42"}), turns=[Turn(Message("assistant", text))])
    made.metrics.update({"tool/calls": float(calls)} | {f"tool/{key}": float(value) for key, value in metrics.items()})
    return made


def scored(one, episodes, weight=1.0):
    group = Group(episodes[0].task, list(episodes))
    asyncio.run(Rewards([("efficient", one, weight)], seconds=5).score([group]))
    return [each.reward for each in episodes]


@pytest.mark.parametrize(
    ("calls", "fewest", "value"),
    [
        (0, 0, 1.0), (1, 0, math.cos(math.pi / 3)), (5, 0, math.cos(5 * math.pi / 11)), (2, 2, 1.0),
        (6, 2, math.sin(0.75 * math.pi)), (1, 3, math.sin(0.25 * math.pi)), (0, 3, 0.0),
    ],
)  # fmt: skip
def test_the_formula_at_points_worked_out_by_hand(calls, fewest, value):
    assert efficiency(calls, fewest) == pytest.approx(value, abs=1e-12)


@given(st.integers(0, 200), st.integers(0, 50))
def test_the_fewest_calls_are_best_and_more_is_never_better(calls, fewest):
    here = efficiency(calls, fewest)
    assert 0.0 <= here <= 1.0
    assert here <= efficiency(fewest, fewest) == 1.0
    if calls >= fewest:
        assert efficiency(calls + 1, fewest) <= here


def test_a_right_answer_is_scaled_by_the_fewest_calls_of_the_right_ones_in_its_group():
    group = [episode("42", 2), episode("42", 6), episode("41", 1), episode("42", 2)]
    assert scored(Efficient("equal"), group, weight=2.0) == pytest.approx([2.0, 2 * math.sin(0.75 * math.pi), 0.0, 2.0])
    assert [each.metrics["success"] for each in group] == [1.0, 1.0, 0.0, 1.0]  # a detour is no failure


def test_without_the_group_no_call_is_best():
    group = [episode("42", 0), episode("42", 1)]
    assert scored(Efficient("equal", group=False), group) == pytest.approx([1.0, 0.5])
    assert scored(Efficient("equal", alpha=0.5), [episode("42", 3)]) == [0.5]


def test_a_failed_episode_is_not_compared_with():
    @reward
    def fragile(episode):
        if episode.metrics["tool/calls"] == 0:
            raise RuntimeError("broken")
        return 1.0

    group = [episode("42", 0), episode("42", 4)]
    scored(Efficient(fragile), group)
    assert group[0].failure is not None
    assert group[1].reward == 1.0


def test_a_reward_that_fails_across_the_group_is_named():
    class Broken(Efficient):
        def across(self, episodes, values):
            raise RuntimeError("oops")

    group = [episode("42", 0), episode("42", 1)]
    scored(Broken("equal"), group)
    assert {str(each.failure) for each in group} == {"reward 'efficient': RuntimeError: oops"}


def test_the_base_is_found_by_name_with_its_arguments():
    assert Efficient("equal", {"tolerance": 0.1}).base.tolerance > 0
    assert REWARDS["efficient"] is Efficient
    with pytest.raises(ConfigError, match=r"base_args.tolerence: unknown argument. Did you mean 'tolerance'"):
        Efficient("equal", {"tolerence": 0.1})
    with pytest.raises(ConfigError, match="takes no arguments here"):
        Efficient("exact", {"x": 1})
    with pytest.raises(ValueError, match="smooth=0"):
        Efficient(smooth=0)


@pytest.mark.parametrize(
    ("text", "metrics", "value"),
    [
        ("<answer>42</answer>", {}, 1.0), ("Thinking. <answer> 42 </answer>", {}, 1.0), ("<answer></answer>", {}, 0.0),
        ("<answer>1</answer><answer>2</answer>", {}, 0.0), ("<answer>42", {}, 0.0), ("</answer>42<answer>", {}, 0.0),
        ("42", {}, 0.0), ("<answer>42</answer>", {"malformed": 1}, 0.0),
        ("<answer>42</answer>", {"unknown_tool": 1}, 0.0), ("<answer>42</answer>", {"exception": 1}, 1.0),
    ],
)  # fmt: skip
def test_the_form_is_an_answer_and_no_broken_call(text, metrics, value):
    assert asyncio.run(Format()(episode(text, **metrics))) == value


def test_a_pattern_of_ones_own():
    form = Format(pattern=r"<think>.*</think>\s*<answer>.+</answer>", tools=False, good=0.5, bad=-0.5)
    assert asyncio.run(form(episode("<think>a\nb</think>\n<answer>c</answer>\n", malformed=1))) == 0.5
    assert asyncio.run(form(episode("<answer>c</answer>"))) == -0.5
    with pytest.raises(ValueError, match="not a regular expression"):
        Format(pattern="(")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0.0), ("one two", 0.0), ("one two three", 0.0), ("a b c a b c", -0.25), ("A b c a B c", -0.25),
        ("x x x x x", -2 / 3), ("so it is and so it was", 0.0),
    ],
)  # fmt: skip
def test_repeated_sequences_of_words_cost_their_share(text, value):
    assert asyncio.run(Repetition()(episode(text))) == pytest.approx(value)


def test_sequences_of_other_lengths_and_no_length():
    assert asyncio.run(Repetition(words=1)(episode("a b a"))) == pytest.approx(-1 / 3)
    for words in (0, True, 1.5):
        with pytest.raises(ValueError, match="words="):
            Repetition(words=words)
