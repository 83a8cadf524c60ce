"""`arborl data make | inspect | mix | prepare`: write sets of rows, look at files, see what a mixture gives."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import one_path, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.config import RunConfig
    from arborl.data import Mixture
    from arborl.data.reading.tables import Table
    from arborl.types import Task

SETTINGS = {"ignore_unknown_options": True}
LOOKED_AT = 10_000
data = typer.Typer(name="data", help="Make, look at and mix data.", no_args_is_help=True, rich_markup_mode=None)


@data.command("make", context_settings=SETTINGS)
def make(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME a=b", help="A set, and settings of it.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("data"),
    count: Annotated[int | None, typer.Option(help="Rows.", min=1, show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Decides all of them.")] = 0,
) -> None:
    """Write a set of rows, made from a seed: arithmetic, gsm8k, code, facts, documents, mixed or transcripts."""
    import yaml

    from arborl.data.made.datasets import make as write
    from arborl.seedling.rows import transcripts

    names, settings = split(arguments, ("--out", "--count", "--seed", "--help"))
    name = one_path(names, "set")
    if name is None:
        raise ConfigError(
            "no set is named. Write its name first: arithmetic, gsm8k, code, facts, documents, mixed, transcripts."
        )
    given = {key: yaml.safe_load(text) for key, _, text in (setting.partition("=") for setting in settings)}
    given |= {"seed": seed} | ({} if count is None else {"count": count})
    for path, rows in write(name, out, {"transcripts": transcripts}, **given).items():
        typer.echo(f"{path}  {rows} rows")


@data.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(help="longbench-v2 or novelqa")],
    source: Annotated[Path, typer.Option("--input", help="The set's own file.")],
    out: Annotated[Path, typer.Option(help="Folder for train.parquet and val.parquet.")] = Path("data"),
    books: Annotated[Path | None, typer.Option(help="Folder with the books of novelqa.", show_default=False)] = None,
    mc_to_sa: Annotated[bool, typer.Option("--mc-to-sa", help="Ask for the text of the right choice.")] = False,
    val_share: Annotated[float, typer.Option(help="Share of the rows for validation.")] = 0.1,
) -> None:
    """Turn a public set in its own layout into rows."""
    from arborl.data.public.longbench import prepare_longbench, prepare_novelqa

    if name == "longbench-v2":
        written = prepare_longbench(source, out, mc_to_sa=mc_to_sa, val_share=val_share)
    elif name == "novelqa" and books is not None and not mc_to_sa:
        written = prepare_novelqa(source, out, books, val_share=val_share)
    else:
        raise ConfigError(f"{name!r}: give longbench-v2, or novelqa with --books FOLDER and without --mc-to-sa.")
    for side, rows in written.items():
        if rows:
            typer.echo(f"{out / side}.parquet  {rows} rows")


# ------------------------------------------------------------------------------------------------ inspect


@data.command("inspect")
def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON, JSONL, CSV, Parquet, or a folder of them.")],
    question: Annotated[str, typer.Option(help="Column that holds the problem.")] = "question",
    model: Annotated[str, typer.Option(help="Whose template renders prompts and counts their tokens.")] = "seedling",
) -> None:
    """Print the columns, lengths and sources of a file, and three prompts as the model is shown them."""
    from arborl.chat import Renderer
    from arborl.data.reading.files import open_table
    from arborl.data.reading.rows import Reader
    from arborl.models.load import resolve

    table, reader = open_table(Path(file)), Reader(Path(file).stem, question)
    total = int(table.sizes.sum())
    count = min(total, LOOKED_AT)
    rows = table.rows(range(count))
    tasks = [reader.task(row, f"{file}, {table.place(n)}", str(n)) for n, row in enumerate(rows)]
    renderer = Renderer.from_folder(resolve(model))
    typer.echo(f"{file}: {total:,} rows" + (f", the first {count:,} looked at" if count < total else ""))
    typer.echo("\ncolumns")
    for name, kinds in _columns(rows).items():
        typer.echo(f"  {name:<24} {kinds}")
    typer.echo("\nprompt lengths (5 %, half, 95 %, longest)")
    rendered = [renderer.render(task.messages) for task in tasks]
    texts = [one.text for one in rendered]
    typer.echo(f"  characters  {_spread([len(text) for text in texts])}")
    typer.echo(f"  tokens      {_spread([len(renderer.encode(one)) for one in rendered[:1000]])}   ({model})")
    for column in ("data_source", "agent_name"):
        _values(column, table, rows)
    for number, task in enumerate(tasks[:3]):
        typer.echo(f"\nprompt of {table.place(number)}\n{_shown(task, texts[number])}")


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Every column with its types and how often it is empty."""
    names = dict.fromkeys(name for row in rows for name in row)
    out = {}
    for name in names:
        kinds = Counter(type(row[name]).__name__ for row in rows if row.get(name) is not None)
        empty = sum(row.get(name) is None for row in rows)
        out[str(name)] = " or ".join(kinds) + (f", empty in {empty} rows" if empty else "")
    return out


def _spread(lengths: Sequence[int]) -> str:
    cuts = statistics.quantiles(lengths, n=20) if len(lengths) > 1 else [float(lengths[0])] * 19
    return f"{cuts[0]:.0f}, {cuts[9]:.0f}, {cuts[18]:.0f}, {max(lengths)}"


def _values(column: str, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    if any(row.get(column) is not None for row in rows):
        counts = table.labels(column).count()
        typer.echo(f"\n{column}: " + ", ".join(f"{name} ({number:,})" for name, number in counts.most_common(20)))


def _shown(task: Task, text: str) -> str:
    lines = (text if len(text) <= 1500 else f"{text[:1500]} …").splitlines()
    answer = task.fields.get("answer")
    return "\n".join(
        [*(f"  | {line}" for line in lines), f"  answer: {str(answer)[:200]}" if answer is not None else ""]
    )


# ------------------------------------------------------------------------------------------------ mix


@data.command("mix", context_settings=SETTINGS)
def mix(
    arguments: Annotated[
        list[str], typer.Argument(metavar="CONFIG a.b=c", help="A run's file, and settings.", show_default=False)
    ],
    batches: Annotated[int, typer.Option(help="Batches to draw.", min=1)] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Draw batches as training would, without training, and print what they are made of."""
    from arborl.config.load_config import load
    from arborl.data.mixing.composition import composition

    paths, settings = split(arguments, ("--batches", "--json", "--help"))
    given = one_path(paths, "configuration")
    config = load(Path(given) if given is not None else None, settings)
    found = composition(opened(config), batches, config.rollout.tasks_per_step)
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = ("target", "achieved", "rows", "drawn", "distinct", "repeats", "coverage", "never_seen")
    shown = Table("source", *columns, box=box.SIMPLE)
    for name, numbers in found["sources"].items():
        cells = (numbers[column] for column in columns)
        shown.add_row(Text(name), *("-" if value is None else f"{value:,g}" for value in cells))
    Console().print(shown)
    typer.echo(
        f"{batches} batches of {found['batch_size']}, {found['short_batches']} of them short; a source is at most "
        f"{found['largest_batch_error']:.3g} rows from its share of a batch, {found['largest_total_error']:.3g} in all."
    )


def opened(config: RunConfig) -> Mixture:
    """The mixture of a run; a tokenizer is loaded only where lengths are limited."""
    from arborl.data import Mixture, open_source

    length = None
    limited = [config.data, *config.data.sources.values()]
    if any(source.max_prompt_tokens for source in limited):
        from arborl.chat import Renderer
        from arborl.envs.prompted import opened as with_system
        from arborl.models.load import resolve

        asked = config.model
        renderer = Renderer.from_folder(
            resolve(asked.name), chat_args=asked.chat_args, chat_template=asked.chat_template
        )

        def length(messages: Any) -> int:
            return len(renderer.encode(renderer.render(with_system(messages, config.agent.system or ""))))

    given = None
    if config.data.offline:
        from arborl.data.from_config import GivenRows
        from arborl.rollout.given import KINDS

        given = GivenRows(KINDS[config.algorithm.loss], lambda task: 0, config.sampling.max_context)
    source = open_source(config.data, config.env.name, config.seed, length, given=given)
    if not isinstance(source, Mixture):
        raise ConfigError("there are no rows to mix: the environment makes the tasks. Write data.path or data.sources.")
    return source
