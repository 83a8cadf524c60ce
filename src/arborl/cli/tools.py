"""`arborl tools`: what tools there are, and a server for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.tools.tool import AnyTool

tools = typer.Typer(
    name="tools", help="List tools, or serve them to other processes.", no_args_is_help=True, rich_markup_mode=None
)

LOCAL = ("127.0.0.1", "localhost", "::1")


@tools.command("list")
def listed(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE a.b=c", help="A run, whose tools to list.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the tools that ship, or those of a run."""
    import inspect
    import json

    from arborl.tools import TOOLS
    from arborl.tools.docstring import read_docstring

    if arguments:
        rows = [(tool.name, _first(tool.spec.description), where) for where, tool in of_run(arguments)]
    else:
        shipped = ((name, TOOLS[name]) for name in TOOLS)
        rows = [
            (
                name,
                _first(read_docstring(inspect.getdoc(p)).description if inspect.isclass(p) else p.spec.description),
                "",
            )
            for name, p in shipped
        ]
    if as_json:
        found = [{"name": name, "what": what} | ({"from": where} if where else {}) for name, what, where in rows]
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for name, what, where in rows:
        typer.echo(f"{name:<20} {what}  [{where}]" if where else f"{name:<12} {what}")


@tools.command()
def show(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="NAME FILE a.b=c", help="Names of tools; and the run, where they are a run's."),
    ],
) -> None:
    """Print what the model is told of tools: `show calculator`, `show search run.yaml`, `show run.yaml`."""
    names = [one for one in arguments if "=" not in one and not one.endswith(".yaml")]
    run = [one for one in arguments if one not in names]
    found = of_run(run or [f"tools=[{','.join(names)}]"])
    if run and (missing := [name for name in names if name not in [tool.name for _, tool in found]]):
        there = ", ".join(tool.name for _, tool in found)
        raise ConfigError(f"the run has no tool {missing[0]!r}. It has: {there or 'none'}.")
    for _, tool in found:
        if not run or not names or tool.name in names:
            told = {"name": tool.name, "description": tool.spec.description, "parameters": tool.spec.parameters}
            typer.echo(json.dumps(told, indent=2, ensure_ascii=False))


def of_run(arguments: Sequence[str]) -> list[tuple[str, AnyTool]]:
    """The tools of a run and of its sources, each with where it comes from; servers are started, asked and left."""
    from arborl.cli.arguments import one_path, split
    from arborl.config.load_config import load
    from arborl.training_run.part_factory import RunPartFactory

    paths, settings = split(arguments, ("--help",))
    file = one_path(paths, "file")
    agent = [] if file is not None or any(text.startswith("agent") for text in settings) else ["agent=tool"]
    workshop = RunPartFactory(load(Path(file) if file is not None else None, [*agent, *settings]), {}, connect=True)
    try:
        workshop.tools()
        return [(entry.origin, tool) for entry, some in workshop.open_tools.opened.values() for tool in some]
    finally:
        workshop.open_tools.stop()


def _first(text: str) -> str:
    """The first sentence, on one line."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


@tools.command()
def serve(
    names: Annotated[str, typer.Option("--tools", help="Names, or package.module:attribute, with commas.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port.")] = 30003,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine's need an API key.")
    ] = LOCAL[0],
    api_key: Annotated[
        str | None, typer.Option(envvar="ARBORL_TOOL_API_KEY", help="What clients must bring.", show_envvar=True)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls of one tool that run at a time.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Calls of one tool that may wait.")] = 4096,
    arg: Annotated[
        list[str] | None, typer.Option(help="Argument of a tool that takes some: search.corpus=docs.jsonl")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="File that remembers stateful calls over a restart; by default one for the port."),
    ] = None,
    mcp: Annotated[bool, typer.Option("--mcp", help="Also speak MCP, at /mcp.")] = False,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Speak MCP on standard input and output, and no HTTP.")
    ] = False,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="Run clients' code also where nothing isolates it here.")
    ] = False,
) -> None:
    """Serve tools over HTTP, or as an MCP server."""
    if host not in LOCAL and not api_key and not stdio:
        raise ConfigError(f"--host {host} lets other machines in: give --api-key too, or leave --host out.")
    chosen = pick(names, arg or [])
    fenced = sandbox_of(chosen, allow_unsafe)
    if stdio:
        from arborl.tools.mcp import serve_stdio

        serve_stdio(chosen)
        return
    try:
        from arborl.tools.server import make_app
        from arborl.tools.server import serve as run
    except ImportError as error:
        raise ConfigError(f"the tool server needs {error.name}: pip install 'arborl[serve]'") from error
    check_port(host, port)
    from arborl.tools.dispatcher import Desk
    from arborl.tools.host_limit import private_folder
    from arborl.tools.journal import Journal

    extra = []
    desk = Desk(chosen, concurrency, queue, Journal(journal or private_folder() / f"tools-{port}.journal"))
    if mcp:
        from arborl.tools.mcp import mounted

        extra.append(mounted(desk))
    typer.echo(f"arborl: serving {', '.join(desk.toolbox.tools)} at http://{host}:{port}{fenced}", err=True)
    run(make_app(desk, api_key, extra=extra), host, port)


def sandbox_of(tools: Sequence[AnyTool], allow_unsafe: bool) -> str:
    """What isolates the code that clients send, for the server's first line; ConfigError where nothing does."""
    from arborl import sandbox

    sandbox.allow_unsafe(allow_unsafe)
    if not any(getattr(each, "sandboxed", False) for each in tools):
        return ""
    try:
        return f"; code runs under {sandbox.level_in_force()}"
    except sandbox.SandboxError as error:
        raise ConfigError(f"{error}; or --allow-unsafe here.") from error


def check_port(host: str, port: int) -> None:
    """That the server will be able to listen there."""
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Is another server running? Write "
            "--port with another number."
        ) from error


def pick(names: str, arguments: list[str]) -> list[AnyTool]:
    """The tools that a command line names, made with the arguments it gives.

    Example:
        pick("calculator,search", ["search.corpus=docs.jsonl"])
    """
    from arborl.tools import TOOLS, as_tool
    from arborl.tools.tool_warnings import warn_of_gaps

    given: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        path, equals, value = argument.partition("=")
        name, dot, key = path.rpartition(".")
        if not (equals and dot):
            raise ConfigError(f"--arg {argument!r}: write TOOL.ARGUMENT=VALUE, as in search.corpus=docs.jsonl.")
        given.setdefault(name, {})[key] = _value(value)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(
            "--tools names none. Write --tools calculator,python; `arborl tools list` shows those that ship."
        )
    if astray := [name for name in given if name not in wanted]:
        raise ConfigError(f"--arg {astray[0]}.…: --tools does not name {astray[0]!r}.")
    made = [as_tool(TOOLS[name], given.get(name), f"--arg {name}") for name in wanted]
    warn_of_gaps(made)
    return made


def _value(text: str) -> Any:
    """JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
