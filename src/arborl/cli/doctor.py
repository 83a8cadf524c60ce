"""`arborl doctor`: is this machine ready, is this model trained rightly, and why does this run not learn?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.doctor.finding import Finding

OPTIONS = ("--model", "--config", "--json", "--strict", "--log-level", "--help")


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN a.b=c", help="A run folder; or settings to look at.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A model, a checkpoint or a run to look at.", show_default=False)
    ] = "",
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The YAML file it is trained with.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    log_level: LogLevel = None,
) -> None:
    """Look at the installation, a run, or a model before it is trained. Exit code 1 if anything failed."""
    found = findings(arguments or (), model, config)
    if as_json:
        import json

        typer.echo(json.dumps([finding.as_json() for finding in found], indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(table(found))
        console.print(verdict(found), highlight=False, soft_wrap=True)
    bad = ("fail", "warn") if strict else ("fail",)
    if any(finding.state in bad for finding in found):
        raise typer.Exit(1)


def findings(arguments: Sequence[str], model: str, config: Path | None) -> list[Finding]:
    """Of whatever is named: a run; a model or settings; or nothing, which is the installation."""
    paths, settings = split(arguments, OPTIONS)
    path = one_path(paths, "run")
    if path is not None and path.endswith(".yaml") and config is None:
        config, path = Path(path), None
    if path is not None and (model or config or settings):
        raise ConfigError(f"{path!r} is a run, which is looked at as it is. Leave --model, --config and settings out.")
    if path is not None:
        from arborl.doctor.run import examine_run

        if not Path(path).is_dir():
            raise ConfigError(f"{path!r} is no folder. Name that of a run, or write --model {path}.")
        return examine_run(Path(path))
    if not (model or config or settings):
        from arborl.doctor.installation import examine_installation

        return examine_installation()
    from arborl.cli.play import model_folder
    from arborl.config.load_config import load
    from arborl.doctor.model import examine_model

    named = [f"model.name={model_folder(model)}"] if model else []
    return examine_model(load(config, [*settings, *named]))


def table(found: Sequence[Finding]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    shown = Table("check", "", box=box.SIMPLE)
    shown.add_column("found", overflow="fold")
    shown.add_column("what to do", overflow="fold")
    for finding in found:
        told = "\n".join([finding.detail, *(f"· {one}" for one in finding.evidence)])
        state = Text(finding.state, style=colours[finding.state])
        shown.add_row(finding.name, state, Text(told), Text(finding.advice))
    return shown


def verdict(found: Sequence[Finding]) -> str:
    """The table in one line."""
    failed, warned = (sum(finding.state == state for finding in found) for state in ("fail", "warn"))
    if not failed and not warned:
        return "Healthy: nothing was found wrong."
    return f"{failed} failed, {warned} to look at. What each means: docs/doctor.md."
