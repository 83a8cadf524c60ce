"""`arborl serve`: a model behind OpenAI's API. `arborl chat`: a session with an agent in the terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import LogLevel, Trust, argument, option, path_and_settings
from arborl.errors import ConfigError, disk_errors

if TYPE_CHECKING:
    from rich.console import Console

    from arborl.serve.api_server import ServerLimits
    from arborl.serve.middleware import ApiKeys
    from arborl.serve.sessions import AgentSession, ServedAgents
    from arborl.types import Message

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
API_KEY_VARIABLE = "ARBORL_API_KEY"
Target = Annotated[
    list[str] | None, argument("CHECKPOINT a.b=c", "A run, a checkpoint, a model or adapters, and settings.")
]


def serve(
    arguments: Target = None,
    checkpoint: Annotated[str | None, option("--checkpoint", metavar="PATH", help="The same as CHECKPOINT.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 for any free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address of other machines needs an API key.")
    ] = LOCAL_HOSTS[0],
    follow: Annotated[
        str | None, option(metavar="RUN", help="Serve the newest checkpoint of this run, and each new one.")
    ] = None,
    name: Annotated[str | None, option(help="Model name for clients; default: the folder's name.")] = None,
    api_key: Annotated[
        list[str] | None, option(help=f"API key of clients; may be repeated, or set in {API_KEY_VARIABLE}.")
    ] = None,
    api_key_file: Annotated[Path | None, option(help="File with one API key per line.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at once; further ones are refused.")] = 1024,
    per_minute: Annotated[float, typer.Option(min=0, help="Requests per minute of one key; 0 for no limit.")] = 0,
    burst: Annotated[int, typer.Option(min=1, help="Requests at once of one key after a pause.")] = 10,
    timeout: Annotated[float, typer.Option(min=0.1, help="Time limit of one answer in seconds.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1, help="Size limit of one request in MiB.")] = 16,
    sessions: Annotated[int, typer.Option(min=1, help="Agent sessions at once.")] = 256,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for running requests to end after SIGTERM.")] = 60.0,
    quiet: Annotated[bool, option("--quiet", help="Log no requests.")] = False,
    trust: Trust = False,
    log_level: LogLevel = None,
) -> None:
    """Serve a model over OpenAI's API, and its agents over sessions."""
    path, settings = path_and_settings(arguments, "model to serve", checkpoint)
    path = path or follow
    if path is None:
        raise ConfigError("no model to serve. Write `arborl serve CHECKPOINT`: a run, a checkpoint, or a model name.")
    keys = check_address(host, port, api_key or [], api_key_file)
    from arborl.serve.api_server import ServerLimits

    if not quiet and log_level is None:
        _log_requests()
    limits = ServerLimits(requests, max_body * 2**20, timeout, per_minute, burst)
    model = {"path": path, "settings": settings, "trust": trust, "name": name, "allow_untrained": follow is not None}
    asyncio.run(run_server(model, keys, limits, sessions, follow, (host, port, drain)))


def check_address(host: str, port: int, api_keys: list[str], file: Path | None) -> ApiKeys:
    """The API keys. Raises `ConfigError` if the server must not or cannot listen on this address."""
    try:
        from arborl.serve.api_server import ApiServer  # noqa: F401
        from arborl.serve.middleware import read_api_keys
    except ImportError as error:
        raise ConfigError(f"arborl serve needs {error.name}: pip install 'arborl[serve]'") from error
    keys = read_api_keys(api_keys, file, os.environ.get(API_KEY_VARIABLE))
    if host not in LOCAL_HOSTS and not keys:
        raise ConfigError(f"--host {host} accepts other machines. Write --api-key KEY too, or leave --host out.")
    if port:
        from arborl.cli.tools_commands import check_port

        check_port(host, port)
    return keys


async def run_server(
    model: dict[str, Any],
    keys: ApiKeys,
    limits: ServerLimits,
    max_sessions: int,
    follow: str | None,
    address: tuple[str, int, float],
) -> None:
    from arborl.serve.api_server import ApiServer, make_app
    from arborl.serve.served_model import CheckpointFollower, checkpoints_dir, load_for_serving
    from arborl.serve.sessions import SessionStore
    from arborl.track.tracing import traced

    root = checkpoints_dir(follow) if follow is not None else None
    loaded = load_for_serving(**model)
    backend, agents = loaded.backend, loaded.agents
    extra = [] if root is None else [CheckpointFollower(backend, root, loaded.served.read).follow]
    server = ApiServer(make_app(backend, SessionStore(agents, max_sessions), keys, limits, extra), *address)
    server.on_start = lambda url: typer.echo(
        f"arborl: serving {backend.name} (agent {agents.names[0]}) at {url}/v1", err=True
    )
    try:
        with traced("serve"):
            await server.serve()
    finally:
        await loaded.close()


def _log_requests() -> None:
    """Log one line of JSON per request on standard error."""
    from arborl.track.run_log import StderrHandler

    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("arborl.serve.middleware")
    log.handlers[:] = [handler]  # a process may serve several times
    log.setLevel(logging.INFO)
    log.propagate = False


# ------------------------------------------------------------------------------------------------ chat

CHAT_HELP = """/reset        start a new conversation
/tools        list the agent's tools
/save FILE    write the conversation as episodes, one per line
/exit         leave (or Ctrl-D)"""


def chat(
    arguments: Target = None,
    field: Annotated[
        list[str] | None, option("--field", metavar="NAME=FILE", help="Task field: document_content=report.txt.")
    ] = None,
    message: Annotated[str | None, option("--message", "-m", help="Send this message, print the answer, exit.")] = None,
    agent: Annotated[str | None, option(help="Another agent of the run.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and environment.")] = 0,
    temperature: Annotated[float | None, option(min=0, help="Sampling temperature; default: the evaluation's.")] = None,
    trust: Trust = False,
    log_level: LogLevel = None,
) -> None:
    """Chat with the agent of a run, or with a model."""
    path, settings = path_and_settings(arguments, "model")
    if path is None:
        raise ConfigError("no model. Write `arborl chat CHECKPOINT`: a run, a checkpoint, or a model name.")
    options = {"fields": read_fields(field or ()), "agent": agent, "seed": seed, "temperature": temperature}
    asyncio.run(run_chat(path, settings, trust, options, message))


def read_fields(texts: Any) -> dict[str, str]:
    """Task fields from files."""
    fields = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals:
            raise ConfigError(f"--field {text}: write NAME=FILE, as in document_content=report.txt.")
        try:
            fields[name] = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--field {text}: cannot be read ({error}).") from error
    return fields


async def run_chat(path: str, settings: list[str], trust: bool, options: dict[str, Any], message: str | None) -> None:
    from rich.console import Console

    from arborl.serve.served_model import load_for_serving

    loaded = load_for_serving(path, settings, trust)
    names = loaded.agents.names
    if options["agent"] is not None and options["agent"] not in names:
        raise ConfigError(f"--agent {options['agent']}: the run has {', '.join(names)}.")
    console = Console(highlight=False, soft_wrap=True)
    terminal = ChatTerminal(console, loaded.agents, options)
    try:
        if message is not None:
            await terminal.send(message)
        else:
            console.print(f"{loaded.backend.name}, agent {names[0]}. /help lists the commands.")
            await terminal.run()
    finally:
        await loaded.close()


class ChatTerminal:
    """A session with an agent in the terminal."""

    def __init__(self, console: Console, agents: ServedAgents, options: dict[str, Any]):
        self.console, self.agents, self.options = console, agents, options
        self.session = self._new_session()

    def _new_session(self) -> AgentSession:
        from arborl.serve.sessions import AgentSession

        return AgentSession(self.agents, on_step=self.show_step, **self.options)

    async def run(self) -> None:
        """Read messages and commands until the user leaves."""
        while True:
            try:
                text = (await asyncio.to_thread(self.console.input, "[bold]> [/bold]")).strip()
            except EOFError:
                self.console.print()
                return
            command, _, rest = text.partition(" ")
            if command in ("/exit", "/quit"):
                return
            if command == "/reset":
                await self.session.end()
                self.session = self._new_session()
            elif command == "/tools":
                self.show_tools()
            elif command == "/save":
                self.save(rest.strip())
            elif command.startswith("/"):
                self.console.print(CHAT_HELP, markup=False)
            elif text:
                await self.send(text)

    async def send(self, text: str) -> None:
        from arborl.serve.model_backend import RequestError, ServiceUnavailable

        try:
            reply = await self.session.send(text)
        except (RequestError, ServiceUnavailable) as error:
            self.console.print(str(error), style="red", markup=False)
            return
        if reply.content or not reply.stop_reason:
            self.console.print(reply.content, markup=False)
        else:
            self.console.print(f"no answer: {reply.stop_reason.replace('_', ' ')}", style="red", markup=False)

    def show_step(self, message: Message) -> None:
        """Print a tool call or a tool result."""
        for call in message.tool_calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False) if call.error is None else call.error
            self.console.print(f"  -> {call.name} {arguments}", style="cyan", markup=False)
        if message.role == "tool":
            text = " ".join(message.content.split())
            self.console.print(f"  <- {text[:300]}{' …' if len(text) > 300 else ''}", style="dim", markup=False)

    def show_tools(self) -> None:
        specs = self.session.tools
        for spec in specs:
            description = " ".join(spec.description.split()).partition(". ")[0].rstrip(".")
            self.console.print(f"{spec.name:<16} {description}.", markup=False)
        if not specs:
            self.console.print("none", markup=False)

    def save(self, name: str) -> None:
        from arborl.rollout.episode_store import episode_to_json, json_line

        if not name:
            self.console.print("/save FILE", markup=False)
            return
        try:
            with disk_errors(Path(name)):
                text = "".join(json_line(episode_to_json(episode)) + "\n" for episode in self.session.episodes)
                Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
        except ConfigError as error:
            self.console.print(str(error), style="red", markup=False)
            return
        self.console.print(f"wrote {len(self.session.episodes)} episodes to {name}", markup=False)
