"""`arborl train`: from a file and settings to a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.cli.evaluate import TRUST
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.config import RunConfig

RUNS = Path("runs")
OPTIONS = ("--config", "--save", "--resume", "--print", "--stub", "--profile", "--trust", "--log-level", "--help")


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE a.b=c", help="A YAML file, and settings on top of it.", show_default=False),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE alone.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="The same as output_dir=DIR.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="latest|STEP|PATH", help="Go on from a checkpoint.", show_default=False)
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the resolved configuration, checked, and stop.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    stub: Annotated[bool, typer.Option("--stub", help="Run the whole loop on scripted replies, in seconds.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also write torch's trace of two steps, profile.json.")
    ] = False,
    log_level: LogLevel = None,
) -> None:
    """Train. Without arguments, the demo: a tiny model learns to cross a frozen lake.

    Example: arborl train --config run.yaml --save runs/mine learner.lr=1e-5
    """
    from arborl.config.config_base import dump_yaml
    from arborl.config.load_config import load

    paths, settings = split(arguments or (), OPTIONS)
    given = one_path([*paths, *([str(config_file)] if config_file is not None else [])], "file")
    file = Path(given) if given is not None else None
    folder = next((text for text in settings if text.lstrip("+").partition("=")[0] == "output_dir"), None)
    if save is not None and folder is not None:
        raise ConfigError(f"--save {save} and {folder} both say where the run is kept. Leave one out.")
    save = save.expanduser() if save is not None else None
    if resume is None:
        config = load(file, settings)
        config = config.model_copy(update={"output_dir": save}) if save is not None else config
    else:
        config, resume = resumed(file, settings, resume, trust, save)
    if print_only:
        from arborl.training_run.build import check

        check(config)
        typer.echo(dump_yaml(config), nl=False)
        return
    from arborl import training_run

    training_run.train(config, resume=resume, stub=stub, profile=profile)


def resumed(
    file: Path | None, settings: Sequence[str], resume: str, trust: bool = False, save: Path | None = None
) -> tuple[RunConfig, str]:
    """The configuration of a run that goes on, and the checkpoint it goes on from.

    Args:
        file: replaces the run's own `config.yaml`; the settings go on top of either.
        settings: `output_dir=FOLDER` names the run; else the path in `resume` does; else it is the newest of its name.
        resume: `latest`, a step, the path of a checkpoint, or that of a run, which means its latest.
        trust: import what the run's own file names though this user did not write it.
        save: the run's folder, as `output_dir` would name it.
    """
    from arborl.config.load_config import load
    from arborl.config.trust import load_run_config

    # Only these two say which run is meant; the others may make sense on top of the run's own file alone.
    naming = [text for text in settings if text.lstrip("+").partition("=")[0] in ("output_dir", "name")]
    config = load(file, settings if file is not None else naming)
    here = None if resume == "latest" or resume.isdecimal() else _run_of(Path(resume).expanduser())
    folder = save or config.output_dir or here or newest(RUNS, config.name if file is not None or naming else None)
    if file is None:
        own = folder / "config.yaml"
        if not own.is_file():
            raise ConfigError(
                f"{own.absolute()}: no such file, so {folder} is no run to resume. Write output_dir=FOLDER."
            )
        config = load_run_config(own, settings, trust)
    is_run = here is not None and here == Path(resume).expanduser()
    return config.model_copy(update={"output_dir": folder}), "latest" if is_run else resume


def newest(runs: Path, name: str | None = None) -> Path:
    """The run `name` or `name-NNN` below `runs` with the highest number; without a name, the one begun last."""
    here = sorted(file.parent for file in runs.glob("*/config.yaml"))
    if name is None:
        if not here:
            raise ConfigError(f"{runs.absolute()}: holds no run to resume. Write output_dir=FOLDER.")
        return max(here, key=lambda folder: ((folder / "config.yaml").stat().st_mtime_ns, folder.name))
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    numbered = [(int(match[1] or 0), folder) for folder in here if (match := pattern.fullmatch(folder.name))]
    if not numbered:
        others = f" There: {', '.join(folder.name for folder in here[-5:])}." if here else ""
        raise ConfigError(
            f"{runs.absolute()}: holds no run called {name!r} to resume.{others} Write output_dir=FOLDER."
        )
    return max(numbered)[1]


def _run_of(checkpoint: Path) -> Path | None:
    """The run a checkpoint's path lies in (`RUN/checkpoints/step-000012`), or the run itself."""
    for folder in (checkpoint, *checkpoint.parents[:2]):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None
