"""`arborl train` and `arborl tune`."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import FileAndSettings, LogLevel, Trust, check_choice, file_and_settings, option, other_systems
from arborl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.config import RunConfig
    from arborl.tune import HPOSummary, StudyPlan, Trial
    from arborl.tune.run_objective import RunObjective
    from arborl.tune.space import Domain

RUNS = Path("runs")
MAX_ROWS = 20
"""Trials in the final table."""
TRIAL_STATES = {"pruned": "stopped early", "failed": "failed", "lost": "lost", "running": "running"}


def train(
    arguments: FileAndSettings = None,
    config_file: Annotated[Path | None, option("--config", metavar="FILE", help="The same as FILE.")] = None,
    save: Annotated[Path | None, option("--save", metavar="DIR", help="The same as output_dir=DIR.")] = None,
    resume: Annotated[
        str | None,
        option(
            metavar="latest|best|STEP|PATH|auto",
            help="Continue from a checkpoint; auto: from the newest usable one of output_dir, or start a new run.",
        ),
    ] = None,
    print_only: Annotated[
        bool, option("--print", help="Check and print the resolved configuration, and stop.")
    ] = False,
    diff: Annotated[bool, option("--diff", help="Print only the settings that differ from their defaults.")] = False,
    trust: Trust = False,
    stub: Annotated[bool, option("--stub", help="Run the whole loop with scripted replies, in seconds.")] = False,
    profile: Annotated[
        bool, option("--profile", help="Write a torch profiler trace of two steps, profile.json.")
    ] = False,
    faults: Annotated[
        Path | None, option("--faults", metavar="FILE", help="Inject the faults of a YAML file; see docs/faults.md.")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Train a policy. Without arguments: the demo, a small model that learns to cross a frozen lake."""
    from arborl.config.load_config import load

    file, settings = file_and_settings(arguments, other=config_file)
    output_dir = next((text for text in settings if text.lstrip("+").partition("=")[0] == "output_dir"), None)
    if save is not None and output_dir is not None:
        raise ConfigError(f"--save {save} and {output_dir} both name the run folder. Leave one out.")
    save = save.expanduser() if save is not None else None
    if resume in (None, "auto"):
        with other_systems(file):
            config = load(file, settings, unset="stub" if stub else None)
        config = config.model_copy(update={"output_dir": save}) if save is not None else config
    else:
        config, resume = resume_config(file, settings, resume, trust, save)
    if faults is not None:
        from arborl.training_run.fault_injection import with_faults

        config = with_faults(config, faults)
    if print_only or diff:
        from arborl.training_run.build import check

        check(config)
        typer.echo(print_diff(config) if diff else print_config(config), nl=False)
        return
    from arborl import training_run

    training_run.train(config, resume=resume, stub=stub, profile=profile)  # prints its own progress


def print_config(config: RunConfig) -> str:
    """The whole configuration as YAML, with the values in force of settings that follow others as comments."""
    from arborl.config.config_base import dump_yaml

    lines = [f"#   {key}: {value}\n" for key, value in values_in_force(config).items()]
    return "".join(["# In force on this machine:\n", *lines, dump_yaml(config)])


def print_diff(config: RunConfig) -> str:
    """The settings that differ from their defaults, as a short YAML file with the defaults as comments."""
    import yaml

    from arborl.config.run_config import RunConfig
    from arborl.training_run.resume import changes

    def plain(value: Any) -> str:
        text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
        return text.removesuffix("...\n").strip()

    lines = [f"{one.key}: {plain(one.now)}   # default: {plain(one.before)}\n" for one in changes(RunConfig(), config)]
    return "".join(lines) or "# all settings have their defaults\n"


def values_in_force(config: RunConfig) -> dict[str, str]:
    """What settings that follow the model or the machine amount to here."""
    from arborl.cluster.planner.model_shape import shape_from_config
    from arborl.models.model_files import read_model_config, resolve

    model, learner = config.model, config.learner
    try:
        parameters = shape_from_config(model.name, read_model_config(resolve(model.name)), model).sizes.parameters
    except ConfigError:
        return {"learner.lr": "by the size of the model" if learner.lr is None else f"{learner.lr:g}"}
    from arborl.track.console import thousands

    why = "" if learner.lr is not None else f" (default for {thousands(parameters)} parameters)"
    return {"learner.lr": f"{learner.learning_rate(parameters, model.lora.rank > 0):g}{why}"}


def resume_config(
    file: Path | None, settings: Sequence[str], resume: str, trust: bool = False, save: Path | None = None
) -> tuple[RunConfig, str]:
    """The configuration of a run that continues, and its checkpoint.

    The run is `save` or `output_dir`, else the run of the path in `resume`, else the newest run of the name. `file`
    replaces its `config.yaml`; `resume` is `latest`, `final`, a step, or the path of a checkpoint or of a run.
    """
    from arborl import checkpoint
    from arborl.config.load_config import load
    from arborl.config.trust import load_run_config

    # Only these two settings select the run; others may be valid only together with the run's own file.
    selecting = [text for text in settings if text.lstrip("+").partition("=")[0] in ("output_dir", "name")]
    with other_systems(file):
        config = load(file, settings if file is not None else selecting)
    run = None
    if checkpoint.checkpoint_name(resume) is None:
        resume = str(checkpoint.resolve_path(Path(resume).expanduser()))
        run = _run_of(Path(resume))
    name = config.name if file is not None or selecting else None
    folder = save or config.output_dir or run or newest_run(RUNS, name)
    if file is None:
        run_file = folder / "config.yaml"
        if not run_file.is_file():
            raise ConfigError(
                f"{run_file.absolute()}: no such file, so {folder} is not a run. Write output_dir=FOLDER."
            )
        config = load_run_config(run_file, settings, trust)
    is_run = run is not None and run == Path(resume)
    return config.model_copy(update={"output_dir": folder}), "latest" if is_run else resume


def newest_run(runs: Path, name: str | None = None) -> Path:
    """The run `name` or `name-NNN` with the highest number; without a name, the run that was started last. Stub runs
    are not among them."""
    folders = sorted(file.parent for file in runs.glob("*/config.yaml") if not is_stub(file))
    if name is None:
        if not folders:
            raise ConfigError(f"{runs.absolute()}: contains no run to resume. Write output_dir=FOLDER.")
        return max(folders, key=lambda folder: ((folder / "config.yaml").stat().st_mtime_ns, folder.name))
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    numbered = [(int(match[1] or 0), folder) for folder in folders if (match := pattern.fullmatch(folder.name))]
    if not numbered:
        others = f" Runs: {', '.join(folder.name for folder in folders[-5:])}." if folders else ""
        raise ConfigError(f"{runs.absolute()}: contains no run {name!r} to resume.{others} Write output_dir=FOLDER.")
    return max(numbered)[1]


def is_stub(config_file: Path) -> bool:
    """Whether a run was started with `--stub`."""
    with suppress(OSError, UnicodeDecodeError):
        return re.search(r"^stub: true$", config_file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    return False


def _run_of(checkpoint: Path) -> Path | None:
    """The run folder that contains a checkpoint (`RUN/checkpoints/step-000012`), or the run folder itself."""
    for folder in (checkpoint, *checkpoint.parents[:2]):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


# ------------------------------------------------------------------------------------------------ tune


def tune(
    arguments: FileAndSettings = None,
    trials: Annotated[int, typer.Option(help="Number of trials; the first one is the unchanged configuration.")] = 20,
    param: Annotated[
        list[str] | None,
        option(metavar="KEY=VALUES", help="log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or A,B,C; may be repeated."),
    ] = None,
    space: Annotated[str | None, option(metavar="FILE|NAME", help="A search space; --param overrides it.")] = None,
    metric: Annotated[
        str, typer.Option(help="Metric on held-out tasks: reward, success, greedy_success, loss, …")
    ] = "reward",
    direction: Annotated[str | None, option(help="maximize or minimize; default: by the metric.")] = None,
    study: Annotated[Path | None, option(metavar="DIR", help="Study folder; default: studies/NAME.")] = None,
    jobs: Annotated[int, typer.Option(help="Trials at once, each in a process; they share the cores.")] = 1,
    backend: Annotated[str, typer.Option(help="optuna, ray_tune or wandb.")] = "optuna",
    budget: Annotated[
        str, typer.Option(help="episodes: all trials play equally many; free: by their settings.")
    ] = "episodes",
    pruning: Annotated[bool, typer.Option(help="Stop trials early that are worse than the median.")] = True,
    keep: Annotated[str, typer.Option(help="Checkpoints to keep: best, or all.")] = "best",
    log_level: LogLevel = None,
) -> None:
    """Search for better settings. The same command continues a study that was interrupted."""
    file, settings = file_and_settings(arguments)
    check_choice("--budget", budget, ("episodes", "free"))
    check_choice("--keep", keep, ("best", "all"))

    from arborl.tune.run_objective import RunObjective, default_direction
    from arborl.tune.trial import StudyPlan

    domains = read_space_options(space, param or ())
    objective = RunObjective.of(file, settings, metric, budget, pruning, max(jobs, 1))  # type: ignore[arg-type]
    folder = study.expanduser() if study is not None else Path("studies") / objective.base.name
    plan = StudyPlan(
        domains, trials, folder, direction or default_direction(objective.metric),  # type: ignore[arg-type]
        pruning, objective.base.seed, jobs, objective.defaults(domains),
    )  # fmt: skip
    run_study(plan, objective, backend, keep)


def run_study(plan: StudyPlan, objective: RunObjective, backend: str, keep: str) -> None:
    """Search, print a line for each trial, and show the result."""
    from arborl.tune.backends import find_backend
    from arborl.tune.study import KeepBestCheckpoint, search

    chosen = find_backend(backend)
    objective.check(plan.space)
    keep_best = KeepBestCheckpoint(plan)

    def on_trial(trial: Trial) -> None:
        typer.echo(trial_line(trial, objective.metric))
        if keep == "best":
            keep_best(trial)

    typer.echo(f"{objective.base.name}: {plan.trials} trials, {plan.jobs} at a time, in {plan.folder}")
    try:
        summary = asyncio.run(search(plan, objective, chosen, objective.about, on_trial, objective.metric))
    except KeyboardInterrupt:
        typer.echo("Stopped. The same command continues the study.", err=True)
        raise
    if keep == "best":
        keep_best.finish(summary)
    show_study(summary, objective)


def read_space_options(space: str | None, params: Sequence[str]) -> dict[str, Domain]:
    """The search space of a file or name, with single parameters that override it."""
    from arborl.tune.space import SPACES, get_search_space, read_param, read_space, read_space_file

    domains: dict[str, Domain] = {}
    if space is not None and space in SPACES:
        domains = read_space(get_search_space(space))
    elif space is not None and Path(space).is_file():
        domains = read_space_file(Path(space))
    elif space is not None:
        near = did_you_mean(space, SPACES)
        raise ConfigError(f"--space {space}: no such file or search space.{near} Known: {', '.join(SPACES)}.")
    domains |= dict(map(read_param, params))
    return domains or read_space(domains)


def trial_line(trial: Trial, metric: str) -> str:
    value = "–" if trial.value is None else f"{trial.value:.4g}"
    state = "" if trial.state == "done" else f"  {TRIAL_STATES[trial.state]}"
    state += f": {trial.reason}" if state and trial.reason else ""
    params = "unchanged settings" if trial.default else "  ".join(f"{k}={_number(v)}" for k, v in trial.params.items())
    return f"trial {trial.number:3}  {metric} {value:>7}  {trial.seconds:6.1f} s  {params}{state}"


def _number(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def show_study(summary: HPOSummary, objective: RunObjective) -> None:
    """Print the trials as a table, and the best one as a command."""
    from rich.console import Console

    Console().print(trial_table(summary, objective.metric))
    if len(summary.trials) > MAX_ROWS:
        typer.echo(f"… and {len(summary.trials) - MAX_ROWS} more, in {summary.folder / 'summary.json'}")
    typer.echo(study_result(summary, objective.metric))
    typer.echo(f"study folder: {summary.folder}   (summary.json, history.png, parameters.png, trials/)")
    if not summary.best.default:
        file = [str(objective.file)] if objective.file is not None else []
        command = ["arborl", "train", *file, *objective.settings, *objective.overrides(summary.best_params)]
        typer.echo(f"train with the best settings:\n  {shlex.join(command)}")


def study_result(summary: HPOSummary, metric: str) -> str:
    """Best trial against the unchanged settings, in one sentence."""
    best = f"best: {metric} {summary.best_reward:.4g} (trial {summary.best.number})"
    if summary.gain is None:
        return f"{best}; the trial of the unchanged settings did not finish, so there is no comparison"
    if summary.best.default:
        return f"{best}: no trial was better than the unchanged settings"
    return f"{best}; unchanged settings: {summary.default_reward:.4g}, a gain of {summary.gain:+.4g} at the same budget"


def trial_table(summary: HPOSummary, metric: str) -> Table:
    """One row per trial, the best first."""
    from arborl.cli.terminal_table import Text, new_table

    sign = -1 if summary.direction == "maximize" else 1
    order = {"done": 0, "pruned": 1, "running": 2, "failed": 3, "lost": 4}
    ranked = sorted(summary.trials, key=lambda t: (order[t.state], sign * (t.value or 0.0), not t.default, t.number))
    names = list(dict.fromkeys(name for trial in summary.trials for name in trial.params))
    table = new_table("trial", metric, *names, "seconds", "", left=("",))
    for trial in ranked[:MAX_ROWS]:
        cells = [Text(_number(trial.params.get(name))) for name in names]
        remark = "unchanged" if trial.default else TRIAL_STATES.get(trial.state, "")
        style = "bold" if trial.number == summary.best.number else None
        value = "–" if trial.value is None else f"{trial.value:.4g}"
        table.add_row(str(trial.number), value, *cells, f"{trial.seconds:.0f}", remark, style=style)
    return table
