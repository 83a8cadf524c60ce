"""`arborl serve`: a trained model behind OpenAI's API, and its agent behind sessions."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.serve.api_server import ServerLimits
    from arborl.serve.middleware import ApiKeys

LOCAL = ("127.0.0.1", "localhost", "::1")
VARIABLE = "ARBORL_API_KEY"
OPTIONS = ("--port", "--host", "--follow", "--api-key", "--name", "--checkpoint", "--help")


Target = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CHECKPOINT a.b=c", help="A run, a checkpoint, a model or adapters, and settings.", show_default=False
    ),
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="PATH", help="The same as CHECKPOINT.", show_default=False)
]
Host = Annotated[str, typer.Option(help="Address to listen at; others than this machine's need an API key.")]
Follow = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Serve this run's newest checkpoint, and each new one.", show_default=False),
]
Name = Annotated[
    str | None, typer.Option(help="What clients call the model; its own name by default.", show_default=False)
]
Key = Annotated[
    list[str] | None,
    typer.Option(help=f"What clients must bring; may be given several times, or in {VARIABLE}.", show_default=False),
]
KeyFile = Annotated[Path | None, typer.Option(help="File with one key a line.", show_default=False)]
Trust = Annotated[bool, typer.Option("--trust", help="Import and contact what the run's folder names.")]


def serve(
    arguments: Target = None,
    checkpoint: Checkpoint = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port.")] = 8000,
    host: Host = LOCAL[0],
    follow: Follow = None,
    name: Name = None,
    api_key: Key = None,
    api_key_file: KeyFile = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests answered at once; more are told to wait.")] = 1024,
    per_minute: Annotated[float, typer.Option(min=0, help="Requests a minute of one key; 0 for any number.")] = 0,
    burst: Annotated[int, typer.Option(min=1, help="Of these, at once after a pause.")] = 10,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1, help="Megabytes of one request.")] = 16,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions with agents at once.")] = 256,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that requests have to end after SIGTERM.")] = 60.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write no line a request.")] = False,
    trust: Trust = False,
    log_level: LogLevel = None,
) -> None:
    """Serve a model over OpenAI's API, and its agent over sessions.

    Example: arborl serve runs/frozen-lake-001 --port 8000
    """
    paths, settings = split(arguments or (), OPTIONS)
    path = one_path([*paths, *([checkpoint] if checkpoint else [])], "thing to serve") or follow
    if path is None:
        raise ConfigError("nothing to serve. Write `arborl serve CHECKPOINT`: a run, a checkpoint, or a model's name.")
    keys = allowed(host, port, api_key or [], api_key_file)
    from arborl.serve.api_server import ServerLimits

    if not quiet and log_level is None:
        _write_requests()
    bounds = ServerLimits(requests, max_body * 2**20, timeout, per_minute, burst)
    asked = {"settings": settings, "trust": trust, "name": name, "allow_untrained": follow is not None}
    asyncio.run(served(path, asked, keys, bounds, sessions, follow, (host, port, drain)))


def allowed(host: str, port: int, flags: list[str], file: Path | None) -> ApiKeys:
    """The keys of this server, where it may and can listen there with them."""
    try:
        from arborl.serve.api_server import ApiServer  # noqa: F401
        from arborl.serve.middleware import read_api_keys
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'arborl[serve]'") from error
    keys = read_api_keys(flags, file, os.environ.get(VARIABLE))
    if host not in LOCAL and not keys:
        raise ConfigError(f"--host {host} lets other machines in: give --api-key too, or leave --host out.")
    if port:
        from arborl.cli.tools import check_port

        check_port(host, port)
    return keys


async def served(
    path: str,
    asked: dict[str, Any],
    keys: ApiKeys,
    bounds: ServerLimits,
    most: int,
    follow: str | None,
    where: tuple[Any, ...],
) -> None:
    """Serve until a signal."""
    from arborl.serve.api_server import ApiServer, make_app
    from arborl.serve.model_loading import CheckpointFollower, checkpoints_dir, load_for_serving
    from arborl.serve.sessions import SessionStore
    from arborl.track.tracing import traced

    extra = []
    root = checkpoints_dir(follow) if follow is not None else None
    loaded = load_for_serving(path, **asked)
    if root is not None:
        extra.append(CheckpointFollower(loaded.backend, root, loaded.served.read).follow)
    app = make_app(loaded.backend, SessionStore(loaded.agents, most), keys, bounds, extra)
    server = ApiServer(app, *where)
    server.on_start = lambda at: typer.echo(
        f"arborl: serving {loaded.backend.name} (agent {loaded.agents.names[0]}) at {at}/v1", err=True
    )
    try:
        with traced("serve"):
            await server.serve()
    finally:
        await loaded.close()


def _write_requests() -> None:
    """One line of JSON a request, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("arborl.serve.middleware")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
