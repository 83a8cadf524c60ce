"""Rows in verl's form are scored by one's own function, or by the rule of their source; without a rule, by nothing."""

from __future__ import annotations

import asyncio

import pytest

from arborl.rewards import REWARDS
from arborl.rewards.score_function import DataSource, ScoreFunction, solution
from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, ToolCall, Turn


def episode(output: str, source: str = "openai/gsm8k", truth="72", **fields) -> Episode:
    columns = {"data_source": source, "reward_model": {"ground_truth": truth}, "answer": truth, **fields}
    return Episode("e", Task("t", fields=columns), turns=[Turn(Message("assistant", output))])


def score(reward, one: Episode) -> float:
    return asyncio.run(reward(one))


@pytest.mark.parametrize(
    ("source", "truth", "output", "worth"),
    [
        ("openai/gsm8k", "72", "so 72\n#### 72", 1.0), ("openai/gsm8k", "1200", "#### 1,200", 1.0),
        ("openai/gsm8k", "72", "the answer is 72", 0.0), ("openai/gsm8k", "72", "#### 73", 0.0),
        ("lighteval/MATH", "\\frac{1}{2}", "so \\boxed{1/2}", 1.0), ("lighteval/MATH", "3", "it is 3", 0.0),
        ("math_dapo", "12", "Answer: 12", 1.0), ("aime2024", "12", "Answer: 13", -1.0),
        ("numina_olympiads", "5", "the answer is 5", 1.0),
        ("searchR1_nq", {"target": ["the Nile", "Nile"]}, "<answer>Nile</answer>", 1.0),
        ("searchR1_nq", {"target": ["Nile"]}, "Nile", 0.0),
    ],
)  # fmt: skip
def test_the_source_of_a_row_decides_what_its_answer_is_worth(source, truth, output, worth):
    assert score(DataSource(), episode(output, source, truth)) == worth


def test_a_source_without_a_rule_is_an_error_and_no_zero():
    with pytest.raises(
        LookupError, match=r"no rule for data_source='mine'\. Write rewards=\[equal\], or a custom function"
    ):
        score(DataSource(), episode("72", "mine"))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": float(solution_str.endswith(ground_truth)) + bonus + extra_info["index"], "acc": True}


async def slow_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25


def test_a_function_in_verls_form_is_called_as_verl_calls_it():
    one = episode("it is 72", extra_info={"index": 3})
    assert score(REWARDS["score_function"](f"{__name__}:compute_score", {"bonus": 0.5}), one) == 4.5
    assert score(ScoreFunction(slow_score), one) == 0.25
    with pytest.raises(ValueError, match="cannot be called"):
        ScoreFunction(3)


def test_a_function_reads_all_that_was_stated_with_the_roles_between():
    requests = (
        Message("user", "6*7?"),
        Message("assistant", "", tool_calls=(ToolCall("1", "calculator", {"expression": "6*7"}),)),
        Message("tool", "42"),
    )
    call = Call(
        (1,), Completion((2,), (-1.0,), FinishReason.STOP), 0, messages=requests, reply=Message("assistant", "42")
    )
    one = Episode("e", Task("t"), opening=requests[:1], turns=[Turn(Message("assistant", "42"))], calls=[call])
    called = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    assert solution(one) == f"{called}\ntool\n42\nassistant\n42"
    assert solution(episode("plain")) == "plain"
