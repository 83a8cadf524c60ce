"""`arborl export`: a policy as an ordinary model's folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from arborl.cli.arguments import one_path, split
from arborl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def export(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="A run, a checkpoint or a model, of adapters too.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; not there yet.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16, float16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Fill in the variables that the run's folder names, though not yours.")
    ] = False,
) -> None:
    """Write a policy as a Hugging Face folder: adapters merged, log-probabilities compared, a card with its numbers."""
    paths, settings = split(arguments or (), ("--out", "--dtype", "--json", "--trust", "--help"))
    path = one_path(paths, "thing to export")
    if path is None or out is None:
        raise ConfigError("what and where to is missing. Write arborl export PATH --out FOLDER.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: write {', '.join(DTYPES)}.")
    from arborl.training_run.export_model import export as write

    done = write(path, out, tuple(settings), dtype, trust)
    if as_json:
        typer.echo(json.dumps(asdict(done) | {"folder": str(done.folder)}))
        return
    how = "adapters merged, " if done.merged else ""
    typer.echo(f"{out}  written: {how}log-probabilities of {done.tokens} tokens differ by {done.max_gap:.1e} at most.")
