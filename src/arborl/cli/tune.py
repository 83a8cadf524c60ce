"""`arborl tune`: try settings of a run, and say which is best."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.tune import HPOSummary, StudyPlan, Trial
    from arborl.tune.run_objective import RunObjective
    from arborl.tune.space import Domain

OPTIONS = (
    "--trials", "--space", "--param", "--metric", "--direction", "--study", "--jobs", "--backend", "--budget",
    "--no-pruning", "--keep", "--log-level", "--help",
)  # fmt: skip
ROWS = 20
"""Trials in the table at the end."""
ENDED = {"pruned": "stopped early", "failed": "failed", "lost": "lost", "running": "running"}


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE a.b=c", help="A run's YAML file, and settings on top of it.", show_default=False),
    ] = None,
    trials: Annotated[int, typer.Option(help="In all, the settings as they are included.")] = 20,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES", show_default=False,
            help="log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or A,B,C; once for each parameter.",
        ),
    ] = None,
    space: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="A search space, before --param.", show_default=False)
    ] = None,
    metric: Annotated[str, typer.Option(help="Of held-out tasks: reward, success, greedy_success, loss, …")] = "reward",
    direction: Annotated[
        str | None, typer.Option(help="maximize or minimize; without it, as the metric is meant.", show_default=False)
    ] = None,
    study: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it is kept; studies/NAME without.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Trials at once, each a process; they share the cores.")] = 1,
    backend: Annotated[str, typer.Option(help="optuna, ray_tune or wandb.")] = "optuna",
    budget: Annotated[str, typer.Option(help="episodes: all trials play as many; free: as they come.")] = "episodes",
    pruning: Annotated[bool, typer.Option(help="Stop trials that do worse on their way than the median.")] = True,
    keep: Annotated[str, typer.Option(help="Checkpoints: best, or all.")] = "best",
    log_level: LogLevel = None,
) -> None:  # fmt: skip
    """Search for better settings. The same command goes on with a study that was stopped or killed.

    Example: arborl tune run.yaml --trials 12 --param learner.lr=log:1e-5:1e-2 --param rollout.group_size=4,8,16
    """
    paths, settings = split(arguments or (), OPTIONS)
    given = one_path(paths, "file")
    _one_of("--budget", budget, ("episodes", "free"))
    _one_of("--keep", keep, ("best", "all"))

    from arborl.tune.run_objective import RunObjective, default_direction
    from arborl.tune.trial import StudyPlan

    searched = read(space, param or ())
    file = Path(given) if given is not None else None
    objective = RunObjective.of(file, settings, metric, budget, pruning, max(jobs, 1))  # type: ignore[arg-type]
    folder = study.expanduser() if study is not None else Path("studies") / objective.base.name
    plan = StudyPlan(
        searched, trials, folder, direction or default_direction(objective.metric),  # type: ignore[arg-type]
        pruning, objective.base.seed, jobs, objective.defaults(searched),
    )  # fmt: skip
    run(plan, objective, backend, keep)


def run(plan: StudyPlan, objective: RunObjective, backend: str, keep: str) -> None:
    """Search, with a line for each trial, and show what was found."""
    from arborl.tune.backends import find_backend
    from arborl.tune.study import KeepBestCheckpoint, search

    chosen = find_backend(backend)
    objective.check(plan.space)
    tidy = KeepBestCheckpoint(plan)

    def tell(trial: Trial) -> None:
        typer.echo(line(trial, objective.metric))
        if keep == "best":
            tidy(trial)

    typer.echo(f"{objective.base.name}: {plan.trials} trials into {plan.folder}, {plan.jobs} at a time")
    try:
        found = asyncio.run(search(plan, objective, chosen, objective.about, tell, objective.metric))
    except KeyboardInterrupt:
        typer.echo("Stopped. The same command goes on.", err=True)
        raise
    if keep == "best":
        tidy.finish(found)
    show(found, objective)


def _one_of(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ConfigError(f"{option} {given}: must be one of {', '.join(known)}.{did_you_mean(given, known)}")


def read(space: str | None, params: Sequence[str]) -> dict[str, Domain]:
    """The search space: a file's or a named one, and single parameters over it."""
    from arborl.tune.space import SPACES, get_search_space, read_param, read_space, read_space_file

    found: dict[str, Domain] = {}
    if space is not None and space in SPACES:
        found = read_space(get_search_space(space))
    elif space is not None and Path(space).is_file():
        found = read_space_file(Path(space))
    elif space is not None:
        near = did_you_mean(space, SPACES)
        raise ConfigError(f"--space {space}: is no file, and no space is called so.{near} Known: {', '.join(SPACES)}.")
    for text in params:
        name, domain = read_param(text)
        found[name] = domain
    return found or read_space(found)


def line(trial: Trial, metric: str) -> str:
    """A trial in one line."""
    number = "–" if trial.value is None else f"{trial.value:.4g}"
    state = "" if trial.state == "done" else f"  {ENDED[trial.state]}" + (f": {trial.reason}" if trial.reason else "")
    return f"trial {trial.number:3}  {metric} {number:>7}  {trial.seconds:6.1f} s  {words(trial)}{state}"


def words(trial: Trial) -> str:
    """What was tried."""
    if trial.default:
        return "the settings as they are"
    return "  ".join(
        f"{name}={f'{value:.4g}' if isinstance(value, float) else value}" for name, value in trial.params.items()
    )


def show(found: HPOSummary, objective: RunObjective) -> None:
    """The trials as a table, and the best as a command."""
    from rich.console import Console

    terminal = Console()
    terminal.print(table(found, objective.metric))
    if len(found.trials) > ROWS:
        typer.echo(f"… and {len(found.trials) - ROWS} more, in {found.folder / 'summary.json'}")
    typer.echo(verdict(found, objective.metric))
    typer.echo(f"study folder: {found.folder}   (summary.json, history.png, parameters.png, trials/)")
    if not found.best.default:
        file = [str(objective.file)] if objective.file is not None else []
        command = ["arborl", "train", *file, *objective.settings, *objective.overrides(found.best_params)]
        typer.echo(f"train with the best:\n  {shlex.join(command)}")


def verdict(found: HPOSummary, metric: str) -> str:
    """Best against default, in a sentence."""
    best = f"best: {metric} {found.best_reward:.4g} (trial {found.best.number})"
    if found.gain is None:
        return f"{best}; the settings as they are did not come to an end, so there is nothing to compare with"
    if found.best.default:
        return f"{best}: no trial was better than the settings as they are"
    return f"{best}; the settings as they are: {found.default_reward:.4g}, so {found.gain:+.4g} at the same budget"


def table(found: HPOSummary, metric: str) -> Table:
    """One row a trial, the best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    sign = -1 if found.direction == "maximize" else 1
    order = {"done": 0, "pruned": 1, "running": 2, "failed": 3, "lost": 4}
    ranked = sorted(found.trials, key=lambda t: (order[t.state], sign * (t.value or 0.0), not t.default, t.number))
    names = list(dict.fromkeys(name for trial in found.trials for name in trial.params))
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("trial", metric, *names, "seconds", ""):
        shown.add_column(heading, justify="right" if heading else "left")
    for trial in ranked[:ROWS]:
        cells = [
            "–" if (v := trial.params.get(n)) is None else f"{v:.4g}" if isinstance(v, float) else str(v) for n in names
        ]
        value = "–" if trial.value is None else f"{trial.value:.4g}"
        remark = "as they are" if trial.default else ENDED.get(trial.state, "")
        style = "bold" if trial.number == found.best.number else None
        shown.add_row(str(trial.number), value, *map(Text, cells), f"{trial.seconds:.0f}", remark, style=style)
    return shown
