"""From a configuration to a source of tasks. Whatever is wrong with the data is found here, before anything starts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from arborl.config.data_config import DataConfig, RowsConfig, SourceConfig
from arborl.config.part_config import PartConfig as RowsPart
from arborl.data.mixing.mixture import Band, Mixture
from arborl.data.mixing.streams import EnvPool, Pool, RowPool, StreamPool, call_rows
from arborl.data.reading.files import MEMORY_BYTES, MEMORY_ROWS, objects_only, open_tables
from arborl.data.reading.given import GivenReader, Kind
from arborl.data.reading.rows import Reader
from arborl.data.reading.splits import EVALUATION_SEED, Filters, Length, Picked, split_table
from arborl.data.reading.tables import HubTable, Labels, ListTable, Row, Table
from arborl.data.source import EnvTasks, TaskSource
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import load

log = logging.getLogger(__name__)

MOST_ROWS = 1_000_000
"""Rows that a function may give unless it is said to be endless."""


def open_source(
    config: DataConfig,
    env: str,
    seed: int,
    length: Length | None = None,
    objects: Mapping[str, Any] | None = None,
    given: GivenRows | None = None,
) -> TaskSource:
    """The tasks of a run.

    Args:
        config: the section `data`.
        env: makes tasks where there are no rows.
        seed: the run's.
        length: counts a prompt's tokens; needed where their number is limited.
        objects: functions handed in by Python code, by name.
        given: how rows are read that say themselves what was said.
    """
    if not config.sources:
        if not config.has_rows:
            return EnvTasks(env, seed)
        pool = _open(_name(config), config, seed, length, objects or {}, given)
        return Mixture([pool], {pool.name: 1}, seed)
    pools = _split_by(config, seed, length, given) if config.by else _each(config, seed, length, objects or {}, given)
    ratios = {pool.name: config.sources[pool.name].ratio for pool in pools}
    return Mixture(
        pools,
        _ratios(ratios),
        seed,
        {name: source.passes for name, source in config.sources.items()},
        [
            (stage.step, {name: ratio for name, ratio in stage.ratios.items() if name in ratios})
            for stage in config.schedule
        ],
        Band(**config.band.model_dump()),
        refuse=config.missing == "refuse",
    )


def _name(config: RowsConfig) -> str:
    """What a source without a name is called."""
    if config.files:
        return "-".join(dict.fromkeys(file.stem for file in config.files))
    if config.hub is not None:
        return config.hub.partition(":")[0].rpartition("/")[2]
    assert config.rows is not None
    return config.rows.name.rpartition(":")[2]


def _ratios(given: Mapping[str, float | None]) -> dict[str, float | Fraction]:
    ratios: dict[str, float | Fraction] = {name: 1.0 if ratio is None else ratio for name, ratio in given.items()}
    total = sum(map(float, ratios.values()))
    if all(ratio is not None for ratio in given.values()) and abs(total - 1) > 1e-9:
        log.warning("data.sources: the ratios add up to %g, not to 1; they are scaled.", total)
    return ratios


# ------------------------------------------------------------------------------------------------ sources


def _each(
    config: DataConfig, seed: int, length: Length | None, objects: Mapping[str, Any], given: GivenRows | None
) -> list[Pool]:
    """Every source by its own rows. One that is missing is left out where the others may fill its place."""
    pools = []
    for name, source in config.sources.items():
        try:
            pools.append(_open(name, source, seed, length, objects, given))
        except ConfigError as error:
            if config.missing == "refuse" or not _absent(source):
                raise ConfigError(f"data.sources.{name}: {error}") from error
            log.warning("data.sources.%s is left out, and the others fill its place: %s", name, error)
    if not pools:
        raise ConfigError(f"data.sources: none of {', '.join(config.sources)} has any rows.")
    return pools


def _absent(source: SourceConfig) -> bool:
    """Whether the file is not there or holds nothing, rather than wrong."""
    return bool(source.files) and any(not file.exists() or file.stat().st_size < 16 for file in source.files)


def _open(
    name: str,
    config: RowsConfig,
    seed: int,
    length: Length | None,
    objects: Mapping[str, Any],
    given: GivenRows | None = None,
) -> Pool:
    reader, filters = _reading(name, config, length, given)
    if isinstance(config, SourceConfig) and not config.has_rows:
        assert config.env is not None
        return EnvPool(name, config.env.name, seed)
    if config.rows is not None and config.endless:
        return StreamPool(_maker(config.rows, objects), reader, seed, config.evaluation_share, filters)
    table = _table(config) if config.rows is None else _given_table(config.rows, objects, seed)
    apart = None
    if (held_out := _held_out(config, objects)) is not None:
        apart = held_out, split_table(held_out, reader, 0.0, config.split, filters)
    share = 0.0 if apart else config.evaluation_share
    split = split_table(table, reader, share, config.split, filters)
    return RowPool(table, reader, split, seed, filters, apart, config.shuffle)


def _held_out(config: RowsConfig, objects: Mapping[str, Any]) -> Table | None:
    """Held-out rows that are kept apart from the others, if there are any."""
    if config.evaluation_rows is not None:
        return _given_table(config.evaluation_rows, objects, EVALUATION_SEED)
    files = config.evaluation_path
    return None if files is None else open_tables(files if isinstance(files, tuple) else (files,))


def _maker(rows: RowsPart, objects: Mapping[str, Any]) -> Callable[..., Iterable[Row]]:
    return partial(objects.get(rows.name) or load(rows.name, "function"), **rows.args)


def _given_table(rows: RowsPart, objects: Mapping[str, Any], seed: int) -> Table:
    return ListTable(_all_rows(_maker(rows, objects), rows.name, seed), rows.name)


@dataclass(frozen=True, slots=True)
class GivenRows:
    """How rows are read that say themselves what was said."""

    kind: Kind
    length: Callable[[Any], int]
    """Of a given task, in tokens: prompt and all that follows, of the longer side."""
    max_context: int
    """Longest that counts."""


def open_given(
    config: RowsConfig, name: str, seed: int, rows: GivenRows, objects: Mapping[str, Any] | None = None
) -> Mixture:
    """The rows of one file or function, of which none is held out."""
    table = _table(config) if config.rows is None else _given_table(config.rows, objects or {}, seed)
    reader, filters = _reading(name, config, None, rows)
    pool = RowPool(table, reader, split_table(table, reader, 0.0, "auto", filters), seed, filters)
    return Mixture([pool], {name: 1}, seed)


def _reading(name: str, config: RowsConfig, length: Length | None, given: GivenRows | None) -> tuple[Reader, Filters]:
    """How rows become tasks, and which of them count."""
    if given is None:
        return Reader(name, config.question, config.fields), _filters(config, length)
    if config.max_prompt_tokens:
        raise ConfigError("data.max_prompt_tokens: given rows count whole, against sampling.max_context. Leave it out.")
    filters = Filters(given.max_context, config.overlong, config.deduplicate, whole=given.length)
    return GivenReader(name, config.question, config.fields, given.kind), filters


def _filters(config: RowsConfig, length: Length | None) -> Filters:
    if config.max_prompt_tokens and length is None:
        raise ConfigError("data.max_prompt_tokens: there is no tokenizer here to count with. Leave it out.")
    return Filters(config.max_prompt_tokens, config.overlong, config.deduplicate, length)


def _table(config: RowsConfig) -> Table:
    if config.files:
        return open_tables(config.files)
    assert config.hub is not None
    return open_hub(config.hub)


def _all_rows(make: Any, where: str, seed: int) -> list[tuple[str, Row]]:
    given: Iterable[Any] = islice(call_rows(make, seed), MOST_ROWS + 1)
    rows = [(f"row {number}", row) for number, row in enumerate(given, 1)]
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"{where}: gives more than {MOST_ROWS:,} rows. Write endless=true if it never ends.")
    return objects_only(rows, where)


def open_hub(name: str) -> Table:
    """A Hugging Face dataset: `name`, `name:config`, `name:config:split`, or a folder that `save_to_disk` wrote."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"data.hub={name}: needs the package datasets. Run: pip install datasets.") from error
    dataset, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        if (Path(dataset) / "state.json").is_file() or (Path(dataset) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(dataset)
        else:
            found = datasets.load_dataset(dataset, config or None)
    except Exception as error:  # whatever a download or a dataset's own files raise
        raise ConfigError(f"data.hub={name}: cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, Mapping):
        chosen = split or ("train" if "train" in found else "")
        if chosen not in found:
            raise ConfigError(
                f"data.hub={name}: there is no split {chosen!r}. Known: {', '.join(found)}. "
                f"Write {dataset}:{config}:SPLIT."
            )
        found = found[chosen]
    if not len(found):
        raise ConfigError(f"data.hub={name}: no rows in it. Give at least one task.")
    if len(found) <= MEMORY_ROWS and found.data.nbytes <= MEMORY_BYTES:
        return ListTable([(f"row {number}", dict(row)) for number, row in enumerate(found, 1)], name)
    return HubTable(found, name)


# ------------------------------------------------------------------------------------------------ one file, by a column


def _split_by(config: DataConfig, seed: int, length: Length | None, given: GivenRows | None) -> list[Pool]:
    """Sources that are rows of one table, told apart by a column."""
    table, by = _table(config), str(config.by)
    labels = table.labels(by)
    there = labels.count()
    if not any(name is not None for name in there):
        columns = ", ".join(map(str, table.rows([0])[0]))
        raise ConfigError(f"{table.where}: no column {by!r}, which data.by names. It has: {columns}.")
    _check_names(config, table, there)
    pools: list[Pool] = []
    for name, source in config.sources.items():
        if not there[name]:
            log.warning("data.sources.%s is left out, and the others fill its place: no row of %s", name, table.where)
            continue
        reader, filters = _reading(name, source, length, given)
        part = Part(table, labels.rows_of(name))
        split = split_table(part, reader, source.evaluation_share, source.split, filters)
        pools.append(RowPool(part, reader, split, seed, filters, shuffle=source.shuffle))
    return pools


def _check_names(config: DataConfig, table: Table, there: Counter[str | None]) -> None:
    known = [str(name) for name in there if name is not None]
    for name in config.sources:
        if not there[name] and config.missing == "refuse":
            raise ConfigError(
                f"data.sources.{name}: no row of {table.where} has {config.by}={name!r}.{did_you_mean(name, known)} "
                f"There are: {', '.join(f'{other} ({there[other]})' for other in known)}."
            )
    for other, count in there.items():
        if other not in config.sources:
            raise ConfigError(
                f"{table.where}: {count} rows have {config.by}={other!r}, which data.sources does not name. Write "
                f"data.sources.{other}.ratio=0 to leave them out."
            )


class Part:
    """Some rows of a table, numbered anew."""

    def __init__(self, table: Table, numbers: np.ndarray):
        self.table, self.numbers, self.where = table, numbers, table.where
        self.sizes, self.runs = Picked(table, numbers).sizes, table.runs
        self.window, self.whole, self.ahead = table.window, table.whole, table.ahead

    def rows(self, numbers: Any) -> list[Row]:
        return self.table.rows(self.numbers[np.asarray(numbers, np.int64)])

    def place(self, number: int) -> str:
        return self.table.place(int(self.numbers[number]))

    def labels(self, column: str) -> Labels:
        return Labels.of([row.get(column) for row in self.rows(range(len(self.numbers)))])


class FileTasks(Mixture):
    """The rows of one file, in a new order every pass.

    Args:
        path: JSON list, JSONL, CSV or Parquet, or a folder of such files.
        question: column that holds the problem; a column `messages` in OpenAI's shape is taken before it.
        seed: the run's.
        evaluation_share: share of the rows that is held out.
    """

    def __init__(self, path: str | Path, question: str = "question", seed: int = 0, evaluation_share: float = 0.1):
        config = RowsConfig(path=Path(path), question=question, evaluation_share=evaluation_share)
        pool = _open(Path(path).stem, config, seed, None, {})
        super().__init__([pool], {pool.name: 1}, seed)
