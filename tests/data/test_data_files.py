import json

import pyarrow
import pyarrow.parquet
import pytest

from arborl.data import FileTasks
from arborl.data.reading.row_reader import RowReader, messages_of_cell
from arborl.data.reading.table_files import read_rows
from arborl.data.reading.tables import ParquetTable
from arborl.errors import ConfigError
from arborl.types import Message, ToolCall

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "größer, «é»?", "answer": "ja,\nnein"}]


def written(folder, name, text):
    path = folder / name
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_every_format_gives_the_same_rows(tmp_path):
    written(tmp_path, "a.json", json.dumps(ROWS))
    written(tmp_path, "a.jsonl", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n")
    written(tmp_path, "a.csv", '\ufeffquestion,answer\r\n1+1?,2\r\n\r\n"größer, «é»?","ja,\nnein"\r\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for suffix in ("json", "jsonl", "csv", "parquet"):
        assert [row for _, row in read_rows(tmp_path / f"a.{suffix}")] == ROWS


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "", "there are no rows"),
        ("a.json", '[{"question": "a"}, {"question": "\\ud800"}]', "row 2: half of a surrogate pair"),
        ("a.json", '[{"question": "a", "x": [{"\\udfff": 1}]}]', "row 1: half of a surrogate pair"),
        ("a.jsonl", '{"question": "\\ud83d\\ude00"}\n\n{"question": "\\ud83d"}', "line 3: half of a surrogate pair"),
        ("a.jsonl", '{"question": ' + "[" * 300 + "]" * 300 + "}", "line 1: nested more than 64 deep"),
        ("a.csv", "question,answer,question\n1,2,3\n", "two columns have the name 'question'"),
        ("a.json", "[]", "there are no rows"),
        ("a.jsonl", "\n\n", "there are no rows"),
        ("a.csv", "", "there are no rows"),
        ("a.csv", "question,answer\n", "there are no rows"),
        ("a.json", "[{", "not valid JSON"),
        ("a.json", '{"question": "a"}', "dict at the top, not a list of rows"),
        ("a.json", '[{"question": "a"}, 3]', "row 2: int, not an object"),
        ("a.jsonl", '{"question": "a"}\n\n{"question"', "line 3: not valid JSON"),
        ("a.jsonl", '{"question": "a"}\n[1]', "line 2: list, not an object"),
        ("a.csv", "question,answer\na,b\nc", "row 2: 1 cells, but the header names 2"),
        ("a.csv", 'question\n"a', "not valid CSV"),
        ("a.parquet", "PAR1 no", "not a valid Parquet file"),
        ("a.parquet", "", "not a valid Parquet file"),
        ("a.json", b'["\xff"]', "not UTF-8"),
        ("a.txt", "hello", "unknown file format '.txt'. Give one of .json, .jsonl, .csv, .parquet"),
        ("a.json", '[{"question": "a"}, {"questoin": "b"}]', "row 2: no column 'question'. Did you mean 'questoin'?"),
        ("a.json", '[{"question": 3}]', "row 1, question: int, not text"),
        ("a.json", '[{"question": " "}]', "row 1, question: empty"),
        ("a.json", '[{"messages": []}]', "row 1, messages: list, not a list of messages"),
        ("a.json", '[{"messages": "hello"}]', "row 1, messages: not valid JSON"),
        ("a.json", '[{"messages": ["hi"]}]', r"row 1, messages[0]: str, not an object"),
        ("a.json", '[{"messages": [{"role": "usr"}]}]', r"messages[0].role: 'usr' is not a role. Did you mean 'user'?"),
        ("a.json", '[{"messages": [{"role": "user", "content": 3}]}]', r"messages[0].content: int, not text"),
        ("a.json", '[{"messages": [{"role": "assistant", "tool_calls": [3]}]}]', r"tool_calls[0]: not a call"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path, name, text, says):
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        FileTasks(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_cell_may_be_as_long_as_a_document(tmp_path):
    text = "word " * 200_000
    path = written(tmp_path, "a.csv", f"question,answer\nsum up: {text},x\n")
    assert read_rows(path) == [("row 1", {"question": f"sum up: {text}", "answer": "x"})]


def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["question", "question"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for read in (read_rows, ParquetTable):
        with pytest.raises(ConfigError, match="two columns have the name 'question'"):
            read(tmp_path / "a.parquet")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        FileTasks(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="the folder has no data files"):
        FileTasks(tmp_path / "folder.json")


def test_messages_come_in_openais_shape_and_win_over_the_question():
    given = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"x": "6*7"}'}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "calc"},
    ]
    wanted = (
        Message("system", "Be brief."),
        Message("user", "6*7?"),
        Message("assistant", "", tool_calls=(ToolCall("1", "calc", {"x": "6*7"}),)),
        Message("tool", "42", tool_call_id="1", name="calc"),
    )
    row = {"messages": given, "question": "other", "id": 12, "agent_name": "tool"}
    task = RowReader("file").task(row, "here")
    assert task.messages == wanted
    assert (task.id, task.agent) == ("12", "tool")
    assert task.fields == row
    assert messages_of_cell(json.dumps(given), "here") == wanted
