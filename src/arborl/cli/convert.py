"""`arborl convert`: another system's script or file as a configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from arborl.errors import ConfigError, disk_errors


def convert(
    system: Annotated[str, typer.Argument(help="verl, agentfly or roll")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Scripts, override lists or YAML; later win.")],
    out: Annotated[Path | None, typer.Option(help="Write the configuration here.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print report and configuration as JSON.")] = False,
    use: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="What a name of theirs stands for here; may be repeated."),
    ] = None,
) -> None:
    """Turn a script or YAML of verl, AgentFly or ROLL into a configuration, and say what became of every key."""
    from arborl.config.config_base import validate
    from arborl.config.run_config import RunConfig
    from arborl.convert import convert as read
    from arborl.convert.report import as_yaml, rows
    from arborl.training_run.build import check

    draft = read(system, files, _pairs(use or ()))
    tree = draft.tree()
    check(validate(RunConfig, tree))
    text = as_yaml(tree)
    if out is not None:
        with disk_errors(out):
            names = ", ".join(file.name for file in files)
            out.write_text(f"# Converted from {names} ({system}).\n{text}", encoding="utf-8")
    if as_json:
        report = {"system": system, "files": [str(file) for file in files], "lines": rows(draft.lines), "config": tree}
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2, default=str))
        return
    typer.echo(draft.report(shutil.get_terminal_size((140, 40)).columns), err=out is None)
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{out}  written. Look at it with: arborl train {out} --print   Start with: arborl train {out}")


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        theirs, equals, ours = text.partition("=")
        if not (theirs and equals and ours):
            raise ConfigError(f"--use {text}: write --use THEIRS=OURS, as --use ifeval=my_package.rewards:ifeval.")
        pairs[theirs] = ours
    return pairs
