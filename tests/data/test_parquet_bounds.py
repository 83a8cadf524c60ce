"""A Parquet file that is small on disk takes no more memory than its rows in use."""

import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from arborl.data.reading.table_files import open_table
from arborl.data.reading.tables import ListTable, ParquetTable, unpacked_size
from arborl.errors import ConfigError

LONG = "x" * 1_000_000
READ = """
import resource, sys
from pathlib import Path
from arborl.data.reading.table_files import open_table
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
table = open_table(Path(sys.argv[1]))
rows = [row for start in range(0, 5000, 500) for row in table.rows([start, start + 1])]
print(len(rows), {len(row["question"]) for row in rows}, table.place(4999))
"""


def repeated(path, rows: int = 5000, as_dictionary: bool = True):
    """One long text in every row: a few hundred bytes that stand for gigabytes."""
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(rows, np.int32)), pyarrow.array([LONG]))
    table = pyarrow.table({"question": text, "answer": ["1"] * rows})
    if not as_dictionary:  # a reader then has no dictionary to keep
        table = table.replace_schema_metadata(None)
        with pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd", store_schema=False) as writer:
            writer.write_table(table)
    else:
        pyarrow.parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_long_text_in_every_row_is_read_in_bounded_memory(tmp_path, as_dictionary):
    path = tmp_path / "rows.parquet"
    repeated(path, as_dictionary=as_dictionary)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("20 {1000000} row 5000\n", "")
    assert isinstance(open_table(path), ParquetTable)


def test_a_column_that_is_packed_beyond_belief_is_refused_in_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    text = pyarrow.array(["x" * 10_000]).take(pyarrow.array(np.zeros(20_000, np.int64)))
    pyarrow.parquet.write_table(pyarrow.table({"question": text}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 50_000
    with pytest.raises(ConfigError, match=r"row group 1: column 'question' is 200,\d+,\d+ bytes in \d+,\d+ bytes"):
        open_table(path)


def test_lists_of_many_values_in_a_few_bytes_are_refused_in_one_line(tmp_path):
    path = tmp_path / "rows.parquet"
    offsets = pyarrow.array(np.arange(90_001, dtype=np.int32) * 100)
    lists = pyarrow.ListArray.from_arrays(offsets, pyarrow.array(np.zeros(9_000_000, np.int8)))
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 90_000, "numbers": lists}), path, compression="zstd")
    with pytest.raises(ConfigError, match="9,000,000 values"):
        open_table(path)


def test_the_longest_text_of_lists_and_structs_is_found(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "y"}]}] * 50
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    reader = ParquetTable(path)
    assert reader._longest_row(0) == 5000 + len("user")
    assert reader.unpacked_within(2**20)
    assert not reader.unpacked_within(100_000)
    assert isinstance(open_table(path), ListTable)
    assert open_table(path).rows([49]) == rows[:1]


def test_a_dictionary_counts_for_every_row_that_it_stands_for():
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 0, None]), pyarrow.array(["abcd", "e"]))
    plain = pyarrow.array(["abcd", "e", "abcd", None])
    assert unpacked_size(pyarrow.table({"a": column})) >= 9
    nested = pyarrow.table({"a": pyarrow.StructArray.from_arrays([column], ["b"])})
    assert unpacked_size(nested) >= 9
    assert unpacked_size(pyarrow.table({"a": plain})) == plain.nbytes


def test_blocks_of_any_size_hold_the_same_rows(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"question": f"{n}" * (n % 7), "answer": None if n % 5 else str(n)} for n in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=333)
    for block in (1, 7, 64, 16_384):
        table = ParquetTable(path, block=block)
        assert table.rows(range(1000)) == rows
        assert list(table.each()) == rows
        names = table.labels("answer")
        assert [names.names[code] for code in names.codes] == [row["answer"] for row in rows]
