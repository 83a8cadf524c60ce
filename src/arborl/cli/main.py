"""`arborl`: the verbs, and what happens to a configuration that cannot run."""

from __future__ import annotations

import errno
import json
import os
import traceback
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from platform import python_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from arborl.cli.chat import chat
from arborl.cli.cluster import cluster
from arborl.cli.convert import convert
from arborl.cli.data import data
from arborl.cli.doctor import doctor
from arborl.cli.env import env
from arborl.cli.evaluate import evaluate
from arborl.cli.examples import EXIT_CODES, add_examples
from arborl.cli.export import export
from arborl.cli.init import init
from arborl.cli.plan import plan
from arborl.cli.rollout import rollout
from arborl.cli.serve import serve
from arborl.cli.tools import tools
from arborl.cli.train import train
from arborl.cli.tune import tune
from arborl.cli.view import compare, report, view
from arborl.errors import ArborError, ConfigError, RunStopped
from arborl.registry import search_current_folder

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class Verbs(TyperGroup):
    """A `ConfigError` of any verb is one line a mistake on stderr, and exit code 2; a run that was stopped, 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._invoke(ctx)
        except ConfigError as error:
            for line in str(error).splitlines():
                typer.echo(f"arborl: {line}", err=True)
            raise typer.Exit(2) from error
        except RunStopped as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        except OSError as error:  # what no room has put into words: a report or a picture that finds the disk full
            if error.errno not in DISK:
                raise
            typer.echo(f"arborl: {error.filename or 'a file'}: cannot be used: {error.strerror}.", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stopped:
            raise typer.Exit(130) from stopped

    def _invoke(self, ctx: Any) -> Any:
        """With `ARBORL_DEBUG=1` everything is said: log lines of all levels, and where an error comes from."""
        if not os.environ.get("ARBORL_DEBUG"):
            return super().invoke(ctx)
        from arborl.track.run_log import debugging, show_level

        if debugging():
            show_level("debug")
        try:
            return super().invoke(ctx)
        except (ArborError, OSError):
            if debugging():
                typer.echo(traceback.format_exc(), err=True)
            raise


app = typer.Typer(
    name="arborl",
    cls=Verbs,
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Without these a mistyped `--a.b=c` would be refused before the verb can say what to write.
SETTINGS = {"ignore_unknown_options": True}
app.command(context_settings=SETTINGS)(train)
app.command(context_settings=SETTINGS)(evaluate)
app.command(context_settings=SETTINGS)(rollout)
app.command(context_settings=SETTINGS)(tune)
app.command(context_settings=SETTINGS)(plan)
app.command(context_settings=SETTINGS)(serve)
app.command(context_settings=SETTINGS)(chat)
app.command(context_settings=SETTINGS)(doctor)
app.command()(view)
app.command()(report)
app.command()(compare)
app.command()(convert)
app.command()(init)
app.command(context_settings=SETTINGS)(export)
app.add_typer(cluster)
app.add_typer(data)
app.add_typer(env)
app.add_typer(tools)


@app.command()
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version."""
    try:
        torch = installed("torch")
    except PackageNotFoundError:
        torch = "not installed"
    if as_json:
        typer.echo(json.dumps({"arborl": installed("arborl"), "python": python_version(), "torch": torch}))
        return
    typer.echo(f"arborl {installed('arborl')} (python {python_version()}, torch {torch})")


add_examples(app)


def main() -> None:
    """Entry point of the console script. Parts are searched in the current folder too."""
    search_current_folder()
    app(prog_name="arborl")
