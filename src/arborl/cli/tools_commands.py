"""`arborl tools list | show | serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import AsJson, argument, file_and_settings, option
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from arborl.tools.core.tool import AnyTool

tools = typer.Typer(name="tools", help="List, show and serve tools.", no_args_is_help=True, rich_markup_mode=None)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@tools.command("list")
def list_tools(
    arguments: Annotated[list[str] | None, argument("FILE a.b=c", "A run whose tools are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in tools, or the tools of a run."""
    import inspect

    from arborl.tools import TOOLS
    from arborl.tools.core.arguments import parse_docstring

    def description(part: Any) -> str:
        return parse_docstring(inspect.getdoc(part)).description if inspect.isclass(part) else part.spec.description

    if arguments:
        rows = [(tool.name, _first_sentence(tool.spec.description), origin) for origin, tool in run_tools(arguments)]
    else:
        rows = [(name, _first_sentence(description(TOOLS[name])), "") for name in TOOLS]
    if as_json:
        data = [{"name": name, "what": what} | ({"from": origin} if origin else {}) for name, what, origin in rows]
        typer.echo(json.dumps(data, ensure_ascii=False, indent=2))
        return
    for name, what, origin in rows:
        typer.echo(f"{name:<20} {what}  [{origin}]" if origin else f"{name:<12} {what}")


@tools.command()
def show(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME FILE a.b=c", help="Names of tools, or a run, or names in a run.")
    ],
) -> None:
    """Print tools as the model reads them: `show calculator`, `show search run.yaml`, `show run.yaml`."""
    names = [text for text in arguments if "=" not in text and not text.endswith(".yaml")]
    run = [text for text in arguments if text not in names]
    found = run_tools(run or [f"tools=[{','.join(names)}]"])
    known = [tool.name for _, tool in found]
    if run and (missing := [name for name in names if name not in known]):
        raise ConfigError(f"the run has no tool {missing[0]!r}. It has: {', '.join(known) or 'none'}.")
    for _, tool in found:
        if not run or not names or tool.name in names:
            spec = {"name": tool.name, "description": tool.spec.description, "parameters": tool.spec.parameters}
            typer.echo(json.dumps(spec, indent=2, ensure_ascii=False))


def run_tools(arguments: Sequence[str]) -> list[tuple[str, AnyTool]]:
    """The tools of a run and its sources, each with its origin. Tool servers are started, queried and stopped."""
    from arborl.config.load_config import load
    from arborl.training_run.part_factory import RunPartFactory

    file, settings = file_and_settings(arguments)
    agent = [] if file is not None or any(text.startswith("agent") for text in settings) else ["agent=tool"]
    workshop = RunPartFactory(load(file, [*agent, *settings]), {}, connect=True)
    try:
        workshop.tools()
        return [(entry.origin, tool) for entry, some in workshop.open_tools.loaded.values() for tool in some]
    finally:
        workshop.open_tools.stop()


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


@tools.command()
def serve(
    names: Annotated[str, typer.Option("--tools", help="Names, or package.module:attribute, separated by commas.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port.")] = 30003,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address of other machines needs an API key.")
    ] = LOCAL_HOSTS[0],
    api_key: Annotated[
        str | None, typer.Option(envvar="ARBORL_TOOL_API_KEY", help="API key of clients.", show_envvar=True)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls of one tool at once.")] = 64,
    queue: Annotated[int, typer.Option(min=0, help="Calls of one tool that may wait.")] = 4096,
    arg: Annotated[list[str] | None, typer.Option(help="Argument of a tool: search.corpus=docs.jsonl")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="File that records stateful calls across restarts; default: one per port.")
    ] = None,
    mcp: Annotated[bool, option("--mcp", help="Also serve MCP, at /mcp.")] = False,
    stdio: Annotated[bool, option("--stdio", help="Serve MCP on standard input and output instead of HTTP.")] = False,
    allow_unsafe: Annotated[
        bool, option("--allow-unsafe", help="Run code of clients even if no sandbox is available.")
    ] = False,
) -> None:
    """Serve tools over HTTP or MCP."""
    if host not in LOCAL_HOSTS and not api_key and not stdio:
        raise ConfigError(f"--host {host} accepts other machines. Write --api-key KEY too, or leave --host out.")
    chosen = make_tools(names, arg or [])
    sandbox_note = check_sandbox(chosen, allow_unsafe)
    if stdio:
        from arborl.tools.remote.mcp import serve_stdio

        serve_stdio(chosen)
        return
    try:
        from arborl.tools.remote.tool_server import make_app
        from arborl.tools.remote.tool_server import serve as run
    except ImportError as error:
        raise ConfigError(f"arborl tools serve needs {error.name}: pip install 'arborl[serve]'") from error
    check_port(host, port)
    from arborl.tools.core.rate_limit import user_runtime_dir
    from arborl.tools.remote.tool_dispatcher import CallJournal, ToolDispatcher

    extra = []
    call_journal = CallJournal(journal or user_runtime_dir() / f"tools-{port}.journal")
    dispatcher = ToolDispatcher(chosen, concurrency, queue, call_journal)
    if mcp:
        from arborl.tools.remote.mcp import mcp_endpoint

        extra.append(mcp_endpoint(dispatcher))
    typer.echo(f"arborl: serving {', '.join(dispatcher.toolbox.tools)} at http://{host}:{port}{sandbox_note}", err=True)
    run(make_app(dispatcher, api_key, extra=extra), host, port)


def check_sandbox(tools: Sequence[AnyTool], allow_unsafe: bool) -> str:
    """How code of clients is isolated, for the first line of the server; a `ConfigError` if it is not."""
    from arborl import sandbox

    sandbox.allow_unsafe(allow_unsafe)
    if not any(getattr(tool, "sandboxed", False) for tool in tools):
        return ""
    try:
        return f"; code runs under {sandbox.active_level()}"
    except sandbox.SandboxError as error:
        raise ConfigError(f"{error}; or write --allow-unsafe.") from error


def check_port(host: str, port: int) -> None:
    """Raise a `ConfigError` if the address cannot be listened on."""
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Is another server running? Write "
            "another --port."
        ) from error


def make_tools(names: str, arguments: list[str]) -> list[AnyTool]:
    """The named tools (`calculator,search`) with their arguments (`search.corpus=docs.jsonl`)."""
    from arborl.tools import TOOLS, as_tool
    from arborl.tools.core.toolbox import warn_incomplete_specs

    by_tool: dict[str, dict[str, Any]] = {}
    for text in arguments:
        path, equals, value = text.partition("=")
        name, dot, key = path.rpartition(".")
        if not (equals and dot):
            raise ConfigError(f"--arg {text!r}: write TOOL.ARGUMENT=VALUE, as in search.corpus=docs.jsonl.")
        by_tool.setdefault(name, {})[key] = value
        with suppress(ValueError):  # not JSON: the text itself
            by_tool[name][key] = json.loads(value)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError("--tools: empty. Write --tools calculator,python; `arborl tools list` lists built-in tools.")
    if unknown := [name for name in by_tool if name not in wanted]:
        raise ConfigError(f"--arg {unknown[0]}.…: --tools does not contain {unknown[0]!r}.")
    made = [as_tool(TOOLS[name], by_tool.get(name), f"--arg {name}") for name in wanted]
    warn_incomplete_specs(made)
    return made
