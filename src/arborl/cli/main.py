"""`arborl`: all commands, their examples, and how errors become exit codes."""

from __future__ import annotations

import errno
import json
import os
import traceback
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.resources import files
from platform import python_version
from typing import Any

import typer
from typer.core import TyperGroup

from arborl.cli.cluster_commands import cluster
from arborl.cli.data_commands import data
from arborl.cli.env_commands import env
from arborl.cli.evaluate_commands import evaluate, rollout
from arborl.cli.init_command import init
from arborl.cli.options import SETTINGS, AsJson, SettingsCommand
from arborl.cli.plan_command import plan
from arborl.cli.replay_command import replay
from arborl.cli.run_commands import compare, convert, doctor, export, report, view
from arborl.cli.serve_commands import chat, serve
from arborl.cli.tools_commands import tools
from arborl.cli.train_commands import train, tune
from arborl.errors import AlarmStopped, ArborError, ConfigError, RunStopped
from arborl.registry import search_current_folder

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
EXIT_ALARM = 3
EXIT_CODES = """Exit codes: 0 success; 1 the command ran and failed (a run was stopped, nothing was measured, a check
failed); 2 wrong input, with one line for each error on standard error; 3 stopped by an alarm (trainer.on_alarm); 129,
130, 143 stopped by SIGHUP, Ctrl-C, SIGTERM.
"""


def read_examples() -> dict[str, list[str]]:
    """The lines of `examples.txt` by command."""
    examples: dict[str, list[str]] = {}
    for line in files("arborl.cli").joinpath("examples.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            lines = examples.setdefault(line.strip("[]"), [])
        else:
            lines.append(line)
    return examples


EXAMPLES = read_examples()


class CommandGroup(TyperGroup):
    """Errors as messages and exit codes: `ConfigError` 2, one line per error; `RunStopped` 1; `AlarmStopped` 3; Ctrl-C
    130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._invoke(ctx)
        except ConfigError as error:
            for line in str(error).splitlines():
                typer.echo(f"arborl: {line}", err=True)
            raise typer.Exit(2) from error
        except RunStopped as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(EXIT_ALARM if isinstance(error, AlarmStopped) else 1) from error
        except OSError as error:  # for example a full disk while a report is written
            if error.errno not in DISK_ERRORS:
                raise
            typer.echo(f"arborl: {error.filename or 'a file'}: {error.strerror}.", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    def _invoke(self, ctx: Any) -> Any:
        """With `ARBORL_DEBUG=1`: log lines of all levels, and tracebacks of errors."""
        if not (os.environ.get("ARBORL_DEBUG") or os.environ.get("STATESET_DEBUG")):
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
    cls=CommandGroup,
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_WITH_SETTINGS: tuple[Any, ...] = (train, evaluate, rollout, replay, tune, plan, serve, chat, doctor, export)
_WITHOUT_SETTINGS: tuple[Any, ...] = (view, report, compare, convert, init)
for _function in _WITH_SETTINGS:
    app.command(cls=SettingsCommand, context_settings=SETTINGS)(_function)
for _function in _WITHOUT_SETTINGS:
    app.command()(_function)
for _group in (cluster, data, env, tools):
    app.add_typer(_group)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of arborl, Python and torch."""
    try:
        torch = installed("torch")
    except PackageNotFoundError:
        torch = "not installed"
    if as_json:
        typer.echo(json.dumps({"arborl": installed("arborl"), "python": python_version(), "torch": torch}))
        return
    typer.echo(f"arborl {installed('arborl')} (python {python_version()}, torch {torch})")


def add_examples(group: typer.Typer, prefix: str = "") -> None:
    """Add the examples to the help of every command."""
    for command in group.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        if lines := EXAMPLES.get(f"{prefix}{name}"):
            command.epilog = "\n".join(["Examples:" if len(lines) > 1 else "Example:", "", "\b", *lines])
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            add_examples(inner.typer_instance, f"{prefix}{inner.name or inner.typer_instance.info.name} ")


add_examples(app)


def main() -> None:
    """Entry point of the console script. Parts are also searched in the current folder."""
    search_current_folder()
    app(prog_name="arborl")
