"""`arborl evaluate`: how well a run, a checkpoint or a model plays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

TRUST = "Import what the run's folder names, though it is not yours."


def evaluate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH a.b=c", help="A run, a checkpoint, a model or a YAML file, and settings.", show_default=False
        ),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    log_level: LogLevel = None,
) -> None:
    """Measure a run folder, a checkpoint, a model, or what a YAML file begins with, on held-out tasks."""
    paths, settings = split(arguments or (), ("--trust", "--log-level", "--help"))
    path = one_path(paths, "thing to evaluate")
    if path is None:
        raise ConfigError(
            "nothing to evaluate. Write `arborl evaluate PATH`: "
            "a run folder, a checkpoint, a model's name or a YAML file."
        )
    from rich.console import Console

    from arborl import api

    Console().print(table(path, api.evaluate(path, settings, trust=trust)))


def table(path: str, results: Mapping[str, Mapping[str, float]]) -> Table:
    """One row a metric, one column a way of playing."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE, title=Text(path), title_justify="left", min_width=len(path))
    shown.add_column("metric")
    for way in results:
        shown.add_column(way, justify="right")
    for name in dict.fromkeys(name for metrics in results.values() for name in metrics):
        cells = (metrics.get(name) for metrics in results.values())
        shown.add_row(Text(name), *("–" if value is None else f"{value:.4g}" for value in cells))
    return shown
