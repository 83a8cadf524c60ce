"""`arborl cluster`: a Ray cluster on hosts that ssh reaches."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.cluster.fleet import ClusterState, Fleet, HostState

cluster = typer.Typer(
    name="cluster",
    help="Start Ray on hosts over ssh, look at it, run jobs on it, and take it down.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Option("--config", help="The cluster's file: hosts, ssh, environment, ports.")]
DEFAULT = Path("cluster.yaml")
STATES = {
    "up": "up",
    "down": "down",
    "lost": "lost",
    "none": "not started",
    "unreachable": "unreachable",
    "refused": "refused",
}


def fleet(file: Path) -> Fleet:
    """The cluster of a file; what is done to it is said on standard error."""
    from arborl.cluster.fleet import Fleet
    from arborl.cluster.spec import read_spec

    if file == DEFAULT and not file.exists():
        raise ConfigError(
            f"{file}: no such file. Name the cluster's with --config FILE, or write one: `head: HOST` is enough for "
            "one host, and docs/scale-out.md has every key."
        )
    return Fleet(read_spec(file), lambda line: typer.echo(line, err=True))


def _ended(unsolved: list[str]) -> None:
    """Exit code 1 where some hosts could not be asked."""
    for line in unsolved:
        typer.echo(f"arborl: {line}", err=True)
    if unsolved:
        raise typer.Exit(1)


@cluster.command()
def setup(config: File = DEFAULT) -> None:
    """Start Ray on the head and the workers that it does not run on yet.

    Nothing is installed. Where something is wrong with any host, it is said, and whatever was started is stopped.
    """
    fleet(config).setup()


@cluster.command()
def status(
    config: File = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print hosts, resources, jobs and the dashboard's address; exit code 1 unless all hosts are up."""
    found = fleet(config).status()
    if as_json:
        typer.echo(json.dumps({**asdict(found), "up": found.up}, indent=2, ensure_ascii=False))
    else:
        show(found)
    if not found.up:
        raise typer.Exit(1)


@cluster.command()
def logs(
    host: Annotated[
        str | None, typer.Argument(help="One of the cluster's; all without it.", show_default=False)
    ] = None,
    config: File = DEFAULT,
    lines: Annotated[int, typer.Option(min=0, help="How many of each file.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is added, until Ctrl-C.")] = False,
    file: Annotated[
        list[str] | None, typer.Option(help="Which, of Ray's own; * stands for any.", show_default=False)
    ] = None,
    job: Annotated[str | None, typer.Option(help="What a job prints, by its id.", show_default=False)] = None,
) -> None:
    """Print the last lines of the hosts' logs, each with its host and file."""
    from arborl.cluster.jobs import logs

    asked = fleet(config)
    hosts = [asked.spec.host(host)] if host else [asked.spec.head] if job else list(asked.spec.hosts)
    names = [f"job-driver-{job}.log"] if job else list(file or [])
    if any("/" in name for name in names):
        raise ConfigError("--file and --job take names, not paths. `arborl cluster logs --file '*'` shows all files.")

    def heard(where: str, name: str, line: str) -> None:
        typer.echo(line if job else f"{where} {name}: {line}")

    _ended(logs(asked, hosts, heard, names, lines, follow))


@cluster.command(context_settings={"ignore_unknown_options": True})
def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="FILE a.b=c | -- COMMAND", help="A run's file with settings, or any command."),
    ],
    config: File = DEFAULT,
    working_dir: Annotated[
        Path | None, typer.Option(help="A folder whose files travel with it, to all hosts.", show_default=False)
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id, and do not wait for it.")] = False,
) -> None:
    """Run a command on the head as a job of the cluster, with the environment of the cluster's file.

    Prints what it prints and ends with its exit code. Ctrl-C stops the job; a connection that breaks does not.
    """
    from arborl.cluster.jobs import gather
    from arborl.cluster.jobs import submit as begin

    asked = fleet(config)
    files = gather(working_dir) if working_dir is not None else None
    if command[0].endswith(".yaml"):
        command, files = run_of(asked, command, working_dir, files)
    job = begin(asked, command, files, not detach, lambda line: typer.echo(line))
    if detach:
        typer.echo(job.id)
        return
    why = job.message.strip().split(", last available logs")[0].splitlines()  # these have been printed
    told = "" if job.status == "SUCCEEDED" else f", exit code {job.exit_code}. {why[0] if why else ''}".rstrip()
    typer.echo(f"job {job.id}: {job.status.lower()}{told}", err=True)
    raise typer.Exit(job.exit_code)


def run_of(
    asked: Fleet, words: list[str], folder: Path | None, files: dict[str, bytes] | None
) -> tuple[list[str], dict[str, bytes]]:
    """`arborl train` with a file that travels along; what is wrong in it is said here."""
    from arborl.cli.arguments import one_path, split
    from arborl.config.load_config import format_override, load

    paths, settings = split(words, ("--config", "--working-dir", "--detach"))
    file = Path(one_path(paths, "file") or "")
    run = load(file, settings)
    if files is None:
        if any(line.startswith("defaults:") for line in file.read_text().splitlines()):
            raise ConfigError(
                f"{file}: has a `defaults` list, which names other files. Write --working-dir {file.parent}."
            )
        name, files = file.name, {file.name: file.read_bytes()}
    else:
        assert folder is not None
        if not file.absolute().is_relative_to(folder.absolute()):
            raise ConfigError(f"{file} is not in --working-dir {folder}. Put it there.")
        name = str(file.absolute().relative_to(folder.absolute()))
    if run.name and not any(text.startswith("name=") for text in settings):  # a folder of Ray's would give it its own
        settings = [*settings, format_override("name", run.name)]
    if run.output_dir is None:  # its folder is Ray's, and goes with the cluster
        settings = [*settings, f"output_dir=~/runs/{run.name or file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"]
    elif not run.output_dir.is_absolute():
        raise ConfigError(
            f"output_dir={run.output_dir}: of the head, where it would go with the job. Write a whole path."
        )
    python = asked.spec.python_of(asked.spec.head)
    return [python, "-m", "arborl", "train", name, *settings], files


@cluster.command()
def restart(
    host: Annotated[
        str | None,
        typer.Argument(help="One to stop and start again; without it, all that are down.", show_default=False),
    ] = None,
    config: File = DEFAULT,
) -> None:
    """Bring hosts back whose Ray has ended. A head that comes back is a new one: its workers are restarted too."""
    _ended(fleet(config).restart(host))


@cluster.command()
def cleanup(config: File = DEFAULT) -> None:
    """Stop and remove what setup and restart have started on the hosts, and nothing else."""
    _ended(fleet(config).cleanup())


# ------------------------------------------------------------------------------------------------ for people


def show(found: ClusterState) -> None:
    """As tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = Console()
    if terminal.width < 100 or not terminal.is_terminal:
        terminal = Console(width=160)
    hosts = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("host", "role", "state", "address", "CPU", "GPU", "memory GiB", ""):
        hosts.add_column(name, justify="right" if name in ("CPU", "GPU", "memory GiB") else "left")
    for host in found.hosts:
        cells = [_of(host, "CPU"), _of(host, "GPU"), _of(host, "memory", 2**30)]
        hosts.add_row(host.address or "-", host.role, STATES[host.state], host.ip, *cells, host.why)
    terminal.print(hosts)
    if found.jobs:
        jobs = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        for name in ("job", "status", "exit", "started", "command"):
            jobs.add_column(name, no_wrap=True)
        for job in found.jobs:
            command = textwrap.shorten(job["command"] or "", max(20, terminal.width - 70), placeholder=" …")
            jobs.add_row(job["id"] or "-", str(job["status"]).lower(), _text(job["exit_code"]), _when(job), command)
        terminal.print(jobs)
    if found.dashboard:
        typer.echo(f"dashboard: {found.dashboard} on the head; {found.tunnel}")
    missing = [host for host in found.hosts if host.state != "up"]
    if missing:
        first = all(host.state == "none" for host in found.hosts)
        typer.echo(
            f"{len(missing)} of {len(found.hosts)} host(s) not up: arborl cluster {'setup' if first else 'restart'}"
        )


def _of(host: HostState, what: str, unit: float = 1) -> str:
    total = host.total.get(what)
    return "" if total is None else f"{host.used.get(what, 0) / unit:.3g}/{total / unit:.3g}"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _when(job: dict[str, Any]) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(job["started"])) if job["started"] else ""
