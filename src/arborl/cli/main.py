"""`arborl`: all commands, their examples, and how errors become exit codes."""

from __future__ import annotations

import errno
import json
import os
import traceback
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
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
from arborl.cli.run_commands import compare, convert, doctor, export, report, view
from arborl.cli.serve_commands import chat, serve
from arborl.cli.tools_commands import tools
from arborl.cli.train_commands import train, tune
from arborl.errors import ArborError, ConfigError, RunStopped
from arborl.registry import search_current_folder

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
EXIT_CODES = """Exit codes: 0 success; 1 the command ran and failed (a run was stopped, nothing was measured, a check
failed); 2 wrong input, with one line for each error on standard error; 130 Ctrl-C.
"""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "arborl train                                  # the demo",
        "arborl train run.yaml trainer.steps=50        # a file, and settings that override it",
        "arborl train run.yaml --print                 # print the resolved configuration only",
        "arborl train --resume latest                  # continue after Ctrl-C or a crash",
    ),
    "evaluate": (
        "arborl evaluate runs/frozen-lake-001                  # its last checkpoint, on held-out tasks",
        "arborl evaluate runs/a runs/b seedling --attempts 4   # compare: pass@k, paired tests",
        "arborl evaluate seedling --env sokoban --episodes 50 --temperature 0 --temperature 0.7",
        "arborl evaluate runs/a --input prompts.json --output out.jsonl",
        'arborl evaluate runs/a --message "What is 2 + 3?"',
        "arborl evaluate runs/a --model openai:NAME --base-url http://127.0.0.1:8000/v1 --json",
    ),
    "rollout": (
        "arborl rollout --env frozen_lake              # one episode, turn by turn",
        "arborl rollout run.yaml --held-out --task 3 --ids",
    ),
    "tune": ("arborl tune run.yaml --trials 12 --param learner.lr=log:1e-5:1e-2 --param rollout.group_size=4,8,16",),
    "serve": ("arborl serve runs/frozen-lake-001 --port 8000",),
    "chat": ("arborl chat runs/statelm-001 --field document_content=report.txt",),
    "view": (
        "arborl view                                   # runs/, in a browser",
        "arborl view runs/frozen-lake-001 --port 7007 --no-browser",
    ),
    "report": ("arborl report runs/frozen-lake-001 --out lake.html",),
    "compare": ("arborl compare runs/seed-1 runs/seed-2 runs/seed-3 --out seeds.html",),
    "doctor": (
        "arborl doctor                                 # the installation",
        "arborl doctor --model Qwen/Qwen2.5-0.5B-Instruct --config run.yaml",
        "arborl doctor runs/frozen-lake-001 --json     # problems of a run, and episodes that show them",
    ),
    "convert": ("arborl convert verl train.sh --out run.yaml",),
    "init": (
        "arborl init                                   # config.yaml: the demo, with comments",
        "arborl init --path run.yaml --preset tools    # or lake, questions, sft; or an algorithm: gspo, ppo, …",
        "arborl init env maze                          # maze.py and test_maze.py",
    ),
    "export": (
        "arborl export runs/frozen-lake-001 --out my-model",
        "arborl export runs/a/checkpoints/step-000020 --out my-model --dtype bfloat16 --json",
    ),
    "plan": (
        "arborl plan run.yaml                          # 1 to 4,096 H200: memory, step time, utilization",
        "arborl plan run.yaml --from runs/a --gpus 8   # with the lengths and latencies of an earlier run",
        "arborl plan model.name=7b model.dtype=bfloat16 --gpus 8 --gpu h100 --reply-tokens 500,4000",
    ),
    "cluster setup": ("arborl cluster setup --config cluster.yaml",),
    "cluster status": ("arborl cluster status --json",),
    "cluster logs": (
        "arborl cluster logs                           # the last lines of all hosts",
        "arborl cluster logs gpu2 --file 'worker-*.err' --lines 100",
        "arborl cluster logs --job arborl-1a2b3c4d --follow",
    ),
    "cluster submit": (
        "arborl cluster submit run.yaml placement=ray placement.engines=8    # a run; its file is uploaded",
        "arborl cluster submit --working-dir . -- python my_training.py      # any command",
    ),
    "cluster restart": (
        "arborl cluster restart                        # all hosts that are down",
        "arborl cluster restart gpu2                   # this host, in any state",
    ),
    "cluster cleanup": ("arborl cluster cleanup",),
    "version": ("arborl version --json",),
    "data make": ("arborl data make arithmetic --out data",),
    "data prepare": ("arborl data prepare longbench-v2 --input data.json --out data",),
    "data inspect": ("arborl data inspect train.json",),
    "data mix": ("arborl data mix run.yaml --batches 1000",),
    "env list": ("arborl env list --json",),
    "env play": ("arborl env play sokoban",),
    "env check": ("arborl env check my_package:Maze",),
    "tools list": ("arborl tools list --json",),
    "tools show": ("arborl tools show calculator",),
    "tools serve": ("arborl tools serve --tools calculator,python",),
}


class CommandGroup(TyperGroup):
    """Errors as messages and exit codes: `ConfigError` 2, one line per error; `RunStopped` 1; Ctrl-C 130."""

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
        except OSError as error:  # for example a full disk while a report is written
            if error.errno not in DISK_ERRORS:
                raise
            typer.echo(f"arborl: {error.filename or 'a file'}: {error.strerror}.", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    def _invoke(self, ctx: Any) -> Any:
        """With `ARBORL_DEBUG=1`: log lines of all levels, and tracebacks of errors."""
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
    cls=CommandGroup,
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_WITH_SETTINGS: tuple[Any, ...] = (train, evaluate, rollout, tune, plan, serve, chat, doctor, export)
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
