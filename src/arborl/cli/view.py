"""`arborl view`, `arborl report`, `arborl compare`: looking at runs."""

from __future__ import annotations

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
