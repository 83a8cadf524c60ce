"""Reward functions of other systems: verl's by row, or by the rule of a source; TRL's by group."""

from __future__ import annotations

import asyncio

import pytest

from arborl.rewards import REWARDS, Rewards
from arborl.rewards.score_function import DataSource, ScoreFunction, TrlFunction, solution
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, ToolCall, Turn


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
        ("nq", {"target": ["the Nile", "Nile"]}, "<answer>River</answer> no: <answer>nile.</answer>", 1.0),
        ("hotpotqa", "yes", "<answer>Yes</answer>", 1.0), ("musique", ["a b"], "<answer>c</answer>", 0.0),
        ("bamboogle", "x", "<answer></answer>", 0.0), ("triviaqa", "x", "<answer>x</answer>" * 11, 0.25),
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


# ------------------------------------------------------------------------------------------------ TRL


def played(number: int, content: str, prompt, **columns) -> Episode:
    """An episode of one call; of two, if it uses a tool."""
    asked = Message("user", prompt if isinstance(prompt, str) else prompt[-1]["content"])
    reply = Message("assistant", content)
    calls = [Call((1, 2), Completion((7,) * (number + 1), (0.0,) * (number + 1), FinishReason.STOP), 0,
                  messages=(Message("system", "Be brief."), asked), reply=reply)]  # fmt: skip
    task = Task("t", fields={"prompt": prompt, **columns})
    return Episode(str(number), task, opening=(asked,), turns=[Turn(reply)], calls=calls)


CONVERSATION = [{"role": "user", "content": "6 * 7?"}]


def by_length(prompts, completions, completion_ids, answer, log_extra, **columns):
    """Needs the whole group: the longest completion is worth nothing."""
    log_extra("seen", answer)
    assert prompts == [CONVERSATION] * len(completions)
    longest = max(map(len, completion_ids))
    return [
        None if len(ids) == longest else float(completion[0]["content"] == right)
        for completion, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def test_a_function_in_trls_form_gets_whole_groups_and_its_none_is_zero():
    episodes = [played(n, text, CONVERSATION, answer="42") for n, text in enumerate(("42", "41", "42"))]
    reward = REWARDS["trl_function"](f"{__name__}:by_length")
    assert reward.name == "by_length"
    group = Group(episodes[0].task, episodes)
    asyncio.run(Rewards([("by_length", reward, 0.5)], 5).score([group]))
    assert [episode.rewards for episode in episodes] == [{"by_length": 0.5}, {"by_length": 0.0}, {"by_length": 0.0}]


def test_completions_are_text_if_the_prompt_is_text_and_else_messages_with_those_of_tools():
    seen = {}

    async def keep(completions, prompts):
        seen.update(completions=completions, prompts=prompts)
        return [1] * len(completions)

    one = played(0, "Hello.", "Say hello.")
    assert asyncio.run(TrlFunction(keep).across([one], [0.0])) == [1]
    assert seen == {"completions": ["Hello."], "prompts": ["Say hello."]}
    call = Message("assistant", "", tool_calls=(ToolCall("1", "add", {"a": 1}),))
    two = played(0, "2", CONVERSATION)
    before = (*two.calls[0].messages, call, Message("tool", "2"))
    two.calls.append(
        Call(
            (1,),
            Completion((5,), (0.0,), FinishReason.STOP),
            1,
            messages=before,
            reply=Message("assistant", "It is 2."),
        )
    )
    asyncio.run(TrlFunction(keep).across([two], [0.0]))
    function = {"name": "add", "arguments": {"a": 1}}
    assert seen["completions"] == [[
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."},
    ]]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completions: 1.0, "returned float '1.0'; return a list of 2 numbers"),
        (lambda completions: [1.0], "returned 1 values; return a list of 2 numbers"),
        (lambda completions: "no", "returned str 'no'"),
        (lambda completions, trainer_state: [0, 0], "needs 'trainer_state', and there are: answer, prompts"),
        (lambda completions: ["a", "b"], "a"),
    ],
)
def test_a_function_in_trls_form_that_fails_fails_its_group(function, says):
    episodes = [played(n, "42", CONVERSATION, answer="42") for n in range(2)]
    reward = TrlFunction(function)
    asyncio.run(Rewards([("mine", reward, 1.0)], 5).score([Group(episodes[0].task, episodes)]))
    for episode in episodes:
        assert episode.failure.where == "reward 'mine'"
        assert says in episode.failure.message


def test_a_name_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match="cannot be called"):
        TrlFunction(f"{__name__}:CONVERSATION")
