"""`arborl view`, `arborl report`, `arborl compare`: looking at runs."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from arborl.errors import ConfigError

PORT = 7007

Folder = Annotated[
    Path | None, typer.Argument(metavar="RUNS_DIR", help="A folder of runs, or one run.", show_default="runs")
]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="TCP port; 0 for any.", show_default=f"{PORT}, or any free")
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Open no browser; print the address only.")]


def view(runs_dir: Folder = None, port: Port = None, no_browser: NoBrowser = False) -> None:
    """Look at runs in a browser, while they go on: charts, episodes, tokens, trees. Only this machine is let in."""
    root = runs_dir or Path("runs")
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder. Write arborl view RUNS_DIR: a folder of runs, or a run.")
    try:
        from arborl.view.web.serve import Viewer, free_port
    except ImportError as error:
        raise ConfigError(f"the viewer needs {error.name}: pip install 'arborl[serve]'") from error

    def said(at: str) -> None:
        typer.echo(f"arborl: {root} at {at} (Ctrl-C ends it)", err=True)
        if not no_browser:
            Thread(target=webbrowser.open, args=(at,), daemon=True).start()

    Viewer(root, free_port(PORT if port is None else port, port is not None), said).run()


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
Out = Annotated[Path | None, typer.Option(help="The file to write.", show_default="report.html in the run's folder")]


def report(run: Run, out: Out = None) -> None:
    """Write one self-contained page about a run, from what its folder holds so far."""
    from tempfile import TemporaryDirectory

    from arborl.errors import disk_errors
    from arborl.view.report import write_report
    from arborl.view.web.words import decoder_of

    if not any(os.path.lexists(run / name) for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(f"{run}: holds no run. Write arborl report RUN: a folder with config.yaml and metrics.jsonl.")
    path = out or run / "report.html"
    with disk_errors(path), TemporaryDirectory() as drawn:
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = Path(drawn) if out is not None else None
        typer.echo(write_report(run, decoder_of(run), out=path, pictures=pictures))


Runs = Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Folders of runs.")]
Page = Annotated[Path, typer.Option(help="The file to write.")]


def compare(runs: Runs, out: Page = Path("compare.html")) -> None:
    """Write one self-contained page about several runs: seeds of a setting together, with intervals."""
    from arborl.errors import disk_errors
    from arborl.view.comparison import write_comparison

    if len(runs) < 2:
        raise ConfigError("one run alone cannot be compared. Write arborl compare RUN RUN …, or arborl report RUN.")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(write_comparison(runs, out))
