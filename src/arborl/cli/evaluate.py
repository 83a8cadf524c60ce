"""`arborl evaluate`: how well runs, checkpoints and models play, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import LogLevel, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.trainer.standings import Played

TRUST = "Import, start and contact what a run's folder names, though it is not yours."
OPTIONS = (
    "--env", "--episodes", "--attempts", "--temperature", "--input", "--message", "--model", "--base-url",
    "--api-key-env", "--output", "--json", "--trust", "--log-level", "--help",
)  # fmt: skip


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH… a.b=c", help="Runs, checkpoints, models or YAML files, and settings.", show_default=False
    ),
]
Env = Annotated[str, typer.Option(metavar="NAME", help="The environment.", show_default=False)]
Episodes = Annotated[int | None, typer.Option(metavar="N", min=1, help="Held-out tasks to play.", show_default=False)]
Attempts = Annotated[
    int | None, typer.Option(metavar="K", min=1, help="Episodes of each task; gives pass@k.", show_default=False)
]
Temperatures = Annotated[
    list[float] | None, typer.Option(metavar="T", min=0, help="A way of playing; may be repeated. 0: greedy.")
]
Input = Annotated[
    Path | None, typer.Option("--input", metavar="FILE", help="Prompts to answer instead.", show_default=False)
]
Messages = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="A prompt to answer instead; may be repeated.")
]
Models = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A further model; openai:NAME is behind --base-url.")
]
BaseUrl = Annotated[str | None, typer.Option(metavar="URL", help="Where openai:NAME is served.", show_default=False)]
KeyEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with its key.", show_default=False)
]
FORMS = ".json, .csv or .html: the numbers; .jsonl: every episode. May be repeated."
Output = Annotated[list[Path] | None, typer.Option(metavar="FILE", help=FORMS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers, or the answers, as JSON.")]


def evaluate(
    arguments: Arguments = None,
    env: Env = "",
    episodes: Episodes = None,
    attempts: Attempts = None,
    temperature: Temperatures = None,
    given: Input = None,
    message: Messages = None,
    model: Models = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    output: Output = None,
    as_json: AsJson = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    log_level: LogLevel = None,
) -> None:
    """Measure runs, checkpoints, models, or what a YAML file begins with, on held-out tasks or on your prompts."""
    from arborl.view.standings import check_form, write

    paths, settings = split(arguments or (), OPTIONS)
    names = [*paths, *(model or ())]
    check_names(names, base_url)
    settings += [f"env={env}"] if env else []
    settings += [f"evaluation.tasks={episodes}"] if episodes is not None else []
    for path in output or ():
        check_form(path)
    prompts = read_prompts(given, message or ())
    if prompts is not None and (env or episodes is not None):
        raise ConfigError("--env and --episodes are about held-out tasks, and --input and --message bring their own.")

    from arborl import training_run

    where = {} if base_url is None else {"base_url": base_url}
    options = training_run.MeasureOptions(
        settings, temperature or (), attempts, prompts, key=api_key_env, trust=trust, **where
    )
    played = training_run.measure(names, options)
    for path in output or ():
        write(played, path)
    if as_json:
        typer.echo(as_text(played, prompts is not None))
        return
    if message and not output:
        say(played)
    if prompts is None or any(one.judged for one in played):
        show(names, played)
    for path in output or ():
        typer.echo(f"{path}  written.")


def as_text(played: Sequence[Played], replies: bool) -> str:
    """As JSON: what was answered, or the numbers."""
    from arborl.view.standings import as_tree, episodes

    shown = list(episodes(played)) if replies else as_tree(played)
    return json.dumps(shown, indent=2, ensure_ascii=False, default=str)


def check_names(names: Sequence[str], base_url: str | None) -> None:
    """That somebody is named, and that nobody is a setting which lost its `=`."""
    from arborl.config.load_config import find_setting
    from arborl.models.find import EMBEDDED

    if not names:
        raise ConfigError(
            "nothing to evaluate. Write `arborl evaluate PATH`: "
            "a run folder, a checkpoint, a model's name or a YAML file."
        )
    if base_url is not None and not any(name.startswith("openai:") for name in names):
        raise ConfigError("--base-url is where a model is served. Name it: --model openai:NAME.")
    for name in names[1:]:
        known = None if name in EMBEDDED or Path(name).exists() else find_setting(name)
        if known is not None:
            raise ConfigError(f"{name!r}: no such folder or file, and a setting is written {known}=VALUE.")


def read_prompts(path: Path | None, messages: Sequence[str]) -> list[dict[str, Any]] | None:
    """The rows to answer: of a file (JSON, JSONL, CSV, Parquet; a JSON list may be of plain texts), and as typed."""
    found: list[dict[str, Any]] = []
    if path is not None:
        from arborl.data.reading.files import open_table

        found = _texts(path) or [dict(row) for row in _all(open_table(path))]
    found += [{"question": text} for text in messages]
    return found if path is not None or messages else None


def _texts(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON list of nothing but texts; else none."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return []
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []  # the reader of rows says what is wrong with it
    is_texts = isinstance(read, list) and read and all(isinstance(one, str) for one in read)
    return [{"question": text} for text in read] if is_texts else []


def _all(table: Any) -> Any:
    return table.rows(range(sum(table.sizes)))


def say(played: Sequence[Played]) -> None:
    """What was answered; with the name of who said it where there are several."""
    for one in played:
        for group in one.groups:
            for episode in group.episodes:
                if len(played) > 1:
                    typer.echo(f"{one.name} ({one.way}):")
                if episode.failure is not None:
                    typer.echo(f"arborl: failed: {episode.failure}", err=True)
                elif not episode.turns:
                    typer.echo(f"arborl: no reply: {episode.stop}. Write a larger sampling.max_context.", err=True)
                else:
                    typer.echo(episode.answer)
    if not any(episode.turns for one in played for group in one.groups for episode in group.episodes):
        raise typer.Exit(1)


def show(names: Sequence[str], played: Sequence[Played]) -> None:
    """The numbers, the sources' own, and who is better than whom."""
    from rich.console import Console

    from arborl.trainer.standings import compare

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has no edge
    console.print(table(" ".join(names), played), crop=False)
    for pair in compare(played):
        ends = "" if pair.low is None or pair.high is None else f" [{pair.low:+.3g}, {pair.high:+.3g}]"
        whose = f"{pair.second} less {pair.first}, {pair.way}: {pair.metric} {pair.difference:+.4g}{ends}"
        console.print(f"{whose}, p = {pair.p:.3g} over {pair.tasks} tasks", markup=False, soft_wrap=True)


def table(title: str, played: Sequence[Played]) -> Table:
    """One row a metric, one column a way of playing."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from arborl.view.standings import told

    shown = Table(box=box.SIMPLE, title=Text(title), title_justify="left", min_width=min(len(title), 120))
    shown.add_column("metric")
    several = len({one.name for one in played}) > 1
    for one in played:
        shown.add_column(Text(f"{one.name}\n{one.way}" if several else one.way), justify="right")
    for source in dict.fromkeys([None, *(source for one in played for source in one.sources)]):
        columns = [{name: told(score) for name, score in one.scores(source).items()} for one in played]
        for column, one in zip(columns, played, strict=True):
            tasks, _, failed = one.count(source)
            column |= {"tasks": str(tasks), "failed": str(failed)}
        for name in dict.fromkeys(name for column in columns for name in column):
            label = name if source is None else f"{name}/{source}"
            shown.add_row(Text(label), *(column.get(name, "–") for column in columns))
    return shown
