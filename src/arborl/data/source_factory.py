"""Task sources from a configuration. Errors in the data are found here, before the run starts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from arborl.config.data_config import DataConfig, DemonstrationsConfig, RowsConfig
from arborl.config.part_config import PartConfig as RowsPart
from arborl.config.run_config import RunConfig
from arborl.data.mixing.mixture import Mixture, SuccessBand
from arborl.data.mixing.task_pools import EnvPool, RowPool, StreamPool, TaskPool, call_rows
from arborl.data.reading.row_reader import OfflineRowReader, RowKind, RowReader
from arborl.data.reading.table_files import MEMORY_BYTES, MEMORY_ROWS, objects_only, open_tables
from arborl.data.reading.tables import ColumnValues, HubTable, ListTable, Row, Table
from arborl.data.reading.train_splits import EVALUATION_SEED, CountTokens, PromptFilters, SelectedRows, split_table
from arborl.data.task_source import EnvTasks, TaskSource
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import load
from arborl.types import Group, Metrics, Task

log = logging.getLogger(__name__)

MOST_ROWS = 1_000_000
"""Largest number of rows of a function that is not endless."""


def open_source(
    config: DataConfig,
    env: str,
    seed: int,
    length: CountTokens | None = None,
    objects: Mapping[str, Any] | None = None,
    offline: OfflineRows | None = None,
) -> TaskSource:
    """The tasks of a run.

    Args:
        config: the section `data`.
        env: environment that makes tasks if there are no rows.
        seed: of the run.
        length: counts the tokens of a prompt; needed for a limit on them.
        objects: functions from Python code, by name.
        offline: how offline rows are read.
    """
    if not config.sources:
        if not config.has_rows:
            return EnvTasks(env, seed)
        pool = _open(_name(config), config, seed, length, objects or {}, offline)
        return Mixture([pool], {pool.name: 1}, seed)
    pools = (
        _split_by(config, seed, length, offline) if config.by else _each(config, seed, length, objects or {}, offline)
    )
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
        SuccessBand(**config.band.model_dump()),
        refuse=config.missing == "refuse",
    )


def _name(config: RowsConfig) -> str:
    """The name of a source that has none in the configuration."""
    if config.files:
        return "-".join(dict.fromkeys(file.stem for file in config.files))
    if config.hub is not None:
        return config.hub.partition(":")[0].rpartition("/")[2]
    assert config.rows is not None
    return config.rows.name.rpartition(":")[2]


def _ratios(ratios_or_none: Mapping[str, float | None]) -> dict[str, float | Fraction]:
    ratios: dict[str, float | Fraction] = {
        name: 1.0 if ratio is None else ratio for name, ratio in ratios_or_none.items()
    }
    total = sum(map(float, ratios.values()))
    if all(ratio is not None for ratio in ratios_or_none.values()) and abs(total - 1) > 1e-9:
        log.warning("data.sources: the ratios sum to %g, not 1; they are normalized.", total)
    return ratios


# ------------------------------------------------------------------------------------------------ sources


def _each(
    config: DataConfig, seed: int, length: CountTokens | None, objects: Mapping[str, Any], offline: OfflineRows | None
) -> list[TaskPool]:
    """One pool per source. A missing source is left out if `data.missing=renormalise`."""
    pools = []
    for name, source in config.sources.items():
        try:
            pools.append(_open(name, source, seed, length, objects, offline))
        except ConfigError as error:
            if config.missing == "refuse" or not _absent(source):
                raise ConfigError(f"data.sources.{name}: {error}") from error
            log.warning("data.sources.%s is left out; the other sources replace it: %s", name, error)
    if not pools:
        raise ConfigError(f"data.sources: none of {', '.join(config.sources)} has any rows.")
    return pools


def _absent(source: DataConfig) -> bool:
    """Whether a file is missing or empty, rather than invalid."""
    return bool(source.files) and any(not file.exists() or file.stat().st_size < 16 for file in source.files)


def _open(
    name: str,
    config: RowsConfig,
    seed: int,
    length: CountTokens | None,
    objects: Mapping[str, Any],
    offline: OfflineRows | None = None,
) -> TaskPool:
    reader, filters = _reading(name, config, length, offline)
    if isinstance(config, DataConfig) and not config.has_rows:
        assert config.env is not None
        return EnvPool(name, config.env.name, seed)
    if config.rows is not None and config.endless:
        return StreamPool(_row_function(config.rows, objects), reader, seed, config.evaluation_share, filters)
    table = _table(config) if config.rows is None else _function_table(config.rows, objects, seed)
    apart = None
    if (held_out := _held_out(config, objects)) is not None:
        apart = held_out, split_table(held_out, reader, 0.0, config.split, filters)
    share = 0.0 if apart else config.evaluation_share
    split = split_table(table, reader, share, config.split, filters)
    return RowPool(table, reader, split, seed, filters, apart, config.shuffle)


def _held_out(config: RowsConfig, objects: Mapping[str, Any]) -> Table | None:
    """The table of separate held-out rows, or None."""
    if config.evaluation_rows is not None:
        return _function_table(config.evaluation_rows, objects, EVALUATION_SEED)
    files = config.evaluation_path
    return None if files is None else open_tables(files if isinstance(files, tuple) else (files,))


def _row_function(rows: RowsPart, objects: Mapping[str, Any]) -> Callable[..., Iterable[Row]]:
    return partial(objects.get(rows.name) or load(rows.name, "function"), **rows.args)


def _function_table(rows: RowsPart, objects: Mapping[str, Any], seed: int) -> Table:
    return ListTable(_all_rows(_row_function(rows, objects), rows.name, seed), rows.name)


@dataclass(frozen=True, slots=True)
class OfflineRows:
    """How offline rows are read."""

    kind: RowKind
    length: Callable[[Any], int]
    """Tokens of an offline task: prompt and longest response."""
    max_context: int
    """Longest task that is used."""


def open_offline(
    config: RowsConfig, name: str, seed: int, rows: OfflineRows, objects: Mapping[str, Any] | None = None
) -> Mixture:
    """The offline rows of one file or function; none is held out."""
    table = _table(config) if config.rows is None else _function_table(config.rows, objects or {}, seed)
    reader, filters = _reading(name, config, None, rows)
    pool = RowPool(table, reader, split_table(table, reader, 0.0, "auto", filters), seed, filters)
    return Mixture([pool], {name: 1}, seed)


def _reading(
    name: str, config: RowsConfig, length: CountTokens | None, offline: OfflineRows | None
) -> tuple[RowReader, PromptFilters]:
    """The row reader and the filters of a source."""
    if offline is None:
        return RowReader(name, config.question, config.fields), _filters(config, length)
    if config.max_prompt_tokens:
        raise ConfigError("data.max_prompt_tokens: offline rows are limited by sampling.max_context. Remove it.")
    filters = PromptFilters(offline.max_context, config.overlong, config.deduplicate, whole=offline.length)
    return OfflineRowReader(name, config.question, config.fields, offline.kind), filters


def _filters(config: RowsConfig, length: CountTokens | None) -> PromptFilters:
    if config.max_prompt_tokens and length is None:
        raise ConfigError("data.max_prompt_tokens: there is no tokenizer to count with. Remove it.")
    return PromptFilters(config.max_prompt_tokens, config.overlong, config.deduplicate, length)


def _table(config: RowsConfig) -> Table:
    if config.files:
        return open_tables(config.files)
    assert config.hub is not None
    return open_hub(config.hub)


def _all_rows(make: Any, where: str, seed: int) -> list[tuple[str, Row]]:
    values: Iterable[Any] = islice(call_rows(make, seed), MOST_ROWS + 1)
    rows = [(f"row {number}", row) for number, row in enumerate(values, 1)]
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"{where}: returns more than {MOST_ROWS:,} rows. Write endless=true if it never ends.")
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
            loaded = datasets.load_from_disk(dataset)
        else:
            loaded = datasets.load_dataset(dataset, config or None)
    except Exception as error:  # a download or a dataset may raise anything
        raise ConfigError(f"data.hub={name}: cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(loaded, Mapping):
        chosen = split or ("train" if "train" in loaded else "")
        if chosen not in loaded:
            raise ConfigError(
                f"data.hub={name}: there is no split {chosen!r}. Known: {', '.join(loaded)}. "
                f"Write {dataset}:{config}:SPLIT."
            )
        loaded = loaded[chosen]
    if not len(loaded):
        raise ConfigError(f"data.hub={name}: the dataset has no rows. Give at least one task.")
    if len(loaded) <= MEMORY_ROWS and loaded.data.nbytes <= MEMORY_BYTES:
        return ListTable([(f"row {number}", dict(row)) for number, row in enumerate(loaded, 1)], name)
    return HubTable(loaded, name)


# ------------------------------------------------------------------------------------------------ one file, by a column


def _split_by(config: DataConfig, seed: int, length: CountTokens | None, offline: OfflineRows | None) -> list[TaskPool]:
    """Sources that are rows of one table, separated by a column."""
    table, by = _table(config), str(config.by)
    labels = table.labels(by)
    there = labels.count()
    if not any(name is not None for name in there):
        columns = ", ".join(map(str, table.rows([0])[0]))
        raise ConfigError(f"{table.where}: no column {by!r}, which data.by names. It has: {columns}.")
    _check_names(config, table, there)
    pools: list[TaskPool] = []
    for name, source in config.sources.items():
        if not there[name]:
            log.warning("data.sources.%s is left out; the other sources replace it: no row of %s", name, table.where)
            continue
        reader, filters = _reading(name, source, length, offline)
        part = TableSubset(table, labels.rows_of(name))
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


class TableSubset:
    """Selected rows of a table, renumbered."""

    def __init__(self, table: Table, numbers: np.ndarray):
        self.table, self.numbers, self.where = table, numbers, table.where
        self.sizes, self.runs = SelectedRows(table, numbers).sizes, table.runs
        self.window, self.whole, self.ahead = table.window, table.whole, table.ahead

    def rows(self, numbers: Any) -> list[Row]:
        return self.table.rows(self.numbers[np.asarray(numbers, np.int64)])

    def place(self, number: int) -> str:
        return self.table.place(int(self.numbers[number]))

    def labels(self, column: str) -> ColumnValues:
        return ColumnValues.of([row.get(column) for row in self.rows(range(len(self.numbers)))])


class FileTasks(Mixture):
    """The rows of one file, shuffled in every pass.

    Args:
        path: JSON list, JSONL, CSV or Parquet, or a folder of such files.
        question: column of the problem; a column `messages` in OpenAI's format has precedence.
        seed: of the run.
        evaluation_share: share of held-out rows.
    """

    def __init__(self, path: str | Path, question: str = "question", seed: int = 0, evaluation_share: float = 0.1):
        config = RowsConfig(path=Path(path), question=question, evaluation_share=evaluation_share)
        pool = _open(Path(path).stem, config, seed, None, {})
        super().__init__([pool], {pool.name: 1}, seed)


# ------------------------------------------------------------------------------------------------ demonstrations

DEMONSTRATIONS = "demonstrations"
"""Name of their source."""


def with_demonstrations(
    source: TaskSource, config: RunConfig, rows: OfflineRows, objects: Mapping[str, Any] | None = None
) -> TaskSource:
    """A run's source with demonstrations before its tasks, and optionally besides them.

    Args:
        source: of the sampled tasks.
        config: of the run.
        rows: how transcripts are read.
        objects: parts from Python code, by their name in the configuration.
    """
    settings = config.demonstrations
    if not settings.enabled:
        return source
    read = RowsConfig(path=settings.path, rows=settings.rows, overlong=config.data.overlong)
    return WithDemonstrations(source, open_offline(read, DEMONSTRATIONS, config.seed, rows, objects), settings)


class WithDemonstrations(TaskSource):
    """A source whose first steps are demonstrations.

    Args:
        inner: of the sampled tasks; it starts at the step after.
        demonstrations: offline tasks.
        config: number of demonstrations and steps.
    """

    def __init__(self, inner: TaskSource, demonstrations: Mixture, config: DemonstrationsConfig):
        self.inner, self.demonstrations, self.config = inner, demonstrations, config
        if isinstance(inner, Mixture):
            inner.start_at(config.steps)

    def take(self, step: int, count: int) -> list[Task]:
        is_first = step < self.config.steps
        return self.demonstrations.take(step, self.config.batch) if is_first else self.inner.take(step, count)

    def beside(self, step: int) -> list[Task]:
        mixed = self.config.weight > 0 and step >= self.config.steps
        return self.demonstrations.take(step, self.config.batch) if mixed else []

    def evaluation(self, count: int) -> list[Task]:
        return self.inner.evaluation(count)

    def observe(self, step: int, groups: Sequence[Group]) -> Metrics:
        is_first = step < self.config.steps
        metrics = self.demonstrations.metrics(step) if is_first or self.config.weight > 0 else {}
        return metrics if is_first else metrics | self.inner.observe(step, groups)

    def state(self, step: int) -> dict[str, Any]:
        start = max(step, self.config.steps)
        demonstrations = self.demonstrations.state(step if self.config.weight > 0 else min(step, self.config.steps))
        return {"inner": self.inner.state(start), DEMONSTRATIONS: demonstrations}

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state.get("inner", {}))
        self.demonstrations.load_state(state.get(DEMONSTRATIONS, {}))
