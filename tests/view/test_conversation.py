"""An episode as a conversation: every message, tool call and result once."""

from __future__ import annotations

import json

import pytest

from arborl.types import Call, Completion, Episode, FinishReason, Message, Task, ToolCall, Turn
from arborl.view.web.conversation import conversation, parts_of

QUESTION = Message("user", "What is 1 + 2?")


def reply(text, *calls):
    return Message("assistant", text, tuple(calls), sampled=True)


def tool_call(number=0, name="calculator", error=None, **arguments):
    return ToolCall(f"call_{number}", name, arguments, error)


def call(turn, messages, said):
    return Call((1,), Completion((2,), (-0.1,), FinishReason.STOP), turn, True, tuple(messages), said)


def hermes(**arguments):
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': arguments})}</tool_call>"


def result(text, number=0):
    return Message("tool", text, tool_call_id=f"call_{number}", name="calculator")


def told(episode):
    """The conversation in short: role, texts, and calls with results."""
    return [
        (
            entry["role"],
            *(part.get("text") or (part["call"]["name"], part["call"]["result"]) for part in entry["parts"]),
        )
        for entry in conversation(episode)
    ]


def test_a_tool_call_is_shown_once_with_its_result():
    asked, answer = reply(f"Let me see. {hermes(a=1)}", tool_call(a=1)), reply("3")
    calls = [call(0, [QUESTION], asked), call(0, [QUESTION, asked, result("3!")], answer)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), turns=[Turn(answer)], calls=calls)
    assert told(episode) == [
        ("user", "What is 1 + 2?"),
        ("assistant", "Let me see. ", ("calculator", "3!")),
        ("assistant", "3"),
    ]
    assert conversation(episode)[1]["parts"][1]["call"]["arguments"] == {"a": 1}
    assert [entry["call"] for entry in conversation(episode)] == [None, 0, 1]


def test_equal_results_of_equal_calls_are_all_shown():
    asked, answer = reply(hermes(a=1), tool_call(a=1)), reply("3")
    contexts = [[QUESTION], [QUESTION, asked, result("3")], [QUESTION, asked, result("3"), asked, result("3")]]
    calls = [call(0, context, said) for context, said in zip(contexts, (asked, asked, answer), strict=True)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), turns=[Turn(answer)], calls=calls)
    assert told(episode)[1:] == [
        ("assistant", ("calculator", "3")), ("assistant", ("calculator", "3")), ("assistant", "3"),
    ]  # fmt: skip


def test_several_calls_of_a_message_have_their_own_results():
    asked = reply(f"{hermes(a=1)}\n{hermes(a=2)}", tool_call(0, a=1), tool_call(1, a=2))
    context = [QUESTION, asked, result("two", 1), result("one", 0)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), calls=[call(0, [QUESTION], asked), call(0, context, None)])
    assert told(episode)[1:] == [("assistant", ("calculator", "one"), ("calculator", "two"))]


def test_observations_are_shown_after_their_turn_with_its_reward_and_not_again_in_the_next_context():
    left, right, seen = reply("left"), reply("right"), Message("user", "You moved.")
    calls = [call(0, [QUESTION], left), call(1, [QUESTION, left, seen], right)]
    turns = [Turn(left, (seen,), -0.5), Turn(right, (seen,), 0.0)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), turns=turns, calls=calls)
    assert told(episode) == [
        ("user", "What is 1 + 2?"), ("assistant", "left"), ("user", "You moved."), ("assistant", "right"),
        ("user", "You moved."),
    ]  # fmt: skip
    assert [entry["reward"] for entry in conversation(episode)] == [None, -0.5, None, None, None]
    kinds = ["opening", "reply", "observation", "reply", "observation"]
    assert [entry["kind"] for entry in conversation(episode)] == kinds


def test_of_an_edited_context_only_what_is_new_is_shown():
    asked, answer = reply(hermes(a=1), tool_call(a=1)), reply("3")
    stub = Message("user", "(deleted)")
    contexts = [[QUESTION], [QUESTION, asked, result("long text")], [stub, asked, result("long text"), answer]]
    calls = [call(0, context, said) for context, said in zip(contexts, (asked, answer, answer), strict=True)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), turns=[Turn(answer)], calls=calls)
    assert told(episode)[1:] == [
        ("assistant", ("calculator", "long text")), ("assistant", "3"), ("user", "(deleted)"), ("assistant", "3"),
    ]  # fmt: skip


def test_what_the_agent_adds_to_the_first_context_is_where_it_was():
    system = Message("system", "Be brief.")
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), calls=[call(0, [system, QUESTION], reply("3"))])
    assert told(episode) == [("system", "Be brief."), ("user", "What is 1 + 2?"), ("assistant", "3")]


def test_an_episode_without_stored_contexts_is_told_from_its_turns():
    seen = Message("tool", "3", name="calculator")
    turns = [Turn(reply(hermes(a=1), tool_call(a=1)), (seen,)), Turn(reply("3"))]
    calls = [Call((1,), Completion((2,), (-0.1,), FinishReason.STOP), turn) for turn in (0, 1)]
    episode = Episode("t#0", Task("t"), opening=(QUESTION,), turns=turns, calls=calls)
    assert told(episode)[1:] == [("assistant", ("calculator", "3")), ("assistant", "3")]
    assert conversation(Episode("t#0", Task("t"))) == []


def test_a_reply_that_the_environment_never_got_and_a_result_without_a_call_are_shown():
    lost = Message("tool", "late", tool_call_id="call_7", name="other")
    episode = Episode("t#0", Task("t"), opening=(QUESTION, lost), calls=[call(0, [QUESTION, lost], reply("3"))])
    assert told(episode) == [("user", "What is 1 + 2?"), ("tool", "late"), ("assistant", "3")]


FORMATS = {
    "tags": "<tool_call>\n<function=calculator>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "tags without a frame": "<function=calculator><parameter=a>1</parameter></function>",
    "a fence": "```python\nprint(calculator)\n```",
    "ReAct": 'Action: calculator\nAction Input: {"a": 1}\n',
    "a list": "[calculator(a=1)]",
    "bare JSON": '{"name": "calculator", "parameters": {"a": 1}}',
    "Mistral": '[TOOL_CALLS] [{"name": "calculator", "arguments": {"a": 1}}]',
    "Llama": '<|python_tag|>{"name": "calculator", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("text", FORMATS.values(), ids=FORMATS)
def test_the_text_of_a_call_is_replaced_by_the_call_in_every_format(text):
    assert [list(part) for part in parts_of(reply(text, tool_call(a=1)))] == [["call"]]


def test_a_call_whose_text_is_not_found_is_not_repeated_and_one_that_is_not_in_the_text_is_named():
    assert parts_of(reply("I call calculator with 1", tool_call(a=1))) == [{"text": "I call calculator with 1"}]
    assert [list(part) for part in parts_of(reply("Hm.", tool_call(a=1)))] == [["text"], ["call"]]
    written = Message("assistant", "", (tool_call(a=1),))
    assert [list(part) for part in parts_of(written)] == [["call"]]


def test_a_malformed_call_keeps_its_text_and_has_its_error():
    (part,) = parts_of(reply('<tool_call>{"name": ', tool_call(name="", error="not JSON")))
    assert (part["call"]["text"], part["call"]["error"]) == ('<tool_call>{"name": ', "not JSON")


SLOW = ("<function=", "```\n", "<tool_call>", "Action:\n", "x \t")


@pytest.mark.parametrize("piece", SLOW)
def test_texts_made_to_be_slow_to_search_are_shown(piece):
    (first, *_) = parts_of(reply(piece * 30_000 + " calculator", tool_call(a=1), tool_call(a=2)))
    assert first["text"].startswith(piece * 30_000)
