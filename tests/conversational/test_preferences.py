"""Pairs come in many forms, and what is wrong with one names its row, its field and what to write."""

from __future__ import annotations

import json

import pytest

from arborl import ConversationTurn, MultiTurnTrajectory
from arborl.conversational.reward_training import read_preferences, split_preferences
from arborl.errors import ConfigError
from arborl.types import Message, ToolCall

QUESTION = {"role": "user", "content": "Where is it?"}
GOOD, BAD = {"role": "assistant", "content": "On its way."}, {"role": "assistant", "content": "Who knows."}


def turns(*messages: dict[str, str]) -> list[ConversationTurn]:
    return [ConversationTurn(**message) for message in messages]


@pytest.mark.parametrize(
    "row",
    [
        ([QUESTION, GOOD], [QUESTION, BAD]),
        ((QUESTION, GOOD), (QUESTION, BAD)),
        [turns(QUESTION, GOOD), turns(QUESTION, BAD)],
        (turns(QUESTION, GOOD, QUESTION), turns(QUESTION, BAD, QUESTION)),  # the last turn has no reply
        (MultiTurnTrajectory("a", turns(QUESTION, GOOD)), MultiTurnTrajectory("b", turns(QUESTION, BAD))),
        {"prompt": "Where is it?", "chosen": "On its way.", "rejected": "Who knows."},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"chosen": turns(QUESTION, GOOD), "rejected": turns(QUESTION, BAD)},
        {"chosen": json.dumps([QUESTION, GOOD]), "rejected": json.dumps([QUESTION, BAD])},
        ([Message("user", "Where is it?"), Message("assistant", "On its way.")], [QUESTION, BAD]),
    ],
)
def test_every_form_gives_the_same_two_conversations(row):
    (found,) = read_preferences([row])
    assert [(one.role, one.content) for one in found.better] == [("user", "Where is it?"), ("assistant", "On its way.")]
    assert [(one.role, one.content) for one in found.worse] == [("user", "Where is it?"), ("assistant", "Who knows.")]


def test_texts_without_a_prompt_are_replies_and_calls_of_tools_are_kept():
    (found,) = read_preferences([("On its way.", "Who knows.")])
    assert found.better == [Message("assistant", "On its way.")]
    assert found.prompt == ""
    call = ToolCall("", "track", {"order": 7})
    question = Message("user", "Where is it?")
    (found,) = read_preferences([([question, Message("assistant", "", (call,))], [question, BAD])])
    assert found.better[1].tool_calls == (call,)
    sampled = Message("assistant", "<tool_call>…</tool_call>", (call,), sampled=True)
    (found,) = read_preferences([([question, sampled], [question, BAD])])
    assert found.better[1] == Message("assistant", "<tool_call>…</tool_call>")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_files_are_read_with_columns_of_other_names_and_weights(tmp_path, kind):
    rows = [{"question": "6*7?", "good": "42", "rejected": "41", "weight": 2.0}] * 2
    path = tmp_path / f"pairs.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    found = read_preferences(str(path), {"prompt": "question", "chosen": "good"})
    assert [one.weight for one in found] == [2.0, 2.0]
    assert found[1].where.startswith(f"{path}, {'line' if kind == 'jsonl' else 'row'} 2")
    with pytest.raises(ConfigError, match=r"(row|line) 1: no column 'prompt'"):
        read_preferences(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("only one", "row 2: str. Write (better, worse)"),
        (("a", "b", "c"), "row 2: tuple of 3. Write (better, worse)"),
        (("a", "a"), "row 2: better and worse are equal"),
        (("a\ud800", "b"), "row 2: contains half of a surrogate pair"),
        (("a", "  "), "row 2, worse: empty"),
        ((["a"], "b"), "row 2, better[0]: str, not an object"),
        ((7, "b"), "row 2, better: int, not a list of messages"),
        (([QUESTION], "b"), "row 2, better: has no text of the assistant"),
        (([{"role": "agent", "content": "x"}], "b"), "row 2, better[0].role: 'agent' is not a role"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "row 2: chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b"}, "row 2: no column 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0}, "row 2, weight: 0"),
    ],
)
def test_a_bad_row_is_named(row, message):
    with pytest.raises(ConfigError) as caught:
        read_preferences([("good", "bad"), row])
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [None, 7, {"prompt": "a"}, b"pairs"])
def test_data_must_be_a_list_or_a_file(given):
    with pytest.raises(ConfigError, match="must be a list of"):
        read_preferences(given)
    with pytest.raises(ConfigError, match="no such file"):
        read_preferences("nowhere.jsonl")


def test_pairs_of_one_prompt_are_held_out_together():
    rows = [{"prompt": f"{n // 4}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(200)]
    training, held = split_preferences(read_preferences(rows), 0.1, seed=3)
    assert len(held) == 20
    assert sorted(training + held) == list(range(200))
    assert not {n // 4 for n in held} & {n // 4 for n in training}
    assert split_preferences(read_preferences(rows), 0.1, seed=3) == (training, held)
    assert split_preferences(read_preferences(rows), 0.1, seed=4) != (training, held)
    one = read_preferences([{"prompt": "same", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(200)])
    assert len(split_preferences(one, 0.1, seed=3)[1]) == 20
    assert split_preferences(one, 0.0, seed=3)[1] == []
    assert [len(part) for part in split_preferences(one[:2], 0.1, seed=3)] == [1, 1]
