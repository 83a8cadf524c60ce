"""`arborl convert`: another system's script or file as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    system: Annotated[str, typer.Argument(help="verl, agentfly or roll")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Scripts, override lists or YAML; later win.")],
    out: Annotated[Path | None, typer.Option(help="Write the configuration here.", show_default=False)] = None,
) -> None:
    """Turn a script or YAML of verl, AgentFly or ROLL into a configuration, and say what became of every key."""
    import yaml

    from arborl.convert import convert as read

    draft = read(system, files)
    text = yaml.safe_dump(draft.tree(), sort_keys=False, allow_unicode=True, width=120)
    typer.echo(draft.report(), err=out is None)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(f"# Converted from {', '.join(file.name for file in files)} ({system}).\n{text}", encoding="utf-8")
    typer.echo(f"{out}  written. Start with: arborl train {out}")
