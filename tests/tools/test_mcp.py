import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("mcp_types", reason="the extra 'mcp', version 2 or newer")
pytest.importorskip("fastapi", reason="the extra 'serve'")

from arborl.errors import ConfigError
from arborl.tools import Toolbox, ToolContext
from arborl.tools.remote.mcp import McpClient
from arborl.types import ToolCall

OURS = [sys.executable, "-m", "arborl", "tools", "serve", "--tools", "calculator,python"]

FOREIGN = """
import os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("foreign")

@server.tool()
def greet(name: str, times: int = 1) -> str:
    '''Greet a person.'''
    return "hello " * times + name

@server.tool()
def fail() -> str:
    '''Always fails.'''
    raise ToolError("as received")

@server.tool()
def leave() -> str:
    '''Ends the server.'''
    os._exit(1)

@server.tool()
def sleep(seconds: float) -> str:
    '''Sleeps.'''
    time.sleep(seconds)
    return "slept"

server.run("stdio")
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A server written with the official SDK alone, in a process of its own."""
    path = tmp_path_factory.mktemp("mcp") / "foreign.py"
    path.write_text(FOREIGN)
    made = McpClient([sys.executable, str(path)])
    yield made
    made.close()


@pytest.fixture(scope="module", params=["stdio", "http"])
def ours(request, tmp_path_factory):
    """Our tools as an MCP server, seen through our client."""
    if request.param == "stdio":
        made = McpClient([*OURS, "--stdio"])
        yield made
        made.close()
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = [
        "--port",
        str(port),
        "--mcp",
        "--api-key",
        "secret",
        "--journal",
        str(tmp_path_factory.mktemp("j") / "j"),
    ]
    process = subprocess.Popen([*OURS, *options], stderr=subprocess.DEVNULL)
    made = McpClient(f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer secret"})
    wait_for(port)
    yield made
    made.close()
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def test_tools_of_a_foreign_server_stand_in_a_toolbox_like_any_other(foreign):
    box = Toolbox(foreign.tools())
    spec = next(spec for spec in box.specs if spec.name == "greet")
    assert spec.description == "Greet a person."
    assert spec.parameters["required"] == ["name"]
    calls = [
        ToolCall("1", "greet", {"name": "you", "times": 2}),
        ToolCall("2", "fail", {}),
        ToolCall("3", "greet", {"times": 2}),
        ToolCall("4", "gret", {}),
    ]
    results = asyncio.run(box.run(calls))
    assert results[0].content == "hello hello you"
    assert [result.kind for result in results] == ["ok", "exception", "exception", "unknown_tool"]
    assert "as received" in results[1].content


def test_a_server_that_dies_or_hangs_gives_results_and_is_started_again(foreign):
    tools = {each.name: each for each in foreign.tools()}
    gone = asyncio.run(tools["leave"].run({}))
    assert gone.kind == "unavailable"
    again = asyncio.run(tools["greet"].run({"name": "you"}))
    assert again.content == "hello you"
    tools = {each.name: each for each in foreign.tools()}
    foreign.timeout = 0.3
    try:
        assert asyncio.run(tools["sleep"].run({"seconds": 1})).kind == "timeout"
    finally:
        foreign.timeout = 30.0
    assert asyncio.run(tools["greet"].run({"name": "you"})).ok


def test_only_the_requested_tools_are_used(foreign):
    foreign.only = ["greet"]
    assert [each.name for each in foreign.tools()] == ["greet"]
    foreign.only = ["great"]
    received = r"has no tool 'great'\. Did you mean 'greet'\? It has: greet, fail, leave, sleep"
    with pytest.raises(ConfigError, match=received):
        foreign.tools()
    foreign.only = None


def test_a_command_that_is_no_server_is_an_error_before_the_run():
    made = McpClient([sys.executable, "-c", "pass"], timeout=40)
    with pytest.raises(ConfigError, match="no MCP server answers at"):
        made.tools()
    made.close()


def test_our_tools_can_be_called_over_mcp(ours):
    tools = {each.name: each for each in ours.tools()}
    assert list(tools) == ["calculator", "python"]
    assert list(tools["python"].spec.parameters["properties"]) == ["code"]

    async def play():
        async with ToolContext() as one, ToolContext() as two:
            return [
                await tools["calculator"].run({"expression": "6*7"}),
                await tools["calculator"].run({"expresion": "6*7"}),
                await tools["python"].run({"code": "x = 6"}, one),
                await tools["python"].run({"code": "x * 7"}, one),
                await tools["python"].run({"code": "x"}, two),
            ]

    results = asyncio.run(play())
    assert [result.ok for result in results] == [True, False, True, True, True]
    assert "Did you mean 'expression'?" in results[1].content
    assert [results[0].content, results[3].content] == ["42", "42"]
    assert "NameError" in results[4].content  # another episode, another interpreter


def test_over_http_the_key_is_wanted_for_mcp_too(ours):
    if not isinstance(ours.server, str):
        pytest.skip("standard input has no key")
    made = McpClient(ours.server, timeout=40)
    with pytest.raises(ConfigError, match="no MCP server answers at"):
        made.tools()
    made.close()


def test_a_closed_connection_ends_its_command():
    made = McpClient([*OURS, "--stdio"])
    made.tools()
    mine = children_of_this_process()
    assert mine
    made.close()
    deadline = time.monotonic() + 40
    while children_of_this_process() & mine and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children_of_this_process() & mine


def children_of_this_process() -> set[int]:
    """Those that serve our tools on standard input."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= set(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return {pid for pid in found if _command(pid).endswith("--stdio\0")}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
