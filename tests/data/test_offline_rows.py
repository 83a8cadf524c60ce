"""Given rows: transcripts, pairs and labelled answers in the columns that others write them in; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arborl.config.data_config import DataConfig
from arborl.data import open_source
from arborl.data.reading.row_reader import OfflineRowReader, OfflineTask
from arborl.data.source_factory import OfflineRows
from arborl.errors import ConfigError

USER, REPLY = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}


def read(kind: str, row: dict, **settings) -> OfflineTask:
    return OfflineRowReader("rows", kind=kind, **settings).task(row, "rows.jsonl, line 3")


def words(messages) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"messages": json.dumps([USER, REPLY])},
        {"prompt": "6*7?", "completion": "42"},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": [USER], "completion": "42"},
        {"prompt": json.dumps([USER]), "completion": json.dumps([REPLY])},
    ],
)
def test_a_transcript_is_messages_or_a_prompt_and_a_completion(row):
    task = read("transcripts", row)
    assert words(task.messages) == [("user", "6*7?")]
    (side,) = task.responses
    assert words(side.messages) == [("assistant", "42")]
    assert side.trained == (True,)
    assert task.weight == 1.0


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "6*7?", "chosen": "42", "rejected": "41"},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [REPLY | {"content": "41"}]},
        {"chosen": [USER, REPLY], "rejected": [USER, REPLY | {"content": "41"}]},
        {"prompt": "6*7?", "chosen": [USER, REPLY], "rejected": [USER, REPLY | {"content": "41"}]},  # as UltraFeedback
    ],
)
def test_a_pair_is_a_prompt_and_two_sides_or_two_conversations_that_begin_alike(row):
    task = read("pairs", row)
    assert words(task.messages) == [("user", "6*7?")]
    assert [(words(side.messages), side.score) for side in task.responses] == [
        ([("assistant", "42")], 1.0),
        ([("assistant", "41")], 0.0),
    ]


def test_two_conversations_share_what_the_assistant_stated_alike():
    earlier = [USER, REPLY, {"role": "user", "content": "Sure?"}]
    row = {"chosen": [*earlier, REPLY | {"content": "Yes."}], "rejected": [*earlier, REPLY | {"content": "No."}]}
    task = read("pairs", row)
    assert words(task.messages) == [("user", "6*7?"), ("assistant", "42"), ("user", "Sure?")]


@pytest.mark.parametrize(("label", "score"), [(True, 1.0), (0, 0.0), ("False", 0.0), (1.0, 1.0)])
def test_a_labelled_answer_is_good_or_bad(label, score):
    task = read("labels", {"prompt": "6*7?", "completion": "42", "label": label})
    assert [side.score for side in task.responses] == [score]


def test_tools_and_a_weight_come_along_and_what_was_stated_is_no_field():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": [USER, REPLY], "tools": json.dumps([tool]), "weight": 2, "topic": "arithmetic"}
    task = read("transcripts", row)
    assert [tool.name for tool in task.tools] == ["add"]
    assert task.weight == 2.0
    assert dict(task.fields) == {"topic": "arithmetic"}


def test_columns_may_have_other_names():
    row = {"conversation": [USER, REPLY]}
    assert words(read("transcripts", row, fields={"messages": "conversation"}).messages) == [("user", "6*7?")]
    row = {"instruction": "6*7?", "completion": "42"}
    assert words(read("transcripts", row, question="instruction").messages) == [("user", "6*7?")]


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("transcripts", {"messages": [USER]}, r"messages: there is no assistant message.*Add \{\"role\": \"assist"),
        ("transcripts", {"messages": [REPLY, USER]}, "begins with an assistant message"),
        ("transcripts", {"messages": [USER, {"role": "bot", "content": "x"}]}, "'bot' is not a role.*Write one of"),
        ("transcripts", {"messages": [USER, REPLY | {"content": " "}]}, r"messages\[1\]: the assistant message"),
        ("transcripts", {"messages": [USER, REPLY | {"train": False}]}, "nothing is trained on"),
        ("transcripts", {"messages": [USER, REPLY | {"train": "no"}]}, r"messages\[1\].train: 'no'. Write true or"),
        ("transcripts", {"messages": [USER, REPLY], "weight": -1}, "weight: -1. Write a number above 0"),
        ("transcripts", {"mesages": [USER, REPLY]}, "no column 'messages'. Did you mean 'mesages'?.*Write the columns"),
        ("transcripts", {"prompt": [USER, REPLY], "completion": "x"}, "prompt: ends with an assistant message"),
        ("transcripts", {"prompt": "6*7?", "completion": [USER]}, "completion: begins with a message of role 'user'"),
        ("transcripts", {"prompt": "6*7?", "completion": ""}, "completion: empty. Fill it, or drop the row"),
        ("transcripts", {"messages": [USER, REPLY], "tools": "{"}, "tools: not valid JSON"),
        ("pairs", {"prompt": "6*7?", "chosen": "42", "rejected": "42"}, "chosen and rejected are equal"),
        ("pairs", {"prompt": "6*7?", "chosen": "42"}, "no column 'rejected'.*prompt, chosen and rejected; for example"),
        ("pairs", {"chosen": "42", "rejected": "41"}, "no column 'prompt'"),
        ("pairs", {"chosen": [USER, REPLY], "rejected": [REPLY | {"role": "user"}, REPLY]}, "do not begin with"),
        ("labels", {"prompt": "6*7?", "completion": "42"}, "label: None. Write true where the completion is good"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_refused_with_its_place_and_what_to_write(kind, row, says):
    with pytest.raises(ConfigError, match=f"^rows.jsonl, line 3.*{says}"):
        read(kind, row)


def lengths(task) -> int:
    return sum(len(message.content) for side in task.responses for message in side.messages)


def opened(path: Path, **settings):
    rows = OfflineRows("transcripts", lengths, max_context=5)
    return open_source(DataConfig(path=path, offline=True, **settings), "question", 0, offline=rows)


def written(folder: Path, answers: list[str]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}?", "completion": text}) for i, text in enumerate(answers)))
    return path


def test_rows_that_are_too_long_are_left_out_cut_later_or_refused(tmp_path):
    path = written(tmp_path, ["short"] * 20 + ["much too long"])
    source = opened(path)
    assert source.pools["rows"].counts["overlong"] == 1
    assert all(lengths(task) == 5 for task in source.take(0, 40))
    assert opened(path, overlong="cut").pools["rows"].counts["cut"] == 1
    with pytest.raises(ConfigError, match=r"line 21: the row has 13 tokens, sampling.max_context is 5. Raise it"):
        opened(path, overlong="refuse")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: offline rows are limited by"):
        opened(path, max_prompt_tokens=3)


def test_every_row_comes_once_a_pass_and_held_out_rows_never(tmp_path):
    source = opened(written(tmp_path, [f"{i}" for i in range(30)]))
    held_out = {task.id for task in source.evaluation(100)}
    size = source.pools["rows"].size
    first = [task.id for task in source.take(0, size)]
    assert len(set(first)) == size
    assert held_out
    assert held_out.isdisjoint(first)
    assert len(held_out) + size == 30


def test_a_table_too_large_to_be_read_at_the_start_gives_a_neighbour_for_a_row_that_is_too_long(tmp_path, monkeypatch):
    path = written(tmp_path, ["short"] * 30 + ["much too long"] * 10)
    monkeypatch.setattr("arborl.data.source_factory.open_tables", unread)
    source = opened(path)
    pool = source.pools["rows"]
    assert not pool.counts  # no one has looked yet
    assert all(lengths(task) == 5 for task in source.take(0, 36))
    assert pool.counts["overlong"] > 0


def unread(paths):
    from arborl.data.reading.table_files import open_tables

    table = open_tables(paths)
    table.whole = False
    return table


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="there are no rows"):
        opened(tmp_path / "rows.jsonl")
