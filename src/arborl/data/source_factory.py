"""Task sources from a configuration. Errors in the data are found here, before the run starts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from arborl.data.mixing.task_pools import EnvPool, RowPool, RowSample, StreamPool, TaskPool, call_rows
from arborl.data.reading.row_reader import OfflineRowReader, RowKind, RowReader
from arborl.data.reading.table_files import MEMORY_BYTES, MEMORY_ROWS, objects_only, open_tables
from arborl.data.reading.tables import ColumnValues, HubTable, ListTable, Row, Table
from arborl.data.reading.train_splits import EVALUATION_SEED, CountTokens, PromptFilters, SelectedRows, split_table
from arborl.data.task_source import EnvTasks, TaskSource
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import load
from arborl.types import Episode, Group, Message, Metrics, Task

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
    opener = _Opener(seed, length, objects or {}, offline)
    if not config.sources:
        if not config.has_rows:
            return EnvTasks(env, seed)
        pool = opener.open(_name(config), config)
        return Mixture([pool], {pool.name: 1}, seed, quarantine=config.quarantine)
    pools = opener.split_by(config) if config.by else opener.each(config)
    given = {pool.name: config.sources[pool.name].ratio for pool in pools}
    ratios: dict[str, float | Fraction] = {name: 1.0 if ratio is None else ratio for name, ratio in given.items()}
    total = sum(map(float, ratios.values()))
    if None not in given.values() and abs(total - 1) > 1e-9:
        log.warning("data.sources: the ratios sum to %g, not 1; they are normalized.", total)
    passes = {name: source.passes for name, source in config.sources.items()}
    schedule = [
        (stage.step, {name: ratio for name, ratio in stage.ratios.items() if name in ratios})
        for stage in config.schedule
    ]
    band = SuccessBand(**config.band.model_dump())
    return Mixture(
        pools, ratios, seed, passes, schedule, band, refuse=config.missing == "refuse", quarantine=config.quarantine
    )


def _name(config: RowsConfig) -> str:
    """The name of a source that has none in the configuration."""
    if config.files:
        return "-".join(dict.fromkeys(file.stem for file in config.files))
    if config.hub is not None:
        return config.hub.partition(":")[0].rpartition("/")[2]
    assert config.rows is not None
    return config.rows.name.rpartition(":")[2]


# ------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True, slots=True)
class OfflineRows:
    """How offline rows are read."""

    kind: RowKind
    length: Callable[[Any], int]
    """Tokens of an offline task: prompt and longest response."""
    max_context: int
    """Longest task that is used."""


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens the sources of a run; the fields are the arguments of `open_source`."""

    seed: int
    length: CountTokens | None
    objects: Mapping[str, Any]
    offline: OfflineRows | None

    def each(self, config: DataConfig) -> list[TaskPool]:
        """One pool per source. A missing source is left out if `data.missing=renormalise`."""
        pools = []
        for name, source in config.sources.items():
            try:
                pools.append(self.open(name, source))
            except ConfigError as error:
                # a file is missing or empty, rather than invalid
                absent = any(not file.exists() or file.stat().st_size < 16 for file in source.files)
                if config.missing == "refuse" or not absent:
                    raise ConfigError(f"data.sources.{name}: {error}") from error
                log.warning("data.sources.%s is left out; the other sources replace it: %s", name, error)
        if not pools:
            raise ConfigError(f"data.sources: none of {', '.join(config.sources)} has any rows.")
        return pools

    def open(self, name: str, config: RowsConfig, has_held_out: bool = True) -> TaskPool:
        if isinstance(config, DataConfig) and not config.has_rows:
            assert config.env is not None
            return EnvPool(name, config.env.name, self.seed)
        reader, filters = self._reading(name, config)
        if config.rows is not None and config.endless:
            return StreamPool(self._function(config.rows), reader, self.seed, config.evaluation_share, filters)
        table, apart = self.table(config), self.held_out_table(config)
        share = config.evaluation_share if has_held_out and apart is None else 0.0
        split = split_table(table, reader, share, config.split, filters)
        held_out = None if apart is None else (apart, split_table(apart, reader, 0.0, config.split, filters))
        return RowPool(table, reader, split, self.seed, filters, held_out, config.shuffle)

    def _reading(self, name: str, config: RowsConfig) -> tuple[RowReader, PromptFilters]:
        offline = self.offline
        if offline is None:
            if config.max_prompt_tokens and self.length is None:
                raise ConfigError("data.max_prompt_tokens: there is no tokenizer to count with. Remove it.")
            filters = PromptFilters(config.max_prompt_tokens, config.overlong, config.deduplicate, self.length)
            return RowReader(name, config.question, config.fields), filters
        if config.max_prompt_tokens:
            raise ConfigError("data.max_prompt_tokens: offline rows are limited by sampling.max_context. Remove it.")
        filters = PromptFilters(offline.max_context, config.overlong, config.deduplicate, whole=offline.length)
        return OfflineRowReader(name, config.question, config.fields, offline.kind), filters

    def table(self, config: RowsConfig) -> Table:
        if config.rows is not None:
            return self._function_table(config.rows, self.seed)
        if config.files:
            return open_tables(config.files)
        assert config.hub is not None
        return open_hub(config.hub)

    def held_out_table(self, config: RowsConfig) -> Table | None:
        """Held-out rows that are not rows of `path`; None if there are none."""
        if config.evaluation_rows is not None:
            return self._function_table(config.evaluation_rows, EVALUATION_SEED)
        files = config.evaluation_path
        return None if files is None else open_tables(files if isinstance(files, tuple) else (files,))

    def _function(self, rows: RowsPart) -> Callable[..., Iterable[Row]]:
        return partial(self.objects.get(rows.name) or load(rows.name, "function"), **rows.args)

    def _function_table(self, rows: RowsPart, seed: int) -> Table:
        values: Iterable[Any] = islice(call_rows(self._function(rows), seed), MOST_ROWS + 1)
        listed = [(f"row {number}", row) for number, row in enumerate(values, 1)]
        if len(listed) > MOST_ROWS:
            advice = "Write endless=true if it never ends."
            raise ConfigError(f"{rows.name}: returns more than {MOST_ROWS:,} rows. {advice}")
        return ListTable(objects_only(listed, rows.name), rows.name)

    def split_by(self, config: DataConfig) -> list[TaskPool]:
        """Sources that are rows of one table, separated by a column."""
        table, apart = self.table(config), self.held_out_table(config)
        rows = LabelledRows.of(table, config)
        held_out = None if apart is None else LabelledRows.of(apart, config)
        only_held_out = {name for name, source in config.sources.items() if source.ratio == 0} if held_out else set()
        rows.check_missing(config, {name for name in only_held_out if held_out and held_out.there[name]})
        for labelled in filter(None, (rows, held_out)):
            labelled.check_unnamed(config)
        pools: list[TaskPool] = []
        for name, source in config.sources.items():
            reader, filters = self._reading(name, source)
            held = held_out.part(name) if held_out else None
            part = rows.part(name) or (held if name in only_held_out else None)
            if part is None:
                missing = "data.sources.%s is left out; the other sources replace it: no row of %s"
                log.warning(missing, name, table.where)
                continue
            if held_out and held is None:
                log.warning("data.sources.%s has no held-out rows in %s", name, held_out.table.where)
            share = source.evaluation_share if apart is None else 0.0
            split = split_table(part, reader, share, source.split, filters)
            separate = None if held is None else (held, split_table(held, reader, 0.0, source.split, filters))
            pools.append(RowPool(part, reader, split, self.seed, filters, separate, source.shuffle))
        return pools


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


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Rows of one table, separated by the column `data.by`."""

    table: Table
    labels: ColumnValues
    there: Counter[str | None]
    """Rows by source."""

    @classmethod
    def of(cls, table: Table, config: DataConfig) -> LabelledRows:
        labels = table.labels(str(config.by))
        there = labels.count()
        if not any(name is not None for name in there):
            columns = ", ".join(map(str, table.rows([0])[0]))
            raise ConfigError(f"{table.where}: no column {config.by!r}, which data.by names. It has: {columns}.")
        return cls(table, labels, there)

    def part(self, name: str) -> TableSubset | None:
        """The rows of a source; None if there are none."""
        return TableSubset(self.table, self.labels.rows_of(name)) if self.there[name] else None

    def check_missing(self, config: DataConfig, allowed: Collection[str]) -> None:
        """Raise ConfigError for a source without rows, unless `data.missing=renormalise`."""
        known = [str(name) for name in self.there if name is not None]
        for name in config.sources:
            if not self.there[name] and config.missing == "refuse" and name not in allowed:
                raise ConfigError(
                    f"data.sources.{name}: no row of {self.table.where} has {config.by}={name!r}."
                    f"{did_you_mean(name, known)} "
                    f"There are: {', '.join(f'{other} ({self.there[other]})' for other in known)}."
                )

    def check_unnamed(self, config: DataConfig) -> None:
        """Raise ConfigError for rows of a source that `data.sources` does not name."""
        for other, count in self.there.items():
            if other not in config.sources:
                raise ConfigError(
                    f"{self.table.where}: {count} rows have {config.by}={other!r}, which data.sources does not name. "
                    f"Write data.sources.{other}.ratio=0 to leave them out."
                )


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
        pool = _Opener(seed, None, {}, None).open(Path(path).stem, config)
        super().__init__([pool], {pool.name: 1}, seed)


# ------------------------------------------------------------------------------------------------ checks

MAX_CHECKED_ROWS, MAX_MEASURED_ROWS = 10_000, 500
"""Rows of a table whose columns are checked, and those of them whose tokens are counted."""
PLAIN_AGENTS = ("chat", "tool", "code", "react")
"""Agents whose first prompt is the messages of the task, if the environment is `question`."""
PROMPT_COLUMNS = ("id", "messages", "prompt")


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Checks the tasks of a run against its rewards and its context; of a large table a sample of rows. ConfigError if
    no task has what a reward needs, or if no prompt fits; a warning if some have not, or if nothing is held out."""

    config: RunConfig
    required: Callable[[str], Mapping[str, str]]
    """Source -> fields that its rewards need, with the name of the reward."""
    length: CountTokens

    def check(self, source: TaskSource) -> None:
        if self.config.data.offline:
            return
        if not isinstance(source, Mixture):
            self._check_made("", source.take(0, 1)[0])
            return
        for name, pool in source.pools.items():
            if isinstance(pool, RowPool):
                self._check_pool(name, pool)
            else:
                self._check_made(name, pool.take(0, 1)[0])

    def _check_made(self, name: str, task: Task) -> None:
        """A task of an environment, or of an endless function."""
        for field, reward in self.required(name).items():
            if field not in task.fields:
                part = f"env={task.env}" if task.env else f"data.sources.{name}"
                raise ConfigError(
                    f"the reward {reward!r} needs the column {field!r}, and the tasks of {part} have: "
                    f"{', '.join(task.fields) or 'no columns'}. Write data=FILE with that column, or rewards=[env] for "
                    "the rewards of the environment."
                )

    def _check_pool(self, name: str, pool: RowPool) -> None:
        source = self.config.data.sources.get(name) or self.config.data
        key = f"data.sources.{name}." if name in self.config.data.sources else "data."
        if dropped := pool.counts["overlong"]:
            text = "%s: %s rows are left out: their prompts have more than %smax_prompt_tokens=%d tokens."
            log.warning(text, pool.table.where, f"{dropped:,}", key, source.max_prompt_tokens)
        if self.config.evaluation.tasks and source.evaluation_share and not pool.evaluation(1):
            why = "it has one row" if pool.size == 1 else f"its {pool.size:,} rows are equal"
            text = "%s: nothing is held out, because %s: the run is not evaluated. Add rows, or write %s%s."
            log.warning(text, pool.table.where, why, key, "evaluation_path=FILE")
        for sample in pool.samples(MAX_CHECKED_ROWS):
            if sample.tasks:
                self._check_columns(name, sample, key, pool.reader.question)
                self._check_lengths(name, sample, key)

    def _check_columns(self, name: str, sample: RowSample, key: str, question: str) -> None:
        for field, reward in self.required(name).items():
            columns = list(dict.fromkeys(str(column) for task in sample.tasks for column in task.fields))
            if field not in columns:
                others = [column for column in columns if column not in (question, *PROMPT_COLUMNS)]
                raise ConfigError(
                    f"{sample.where}: the reward {reward!r} needs the column {field!r}, and the rows have: "
                    f"{', '.join(columns)}.{did_you_mean(field, columns)} Write "
                    f"{key}fields.{field}={others[0] if len(others) == 1 else 'COLUMN'}, or another reward."
                )
            if empty := sum(task.fields.get(field) in (None, "") for task in sample.tasks):
                log.warning(
                    "%s: %s have no %s, which the reward %r needs: it fails or is wrong there. Fill these cells, or "
                    "drop the rows.", sample.where, sample.share(empty), field, reward,
                )  # fmt: skip

    def _check_lengths(self, name: str, sample: RowSample, key: str) -> None:
        """Check that prompts leave room for a reply."""
        config, source = self.config, self.config.data.sources.get(name)
        limit = int(source.sampling.get("max_context", 0) if source else 0) or config.sampling.max_context
        measured = sample.every(-(-len(sample.tasks) // MAX_MEASURED_ROWS))
        frame = self.length([Message("user", "")])  # a token of the text has at least one byte
        sizes = [sum(len(one.content.encode("utf-8", "replace")) + frame for one in t.messages) for t in measured.tasks]
        lengths = [
            self.length(task.messages) for task, size in zip(measured.tasks, sizes, strict=True) if size >= limit
        ]
        too_long = [length for length in lengths if length >= limit]
        if not too_long:
            return
        message = (
            f"{sample.where}: the prompts of {measured.share(len(too_long))} leave no room for a reply: the longest "
            f"has {max(too_long):,} tokens, and sampling.max_context is {limit}. Write a larger one, or "
            f"{key}max_prompt_tokens={limit - 1} to leave such rows out."
        )
        env, agent = (source and source.env) or config.env, (source and source.agent) or config.agent
        context = (source and source.context) or config.context
        is_shown = env.name == "question" and agent.name in PLAIN_AGENTS and context.policy == "none"
        if is_shown and len(too_long) == len(measured.tasks):
            raise ConfigError(message)
        log.warning(message)


# ------------------------------------------------------------------------------------------------ demonstrations

DEMONSTRATIONS = "demonstrations"
"""Name of their source."""


def with_demonstrations(
    source: TaskSource, config: RunConfig, rows: OfflineRows, objects: Mapping[str, Any] | None = None
) -> TaskSource:
    """A run's source with demonstrations before its tasks, and optionally besides them."""
    settings = config.demonstrations
    if not settings.enabled:
        return source
    read = RowsConfig(path=settings.path, rows=settings.rows, overlong=config.data.overlong)
    pool = _Opener(config.seed, None, objects or {}, rows).open(DEMONSTRATIONS, read, has_held_out=False)
    return WithDemonstrations(source, Mixture([pool], {DEMONSTRATIONS: 1}, config.seed), settings)


class WithDemonstrations(TaskSource):
    """A source whose first steps are demonstrations."""

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

    def observe_episodes(self, step: int, episodes: Iterable[Episode]) -> None:
        self.inner.observe_episodes(step, episodes)

    def set_aside(self) -> list[dict[str, Any]]:
        return self.inner.set_aside()

    def state(self, step: int) -> dict[str, Any]:
        start = max(step, self.config.steps)
        demonstrations = self.demonstrations.state(step if self.config.weight > 0 else min(step, self.config.steps))
        return {"inner": self.inner.state(start), DEMONSTRATIONS: demonstrations}

    def load_state(self, state: dict[str, Any]) -> None:
        self.inner.load_state(state.get("inner", {}))
        self.demonstrations.load_state(state.get(DEMONSTRATIONS, {}))
