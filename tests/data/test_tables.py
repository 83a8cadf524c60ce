"""Rows by number: large Parquet files, folders, datasets, functions; and what is left out of them."""

import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.config.data_config import DataConfig
from arborl.data import open_source
from arborl.data.mixing.task_pools import RowOrder, RowPool
from arborl.data.reading import table_files as data_files
from arborl.data.reading.row_reader import RowReader
from arborl.data.reading.table_files import open_table
from arborl.data.reading.tables import ConcatenatedTable, HubTable, ListTable, ParquetTable
from arborl.data.reading.train_splits import PromptFilters, RowNumbers, split_table
from arborl.errors import ConfigError
from arborl.types import Message


def parquet(path, rows, group, **more):
    table = pyarrow.table({"question": [f"q{n}" for n in range(rows)], "answer": [str(n) for n in range(rows)], **more})
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


def counted(messages):
    """A stand-in for a tokenizer: a token a character."""
    return sum(len(message.content) for message in messages)


def opened(seed=0, length=None, **settings):
    return open_source(DataConfig.model_validate(settings), "frozen_lake", seed, length)


def questions(tasks):
    return [task.messages[-1].content for task in tasks]


@given(st.integers(1, 400), st.integers(1, 130), st.integers(1, 100), st.data())
@settings(max_examples=40)
def test_a_large_file_gives_the_same_rows_as_a_small_one_whatever_its_groups_and_blocks(rows, group, block, data):
    with tempfile.TemporaryDirectory() as folder:
        table = ParquetTable(parquet(Path(folder) / "a.parquet", rows, group), block=block)
        assert int(table.sizes.sum()) == rows
        assert int(table.runs.sum()) == len(table.sizes)
        requests = data.draw(st.lists(st.integers(0, rows - 1), max_size=50))
        assert table.rows(requests) == [{"question": f"q{n}", "answer": str(n)} for n in requests]
        assert table.rows(np.array(requests[::-1], np.int64)) == table.rows(requests)[::-1]


@given(st.integers(16, 600), st.integers(1, 130), st.integers(1, 60), st.integers(1, 200), st.integers(0, 9))
@settings(max_examples=40)
def test_every_pass_over_blocks_gives_every_row_once_in_a_new_order(rows, group, block, window, seed):
    with tempfile.TemporaryDirectory() as folder:
        table = ParquetTable(parquet(Path(folder) / "a.parquet", rows, group), block=block)
    view = RowNumbers(table, 0.1, held_out=False)
    order = RowOrder(view, seed, window)
    passes = [order.numbers(number * order.size, order.size).tolist() for number in range(3)]
    held = {int(n) for b in range(len(table.sizes)) for n in RowNumbers(table, 0.1, held_out=True).of(b)}
    assert all(sorted(each) == sorted(set(range(rows)) - held) for each in passes)
    if window > 16:
        assert passes[0] != passes[1]
    stream = [n for each in passes for n in each]
    start, count = order.size // 3, order.size
    assert order.numbers(start, count).tolist() == stream[start : start + count]
    assert RowOrder(view, seed, window).numbers(start, count).tolist() == stream[start : start + count]


def test_rows_that_are_read_together_do_not_come_together(tmp_path):
    table = ParquetTable(parquet(tmp_path / "a.parquet", 20_000, 500), block=500)
    numbers = RowOrder(RowNumbers(table, 0.1, held_out=False), 0, table.window).numbers(0, 2000)
    assert len({int(number) // 500 for number in numbers[:50]}) >= 3  # of four blocks in a window
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.5


def test_a_file_that_does_not_fit_memory_is_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MEMORY_ROWS", 1000)
    path = parquet(tmp_path / "big.parquet", 5000, 700)
    source = opened(path=path)
    (pool,) = source.pools.values()
    assert isinstance(pool.table, ParquetTable)
    seen = [row for step in range(45) for row in questions(source.take(step, 100))]
    assert len(seen) == len(set(seen)) == 4500
    held_out = source.evaluation(500)
    assert len(held_out) == 500
    assert not set(questions(held_out)) & set(seen)
    assert source.take(3, 2)[0].id.startswith("big/000")
    assert opened(path=path, seed=1).evaluation(500) == held_out
    whole = opened(path=path, split="content")  # the file is then read once
    assert len(whole.evaluation(9999)) not in (0, 500)


def test_a_bad_row_of_a_large_file_costs_a_warning_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(data_files, "MEMORY_ROWS", 10)
    requests = [None if n % 50 == 7 else f"q{n}" for n in range(200)]
    pyarrow.parquet.write_table(pyarrow.table({"question": requests}), tmp_path / "a.parquet", row_group_size=50)
    source = opened(path=tmp_path / "a.parquet")
    with caplog.at_level(logging.WARNING):
        tasks = source.take(0, 180)
    assert len(tasks) == 180
    assert 1 <= source.metrics(0)["data/a/bad"] <= 4
    assert "a.parquet, row" in caplog.text


def test_a_file_damaged_in_the_middle_names_the_row_group(tmp_path):
    path = parquet(tmp_path / "a.parquet", 4000, 1000)
    footer = pyarrow.parquet.ParquetFile(path).metadata
    start = footer.row_group(2).column(0).dictionary_page_offset
    raw = bytearray(path.read_bytes())
    raw[start : start + 4000] = b"\xff" * 4000
    path.write_bytes(raw)
    table = ParquetTable(path, block=1000)
    assert table.rows([0])[0]["question"] == "q0"
    with pytest.raises(ConfigError, match=r"a\.parquet, row group 3: not a valid Parquet file"):
        table.rows([2500])


def test_wide_rows_get_smaller_blocks(tmp_path):
    document = ["x" * 20_000] * 600
    path = parquet(tmp_path / "wide.parquet", 600, 600, document=[f"{n}{d}" for n, d in enumerate(document)])
    table = ParquetTable(path, budget=4 * 2**20)
    assert table.block <= 64
    assert table.rows([599, 0])[0]["question"] == "q599"
    assert sum(block.nbytes for block in table._kept.values()) < 8 * 2**20


def test_a_folder_of_files_is_one_source(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([{"question": f"a{n}"} for n in range(5)]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"question": f"b{n}"}) for n in range(5)))
    (folder / "notes.txt").write_text("not rows")
    parquet(folder / "c.parquet", 5, 2)
    table = open_table(folder)
    assert isinstance(table, ConcatenatedTable)
    assert [row["question"] for row in table.rows([0, 5, 14, 4])] == ["a0", "b0", "q4", "a4"]
    assert table.place(6) == "b.jsonl, line 2"
    source = opened(path=folder)
    assert len(set(questions(source.take(0, 9) + source.evaluation(9)))) >= 10
    (folder / "d.json").write_text('[{"question": ""}]')
    with pytest.raises(ConfigError, match=r"rows, d\.json, row 1, question: empty"):
        opened(path=folder)


def test_a_dataset_of_hugging_face_is_a_source(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"question": f"q{n}", "answer": "1"} for n in range(30)])
    made.save_to_disk(str(tmp_path / "saved"))
    source = opened(hub=str(tmp_path / "saved"))
    assert len(set(questions(source.take(0, 20)))) == 20
    assert source.take(0, 1)[0].source == "saved"
    datasets.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "both"))
    assert opened(hub=f"{tmp_path / 'both'}::test").take(0, 1)
    with pytest.raises(ConfigError, match=r"there is no split 'dev'. Known: train, test"):
        opened(hub=f"{tmp_path / 'both'}::dev")
    table = HubTable(made, "saved", block=7)
    assert table.sizes.tolist() == [7, 7, 7, 7, 2]
    assert [row["question"] for row in table.rows([29, 3])] == ["q29", "q3"]


def some_rows(count=30, seed=0):
    for n in range(count):
        yield {"question": f"{n} of {count}", "seed": seed}


def endless_rows(seed=0):
    n = 0
    while True:
        yield {"question": f"{seed}/{n}"}
        n += 1


def not_rows():
    yield 3


def test_functions_give_rows():
    source = opened(rows={"name": f"{__name__}:some_rows", "args": {"count": 12}}, seed=5)
    assert source.take(0, 1)[0].fields["seed"] == 5
    assert len(set(questions(source.take(0, 12)))) == source.pools["some_rows"].size <= 11
    with pytest.raises(ConfigError, match="test_tables:not_rows, row 1: int, not an object"):
        opened(rows=f"{__name__}:not_rows")


def test_endless_functions_are_taken_as_they_come_and_resumed_by_their_place():
    source = opened(rows=f"{__name__}:endless_rows", endless=True, seed=3)
    batches = [questions(source.take(step, 7)) for step in range(9)]
    assert len({each for batch in batches for each in batch}) == 63
    fresh = opened(rows=f"{__name__}:endless_rows", endless=True, seed=3)
    assert questions(fresh.take(5, 7)) == batches[5]
    assert questions(source.take(2, 7)) == batches[2]
    held_out = questions(source.evaluation(20))
    assert len(held_out) == 20
    assert not set(held_out) & {each for batch in batches for each in batch}
    ended = opened(rows=f"{__name__}:some_rows", endless=True)
    with pytest.raises(ConfigError, match="the rows ended, though endless is set"):
        ended.take(0, 40)


def test_rows_of_verl_agentfly_and_openai_load_as_they_are():
    verl = {
        "data_source": "long_context_mcq",
        "agent_name": "statelm_tool_agent",
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Which?"}],
        "ability": "reading",
        "reward_model": {"style": "rule", "ground_truth": "B"},
        "document_content": "long text",
        "extra_info": {"index": 7, "difficulty": "hard", "ability": "other"},
    }
    task = RowReader("s").task(verl, "here")
    assert [message.role for message in task.messages] == ["system", "user"]
    assert (task.agent, task.fields["answer"], task.fields["document_content"]) == (
        "statelm_tool_agent",
        "B",
        "long text",
    )
    assert (task.fields["difficulty"], task.fields["ability"]) == ("hard", "reading")  # a column wins
    fly = RowReader("s").task({"question": "6*7?", "answer": "42", "id": "x"}, "here")
    assert (fly.messages, fly.fields["answer"], fly.id) == ((Message("user", "6*7?"),), "42", "x")
    assert RowReader("s").task({"prompt": "Say hi"}, "here").messages == (Message("user", "Say hi"),)
    assert RowReader("s").task({"messages": [{"role": "user", "content": "x"}]}, "here").messages[0].content == "x"


def test_fields_are_named_by_path_and_a_missing_one_is_reported_with_its_row():
    reader = RowReader("s", "problem", {"answer": "info.final", "document": "context", "agent": "who", "id": "key"})
    row = {"problem": "p", "info": {"final": 3}, "context": "c", "who": "tool", "key": 9}
    task = reader.task(row, "a.json, row 1")
    assert (task.fields["answer"], task.fields["document"], task.agent, task.id) == (3, "c", "tool", "9")
    with pytest.raises(
        ConfigError, match=r"a\.json, row 4: no column 'context' for fields\.document\. Did you mean 'contxt'"
    ):
        reader.task({key: value for key, value in row.items() if key != "context"} | {"contxt": "c"}, "a.json, row 4")


def written(tmp_path, rows):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": text, "n": n} for n, text in enumerate(rows)]))
    return path


def test_long_prompts_are_dropped_cut_or_refused_and_counted(tmp_path):
    path = written(tmp_path, ["x" * n for n in range(1, 41)])
    dropped = opened(path=path, max_prompt_tokens=30, length=counted)
    texts = questions(dropped.take(0, 60) + dropped.evaluation(60))
    assert max(map(len, texts)) == 30
    assert dropped.metrics(0)["data/rows/overlong"] == 10
    cut = opened(path=path, max_prompt_tokens=30, overlong="cut", length=counted)
    texts = questions(cut.take(0, 60) + cut.evaluation(60))
    assert max(map(len, texts)) == 30
    assert {"x" * 29 + "…", "x" * 30} <= set(texts)
    assert cut.metrics(0)["data/rows/cut"] == 10
    with pytest.raises(ConfigError, match=r"rows\.json, row 31: the prompt has 31 tokens, max_prompt_tokens is 30"):
        opened(path=path, max_prompt_tokens=30, overlong="refuse", length=counted)
    with pytest.raises(ConfigError, match=r"all rows are filtered out \(40 overlong\)"):
        opened(path=written(tmp_path, ["y" * 50] * 40), max_prompt_tokens=30, length=counted)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: there is no tokenizer"):
        opened(path=path, max_prompt_tokens=30)


def test_rows_with_the_same_prompt_count_once(tmp_path):
    source = opened(path=written(tmp_path, [f"q{n % 12}" for n in range(48)]), deduplicate=True)
    texts = questions(source.take(0, source.pools["rows"].size) + source.evaluation(60))
    assert len(texts) == len(set(texts)) == 12
    assert source.metrics(0)["data/rows/duplicate"] == 36


def test_held_out_rows_may_have_a_file_of_their_own(tmp_path):
    training = written(tmp_path, [f"q{n}" for n in range(20)])
    other = tmp_path / "val.json"
    other.write_text(json.dumps([{"question": f"v{n}"} for n in range(8)]))
    source = opened(path=training, evaluation_path=other)
    assert source.pools["rows"].size == 20
    assert sorted(questions(source.evaluation(50))) == [f"v{n}" for n in range(8)]
    assert opened(path=training, evaluation_path=other, seed=4).evaluation(5) == source.evaluation(5)


def test_one_file_is_reported_apart_by_a_column(tmp_path):
    rows = [{"prompt": f"{kind}{n}", "data_source": kind} for n in range(30) for kind in ("nq", "taco", "math")]
    (tmp_path / "mixed.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mixed.parquet", row_group_size=7)
    for name in ("mixed.json", "mixed.parquet"):
        given = {"path": tmp_path / name, "by": "data_source"}
        ratios = {"taco": {"ratio": 0.4}, "nq": {"ratio": 0.3}, "math": {"ratio": 0.3}}
        source = opened(**given, sources=ratios)
        batch = source.take(0, 10)
        assert sorted(task.source for task in batch) == ["math"] * 3 + ["nq"] * 3 + ["taco"] * 4
        assert all(task.messages[0].content.startswith(task.source) for task in batch)
        assert sum(pool.size for pool in source.pools.values()) + len(source.evaluation(90)) == 90
        with pytest.raises(
            ConfigError, match=r"data.sources.mat: no row .* has data_source='mat'. Did you mean 'math'"
        ):
            opened(**given, sources={"taco": {}, "nq": {}, "mat": {}})
        with pytest.raises(ConfigError, match=r"30 rows have data_source='math', which data.sources does not name"):
            opened(**given, sources={"taco": {}, "nq": {}})
        with pytest.raises(ConfigError, match=r"no column 'kind', which data.by names. It has: prompt, data_source"):
            opened(path=tmp_path / name, by="kind", sources=ratios)


def test_held_out_rows_of_another_file_belong_to_the_sources_by_the_same_column(tmp_path, caplog):
    rows = [{"prompt": f"{kind}{n}", "data_source": kind} for n in range(30) for kind in ("nq", "taco")]
    held = [{"prompt": f"{kind}-v{n}", "data_source": kind} for n in range(4) for kind in ("nq", "aime")]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "val.json").write_text(json.dumps(held))
    given = {"path": tmp_path / "train.json", "evaluation_path": tmp_path / "val.json", "by": "data_source"}
    sources = {
        name: {"ratio": ratio, "evaluation_tasks": 4} for name, ratio in (("nq", 0.5), ("taco", 0.5), ("aime", 0))
    }
    with caplog.at_level(logging.WARNING):
        source = opened(**given, sources=sources)
    assert "data.sources.taco has no held-out rows" in caplog.text
    assert {name: pool.size for name, pool in source.pools.items() if name != "aime"} == {"nq": 30, "taco": 30}
    assert sorted(questions(source.pools["nq"].evaluation(9))) == [f"nq-v{n}" for n in range(4)]
    assert source.pools["taco"].evaluation(9) == []
    assert sorted(questions(source.pools["aime"].evaluation(9))) == [f"aime-v{n}" for n in range(4)]
    assert not any("-v" in text for text in questions(source.take(0, 60)))
    with pytest.raises(
        ConfigError, match=r"val.json: 4 rows have data_source='aime', which data.sources does not name"
    ):
        opened(**given, sources={"nq": {}, "taco": {}})
    with pytest.raises(
        ValueError, match=r"evaluation_path: every source has its own. Write sources.NAME.evaluation_pa"
    ):
        opened(evaluation_path=tmp_path / "val.json", sources={"nq": {"path": tmp_path / "train.json"}})


def test_a_large_file_reported_apart_by_a_column_is_still_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MEMORY_ROWS", 100)
    kinds = ["a" if n % 3 else "b" for n in range(900)]
    parquet(tmp_path / "big.parquet", 900, 80, kind=kinds)
    source = opened(path=tmp_path / "big.parquet", by="kind", sources={"a": {}, "b": {}})
    pool = source.pools["b"]
    assert isinstance(pool, RowPool)
    seen = questions(pool.take(0, pool.size))
    assert len(set(seen)) == pool.size == 300 - len(pool.evaluation(999))
    assert all(int(text[1:]) % 3 == 0 for text in seen)


def test_a_missing_or_empty_source_is_refused_or_left_out(tmp_path, caplog):
    there = written(tmp_path, [f"q{n}" for n in range(20)])
    (tmp_path / "empty.json").write_text("[]")
    for missing in ("none.json", "empty.json"):
        sources = {"a": {"path": there, "ratio": 0.5}, "b": {"path": tmp_path / missing, "ratio": 0.5}}
        with pytest.raises(ConfigError, match=rf"data\.sources\.b: .*{missing}"):
            opened(sources=sources)
        with caplog.at_level(logging.WARNING):
            source = opened(sources=sources, missing="renormalise")
        assert "data.sources.b is left out" in caplog.text
        assert [len(source.take(step, 8)) for step in range(3)] == [8, 8, 8]
    (tmp_path / "wrong.json").write_text('[{"question": 3}, {"question": "long enough to be no empty file"}]')
    with pytest.raises(ConfigError, match=r"wrong\.json, row 1, question: int"):
        opened(sources={"a": {"path": there}, "b": {"path": tmp_path / "wrong.json"}}, missing="renormalise")


def test_ratios_that_do_not_add_up_are_scaled_with_a_warning_or_refused(tmp_path, caplog):
    there = written(tmp_path, [f"q{n}" for n in range(20)])
    sources = {"a": {"path": there, "ratio": 0.4}, "b": {"path": there, "ratio": 0.4}}
    with caplog.at_level(logging.WARNING):
        source = opened(sources=sources)
    assert "the ratios sum to 0.8, not 1; they are normalized" in caplog.text
    assert sorted(task.source for task in source.take(0, 4)) == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match=r"the ratios add up to 0\.8, not to 1, and strict is on"):
        opened(sources=sources, strict=True)


def test_settings_beside_the_sources_hold_for_those_that_say_nothing(tmp_path):
    config = DataConfig.model_validate(
        {
            "question": "problem",
            "sources": {"a": {"path": "a.json"}, "b": {"path": "b.json", "question": "q"}, "c": "c.csv"},
        }
    )
    assert [source.question for source in config.sources.values()] == ["problem", "q", "problem"]
    again = DataConfig.model_validate(config.model_dump())
    assert again == config


def test_content_decides_a_rows_side_in_a_list_and_is_the_same_for_equal_rows():
    table = ListTable([(f"row {n}", {"question": f"q{n % 40}"}) for n in range(80)], "x")
    split = split_table(table, RowReader("x"), 0.5, "content", PromptFilters())
    sides = [{number % 40 for number in side} for side in (split.training.numbers, split.held_out)]
    assert sides[0].isdisjoint(sides[1])
