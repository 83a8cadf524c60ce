"""`arborl cluster`: a Ray cluster on hosts over ssh."""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.options import SETTINGS, AsJson, SettingsCommand, option, path_and_settings
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.cluster.launcher.ssh_cluster import ClusterState, HostState, SshCluster

cluster = typer.Typer(
    name="cluster",
    help="Start Ray on hosts over ssh, show its state, run jobs, stop it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Option("--config", help="Cluster file: hosts, ssh, environment, ports.")]
DEFAULT_FILE = Path("cluster.yaml")


def open_fleet(file: Path) -> SshCluster:
    """The cluster of a file; progress is printed on standard error."""
    from arborl.cluster.launcher.cluster_spec import read_cluster_spec
    from arborl.cluster.launcher.ssh_cluster import SshCluster

    if file == DEFAULT_FILE and not file.exists():
        raise ConfigError(
            f"{file}: no such file. Write --config FILE, or create it: `head: HOST` is enough for one host; "
            "docs/scale-out.md lists every key."
        )
    return SshCluster(read_cluster_spec(file), lambda line: typer.echo(line, err=True))


def _exit_on(errors: list[str]) -> None:
    for line in errors:
        typer.echo(f"arborl: {line}", err=True)
    if errors:
        raise typer.Exit(1)


@cluster.command()
def setup(config: File = DEFAULT_FILE) -> None:
    """Start Ray on the head and on all workers without it. Nothing is installed. After an error all is stopped."""
    open_fleet(config).setup()


@cluster.command()
def status(config: File = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Print hosts, resources, jobs and the dashboard's address. Exit code 1 if a host is not up."""
    state = open_fleet(config).status()
    if as_json:
        typer.echo(json.dumps({**asdict(state), "up": state.up}, indent=2, ensure_ascii=False))
    else:
        print_state(state)
    if not state.up:
        raise typer.Exit(1)


@cluster.command()
def logs(
    host: Annotated[str | None, typer.Argument(help="A host; default: all.", show_default=False)] = None,
    config: File = DEFAULT_FILE,
    lines: Annotated[int, typer.Option(min=0, help="Lines of each file.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Print new lines until Ctrl-C.")] = False,
    file: Annotated[list[str] | None, option(help="Log files of Ray; * is a wildcard.")] = None,
    job: Annotated[str | None, option(help="Output of a job, by its id.")] = None,
) -> None:
    """Print the last lines of the hosts' logs, each with its host and file."""
    from arborl.cluster.launcher.cluster_jobs import read_logs

    fleet = open_fleet(config)
    hosts = [fleet.spec.host(host)] if host else [fleet.spec.head] if job else list(fleet.spec.hosts)
    names = [f"job-driver-{job}.log"] if job else list(file or [])
    if any("/" in name for name in names):
        raise ConfigError("--file and --job take names, not paths. `arborl cluster logs --file '*'` shows all files.")

    def print_line(where: str, name: str, line: str) -> None:
        typer.echo(line if job else f"{where} {name}: {line}")

    _exit_on(read_logs(fleet, hosts, print_line, names, lines, follow))


@cluster.command(cls=SettingsCommand, context_settings=SETTINGS)
def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="FILE a.b=c | -- COMMAND", help="A YAML file with settings, or any command."),
    ],
    config: File = DEFAULT_FILE,
    working_dir: Annotated[Path | None, option(help="Folder to upload to all hosts.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait.")] = False,
) -> None:
    """Run a command on the head as a job, with the environment of the cluster file.

    Prints its output and exits with its exit code. Ctrl-C stops the job; a lost connection does not.
    """
    from arborl.cluster.launcher.cluster_jobs import collect_files, submit_job

    fleet = open_fleet(config)
    files = collect_files(working_dir) if working_dir is not None else None
    if command[0].endswith(".yaml"):
        command, files = train_command(fleet, command, working_dir, files)
    job = submit_job(fleet, command, files, not detach, lambda line: typer.echo(line))
    if detach:
        typer.echo(job.id)
        return
    lines = job.message.strip().split(", last available logs")[0].splitlines()  # the logs are already printed
    reason = f", exit code {job.exit_code}. {lines[0] if lines else ''}".rstrip()
    typer.echo(f"job {job.id}: {job.status.lower()}{'' if job.status == 'SUCCEEDED' else reason}", err=True)
    raise typer.Exit(job.exit_code)


def train_command(
    fleet: SshCluster, words: list[str], folder: Path | None, files: dict[str, bytes] | None
) -> tuple[list[str], dict[str, bytes]]:
    """`arborl train` with an uploaded file. The configuration is checked here first."""
    from arborl.config.load_config import format_override, load

    path, settings = path_and_settings(words, "file")
    file = Path(path or "")
    run = load(file, settings)
    if files is None:
        if any(line.startswith("defaults:") for line in file.read_text().splitlines()):
            raise ConfigError(f"{file}: its `defaults` list names other files. Write --working-dir {file.parent}.")
        name, files = file.name, {file.name: file.read_bytes()}
    else:
        assert folder is not None
        if not file.absolute().is_relative_to(folder.absolute()):
            raise ConfigError(f"{file} is not in --working-dir {folder}. Move it there.")
        name = str(file.absolute().relative_to(folder.absolute()))
    if run.name and not any(text.startswith("name=") for text in settings):  # otherwise it is named after Ray's folder
        settings = [*settings, format_override("name", run.name)]
    if run.output_dir is None:  # the default folder is Ray's and is removed with the cluster
        settings = [*settings, f"output_dir=~/runs/{run.name or file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"]
    elif not run.output_dir.is_absolute():
        raise ConfigError(
            f"output_dir={run.output_dir}: is relative to the job's folder, which is removed. Write an absolute path."
        )
    python = fleet.spec.python_of(fleet.spec.head)
    return [python, "-m", "arborl", "train", name, *settings], files


@cluster.command()
def restart(
    host: Annotated[
        str | None, typer.Argument(help="Host to restart; default: all that are down.", show_default=False)
    ] = None,
    config: File = DEFAULT_FILE,
) -> None:
    """Restart Ray on hosts that are down. After a restart of the head its workers are restarted too."""
    _exit_on(open_fleet(config).restart(host))


@cluster.command()
def cleanup(config: File = DEFAULT_FILE) -> None:
    """Stop and remove what setup and restart started on the hosts, and nothing else."""
    _exit_on(open_fleet(config).cleanup())


def print_state(state: ClusterState) -> None:
    from rich.console import Console

    from arborl.cli.terminal_table import new_table

    console = Console()
    if console.width < 100 or not console.is_terminal:
        console = Console(width=160)
    columns = ("host", "role", "state", "address", "CPU", "GPU", "memory GiB", "")
    hosts = new_table(*columns, left=("host", "role", "state", "address", ""))
    for host in state.hosts:
        cells = [_usage(host, "CPU"), _usage(host, "GPU"), _usage(host, "memory", 2**30)]
        hosts.add_row(
            host.address or "-",
            host.role,
            "not started" if host.state == "none" else host.state,
            host.ip,
            *cells,
            host.why,
        )
    console.print(hosts)
    if state.jobs:
        names = ("job", "status", "exit", "started", "command")
        jobs = new_table(*names, left=names, no_wrap=True)
        for job in state.jobs:
            code = "" if job["exit_code"] is None else str(job["exit_code"])
            command = textwrap.shorten(job["command"] or "", max(20, console.width - 70), placeholder=" …")
            started = time.strftime("%m-%d %H:%M:%S", time.localtime(job["started"])) if job["started"] else ""
            jobs.add_row(job["id"] or "-", str(job["status"]).lower(), code, started, command)
        console.print(jobs)
    if state.dashboard:
        typer.echo(f"dashboard: {state.dashboard} on the head; {state.tunnel}")
    not_up = [host for host in state.hosts if host.state != "up"]
    if not_up:
        is_new = all(host.state == "none" for host in state.hosts)
        typer.echo(
            f"{len(not_up)} of {len(state.hosts)} host(s) not up: arborl cluster {'setup' if is_new else 'restart'}"
        )


def _usage(host: HostState, what: str, unit: float = 1) -> str:
    total = host.total.get(what)
    return "" if total is None else f"{host.used.get(what, 0) / unit:.3g}/{total / unit:.3g}"
