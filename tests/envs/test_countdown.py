import asyncio
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs.env import parse_answer
from arborl.envs.games.countdown import INVALID, Countdown, draw_problem, value_of
from arborl.types import Message, Task

seeds = st.integers(0, 2**63 - 1)


def reachable(numbers):
    """Every value that the numbers can make, all used: any two joined, and so on."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for a, b, *rest in permutations(numbers):
        joined = [a + b, a - b, a * b] + ([Fraction(a) / b] if b else [])
        for value in joined:
            found |= reachable((value, *rest))
    return found


@given(seeds, st.integers(2, 4), st.sampled_from(["train", "held_out"]))
@settings(max_examples=25)
def test_every_problem_can_be_solved_says_an_exhaustive_search(seed, count, split):
    problem = draw_problem(seed, split, count, 12, 100)
    assert problem.target in reachable(problem.numbers)
    assert value_of(problem.solution, problem.numbers) == problem.target
    assert 1 <= problem.target <= 100
    assert len(problem.numbers) == count


@given(seeds)
@settings(max_examples=30)
def test_the_value_is_what_python_says(seed):
    problem = draw_problem(seed, "train", 5, 25, 500)
    assert eval(problem.solution) == pytest.approx(problem.target)


@pytest.mark.parametrize(
    "text",
    [
        None, "", "3 + 7", "3 + 7 + 25 + 25", "3 ** 7 * 25", "3 // 7 + 25", "-3 + 7 + 25", "3.0 + 7 + 25",
        "True + 7 + 25", "3 / (7 - 7) + 25", "__import__('os')", "3 + 7 + x", "(" * 300, "3 + 7 + 25" + " " * 200,
    ],
)  # fmt: skip
def test_what_is_no_expression_of_just_the_numbers_has_no_value(text):
    assert value_of(text, (3, 7, 25)) is None


def test_division_is_exact_and_zero_is_never_divided_by():
    assert value_of("(3 + 7) / 4", (4, 3, 7)) == Fraction(5, 2)
    assert value_of("3 / (7 - 7)", (3, 7, 7)) is None
    assert value_of("1 / 3 * 3", (1, 3, 3)) == 1


def test_tries_are_answered_with_what_they_make_until_one_is_right_or_they_are_used_up():
    async def play(*texts):
        env = Countdown()
        await env.reset(Task("t", seed=4), 0)
        return env, [await env.step(Message("assistant", text or env.oracle())) for text in texts]

    wrong = "{} + {} + {}"
    env, _ = asyncio.run(play())
    text = f"<answer>{wrong.format(*env.problem.numbers)}</answer>"
    assert value_of(parse_answer(text), env.problem.numbers) != env.problem.target
    env, steps = asyncio.run(play(text, "hm", None))
    assert (
        steps[0].observation.messages[0].content == f"That makes {sum(env.problem.numbers)}. Make {env.problem.target}."
    )
    assert steps[1].observation.messages[0].content.startswith(INVALID)
    assert [step.reward for step in steps] == [0.0, -0.05, 1.0]
    assert [step.over for step in steps] == [False, False, True]
    assert env.metrics() == {"success": 1.0, "valid": pytest.approx(2 / 3), "tries": 3.0}
    env, steps = asyncio.run(play(text, text, text))
    assert steps[-1].truncated
    assert env.metrics()["success"] == 0.0
