"""`arborl data make | prepare | inspect | mix`."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import SETTINGS, AsJson, SettingsCommand, argument, file_and_settings, option, path_and_settings
from arborl.errors import ConfigError, disk_errors

if TYPE_CHECKING:
    from arborl.config import RunConfig
    from arborl.data import Mixture
    from arborl.types import Task

MAX_INSPECTED_ROWS = 10_000
data = typer.Typer(name="data", help="Make, inspect and mix data.", no_args_is_help=True, rich_markup_mode=None)


@data.command("make", cls=SettingsCommand, context_settings=SETTINGS)
def make(
    arguments: Annotated[list[str], argument("NAME a=b", "A data set, and its settings.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data"),
    count: Annotated[int | None, option(help="Number of rows.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of all rows.")] = 0,
) -> None:
    """Generate a data set: arithmetic, gsm8k, code, facts, documents, mixed or transcripts."""
    import yaml

    from arborl.data.generated.datasets import make as write
    from arborl.seedling.transcript_rows import transcripts

    name, settings = path_and_settings(arguments, "data set")
    if name is None:
        known = "arithmetic, gsm8k, code, facts, documents, mixed, transcripts"
        raise ConfigError(f"no data set. Write its name first: {known}.")
    options = {key: yaml.safe_load(text) for key, _, text in (setting.partition("=") for setting in settings)}
    options |= {"seed": seed} | ({} if count is None else {"count": count})
    for path, rows in write(name, out, {"transcripts": transcripts}, **options).items():
        typer.echo(f"{path}  {rows} rows")


@data.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(help="longbench-v2, novelqa or webshop")],
    source: Annotated[Path, typer.Option("--input", help="File of the data set; folder of webshop.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("data"),
    books: Annotated[Path | None, option(help="Folder with the books of novelqa.")] = None,
    mc_to_sa: Annotated[bool, option("--mc-to-sa", help="Ask for the text of the right choice.")] = False,
    val_share: Annotated[float, typer.Option(help="Share of the rows for validation.")] = 0.1,
    products: Annotated[int | None, option(help="Number of products of webshop; default: all.", min=100)] = None,
) -> None:
    """Convert a public data set into rows; webshop: into files for env.args.data of the environment shop."""
    from arborl.data.longbench import prepare_longbench, prepare_novelqa

    if name == "webshop":
        return _prepare_webshop(source, out, products)
    if products is not None:
        raise ConfigError(f"--products is for webshop, not for {name}. Leave it out.")
    if name == "longbench-v2":
        written = prepare_longbench(source, out, mc_to_sa=mc_to_sa, val_share=val_share)
    elif name == "novelqa" and books is not None and not mc_to_sa:
        written = prepare_novelqa(source, out, books, val_share=val_share)
    else:
        raise ConfigError(
            f"{name!r}: write longbench-v2, webshop, or novelqa with --books FOLDER and without --mc-to-sa."
        )
    for side, rows in written.items():
        if rows:
            typer.echo(f"{out / side}.parquet  {rows} rows")


def _prepare_webshop(source: Path, out: Path, products: int | None) -> None:
    from arborl.envs.games.shop_catalogue import prepare_webshop

    try:
        with disk_errors(out):
            written = prepare_webshop(source.expanduser(), out.expanduser(), products)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    for file, rows in written.items():
        typer.echo(f"{out / file}  {rows} products")
    typer.echo(f"play: arborl env play shop data={out}   train: arborl train env=shop env.args.data={out}")


@data.command("inspect")
def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON, JSONL, CSV, Parquet, or a folder of them.")],
    question: Annotated[str, typer.Option(help="Column of the problem.")] = "question",
    model: Annotated[str, typer.Option(help="Model whose template and tokenizer are used.")] = "seedling",
) -> None:
    """Print columns, lengths and sources of a file, and three prompts as the model reads them."""
    from arborl.chat import Renderer
    from arborl.data.reading.row_reader import RowReader
    from arborl.data.reading.table_files import open_table
    from arborl.models.model_files import resolve

    table, reader = open_table(Path(file)), RowReader(Path(file).stem, question)
    total = int(table.sizes.sum())
    count = min(total, MAX_INSPECTED_ROWS)
    rows = table.rows(range(count))
    tasks = [reader.task(row, f"{file}, {table.place(n)}", str(n)) for n, row in enumerate(rows)]
    renderer = Renderer.from_folder(resolve(model))
    typer.echo(f"{file}: {total:,} rows" + (f", the first {count:,} inspected" if count < total else ""))
    typer.echo("\ncolumns")
    for name, types in _column_types(rows).items():
        typer.echo(f"  {name:<24} {types}")
    typer.echo("\nprompt lengths (5 %, median, 95 %, maximum)")
    rendered = [renderer.render(task.messages) for task in tasks]
    texts = [one.text for one in rendered]
    typer.echo(f"  characters  {_quantiles([len(text) for text in texts])}")
    typer.echo(f"  tokens      {_quantiles([len(renderer.encode(one)) for one in rendered[:1000]])}   ({model})")
    for column in ("data_source", "agent_name"):
        if any(row.get(column) is not None for row in rows):
            counts = table.labels(column).count().most_common(20)
            typer.echo(f"\n{column}: " + ", ".join(f"{name} ({number:,})" for name, number in counts))
    for number, task in enumerate(tasks[:3]):
        typer.echo(f"\nprompt of {table.place(number)}\n{_prompt_text(task, texts[number])}")


def _column_types(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Types of every column, and its number of empty rows."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        types = Counter(type(row[name]).__name__ for row in rows if row.get(name) is not None)
        empty = sum(row.get(name) is None for row in rows)
        columns[str(name)] = " or ".join(types) + (f", empty in {empty} rows" if empty else "")
    return columns


def _quantiles(lengths: Sequence[int]) -> str:
    cuts = statistics.quantiles(lengths, n=20) if len(lengths) > 1 else [float(lengths[0])] * 19
    return f"{cuts[0]:.0f}, {cuts[9]:.0f}, {cuts[18]:.0f}, {max(lengths)}"


def _prompt_text(task: Task, text: str) -> str:
    lines = (text if len(text) <= 1500 else f"{text[:1500]} …").splitlines()
    answer = task.fields.get("answer")
    last = f"  answer: {str(answer)[:200]}" if answer is not None else ""
    return "\n".join([*(f"  | {line}" for line in lines), last])


@data.command("mix", cls=SettingsCommand, context_settings=SETTINGS)
def mix(
    arguments: Annotated[list[str], argument("CONFIG a.b=c", "A YAML file, and settings that override it.")],
    batches: Annotated[int, typer.Option(help="Number of batches.", min=1)] = 1000,
    as_json: AsJson = False,
) -> None:
    """Draw batches as training does, without training, and print their composition."""
    from arborl.config.load_config import load
    from arborl.data.mixing.mixture import composition

    config = load(*file_and_settings(arguments, "configuration"))
    found = composition(open_mixture(config), batches, config.rollout.tasks_per_step)
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    from arborl.cli.terminal_table import Text, new_table

    columns = ("target", "achieved", "rows", "drawn", "distinct", "repeats", "coverage", "never_seen")
    table = new_table("source", *columns, left=("source",))
    for name, numbers in found["sources"].items():
        cells = (numbers[column] for column in columns)
        table.add_row(Text(name), *("-" if value is None else f"{value:,g}" for value in cells))
    Console().print(table)
    typer.echo(
        f"{batches} batches of {found['batch_size']}, {found['short_batches']} of them short; largest deviation of a "
        f"source: {found['largest_batch_error']:.3g} rows in a batch, {found['largest_total_error']:.3g} in total."
    )


def open_mixture(config: RunConfig) -> Mixture:
    """The mixture of a run; the tokenizer is loaded only if prompt lengths are limited."""
    from arborl.data import Mixture, open_source

    length = None
    if any(source.max_prompt_tokens for source in [config.data, *config.data.sources.values()]):
        from arborl.chat import Renderer
        from arborl.envs.prompt_wrapper import prepend_system_prompt as with_system
        from arborl.models.model_files import resolve

        model = config.model
        renderer = Renderer.from_folder(
            resolve(model.name), chat_args=model.chat_args, chat_template=model.chat_template
        )

        def length(messages: Any) -> int:
            return len(renderer.encode(renderer.render(with_system(messages, config.agent.system or ""))))

    given = None
    if config.data.offline:
        from arborl.data.source_factory import OfflineRows
        from arborl.rollout.offline_episodes import ROW_KINDS

        given = OfflineRows(ROW_KINDS[config.algorithm.loss], lambda task: 0, config.sampling.max_context)
    source = open_source(config.data, config.env.name, config.seed, length, offline=given)
    if not isinstance(source, Mixture):
        raise ConfigError("no rows to mix: the environment makes the tasks. Write data.path or data.sources.")
    return source
