"""Entries of a configuration: their forms, and what their bounds do."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tool_servers import gone, marked, stubborn

from arborl.config.config_base import dump_yaml, to_plain, validate
from arborl.config.load_config import from_kwargs, load
from arborl.config.run_config import RunConfig
from arborl.config.tool_config import ToolConfig
from arborl.errors import ConfigError
from arborl.tools import TOOLS, RateLimit, Toolbox, tool
from arborl.tools.tool_loader import CallPolicy, LimitedTool, ToolLoader
from arborl.types import ToolCall, ToolResult, ToolSpec

WHOLE = """[calculator, {server: 'http://h:1', tools: [a], limit: {per_minute: 60, burst: 5}, concurrency: 8,
timeout: 30, api_key_env: NAME}, {mcp: {command: [a, b], env: {X: 1}, timeout: 3}}, {mcp: {url: 'http://x/mcp'},
prefix: x_}, {python: {wall_seconds: 3, limit: {per_minute: 3}}}, {search: {corpus: x}, retries: 2}]"""


def test_every_form_of_an_entry_is_read_from_a_command_line_and_read_back_from_a_file(tmp_path):
    config = load(None, ["agent=tool", f"tools={WHOLE}".replace("\n", " ")])
    shapes = [(one.name, one.origin, one.args) for one in config.tools]
    assert shapes == [
        ("calculator", "calculator", {}),
        (None, "http://h:1", {}),
        (None, "a b", {}),
        (None, "http://x/mcp", {}),
        ("python", "python", {"wall_seconds": 3}),
        ("search", "search", {"corpus": "x"}),
    ]
    assert (config.tools[2].mcp.env, config.tools[2].timeout) == ({"X": "1"}, 3)
    assert (config.tools[4].limit.per_minute, config.tools[5].retries) == (3, 2)
    assert validate(RunConfig, to_plain(config)) == config
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert load(tmp_path / "run.yaml") == config
    assert to_plain(config)["tools"][0] == "calculator"
    assert to_plain(config)["tools"][3] == {"mcp": {"url": "http://x/mcp"}, "prefix": "x_"}


def test_entries_of_a_file_can_be_changed_and_hide_keys(tmp_path):
    (tmp_path / "run.yaml").write_text("agent: tool\ntools: [calculator, {search: {corpus: x}}]")
    config = load(tmp_path / "run.yaml", ["tools.0.timeout=3", "tools.1.search.corpus=y"])
    assert (config.tools[0].timeout, config.tools[1].args) == (3, {"corpus": "y"})
    with pytest.raises(ConfigError) as error:
        from_kwargs(agent="tool", tools=[{"server": "http://h", "api_key_env": "sk-very-secret"}])
    assert "write the NAME of an environment variable" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "received"),
    [
        ({"servre": "http://h"}, "servre: must be arguments with values (argument: value). Did you mean 'server'?"),
        ({"server": "h:80"}, "tools.0: server: 'h:80' is not an address. Write http://HOST:PORT."),
        ({"server": "http://me:pass@h"}, "contains a user or password, and addresses are written to files."),
        ({"mcp": {"command": "uvx x"}}, "mcp.command: must be a list of words; there is no shell. Write [uvx, x]."),
        ({"mcp": {}}, "tools.0.mcp: write either command: [PROGRAM, …] or url: http://HOST:PORT/mcp."),
        ({"mcp": {"command": ["a"], "env": {"MY_TOKEN": "x"}}}, "Export it and write pass_env: [MY_TOKEN]."),
        ({"mcp": {"url": "http://x"}, "server": "http://x"}, "server and mcp are given"),
        ({"mcp": {"command": ["a"]}, "api_key_env": "KEY"}, "api_key_env is for an address. Write mcp.pass_env"),
        ({}, "tools.0: has no name, server or mcp. An entry is NAME"),
        ({"search": {"limit": {"per_minute": 1}}, "limit": {"per_minute": 2}}, "limit: given twice, in search and"),
        ({"calculator": {}, "finish": {}}, "calculator and finish are given. An entry is one tool: write two entries."),
        ({"calculator": {"limit": {"per_minute": 0}}}, "tools.0.limit.per_minute: must be a number > 0, given 0."),
        ({"calculator": {"concurrency": 0}}, "tools.0.concurrency: must be"),
        ({"calculator": {"tools": ["x"]}, "tools": ["x"]}, "tools is for server and mcp, not for the tool"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_entry_says_where_and_what_to_write(entry, received):
    with pytest.raises(ConfigError) as error:
        from_kwargs(agent="tool", tools=[entry])
    assert received in str(error.value)


def test_foreign_variables_have_no_effect_and_nothing_starts_unless_connected(monkeypatch, caplog, tmp_path):
    from arborl.training_run.part_factory import RunPartFactory

    monkeypatch.setenv("RATE_LIMIT_PER_MINUTE", "60000")
    workshop = RunPartFactory(load(None, ["agent=tool", "tools=[calculator]"]), {})
    workshop.tools()
    assert "the environment variable RATE_LIMIT_PER_MINUTE has no effect" in caplog.text
    assert "limit: {per_minute: N}" in caplog.text
    opened = ToolLoader(TOOLS.__getitem__, connect=False)
    assert opened.load(ToolConfig(mcp={"command": stubborn(tmp_path, "mark-of-none")}), "tools.0") == []
    assert opened.load(ToolConfig(server="http://127.0.0.1:1"), "tools.1") == []
    assert not marked("mark-of-none")


def opened(entry, function) -> list:
    return ToolLoader(lambda name: function).load(validate(ToolConfig, entry), "tools.0")


def together(made, times: int) -> list[ToolResult]:
    async def play() -> list[ToolResult]:
        return await Toolbox([made], max_calls=99).run([ToolCall(str(n), made.name, {"n": n}) for n in range(times)])

    return asyncio.run(play())


def test_concurrency_is_how_many_run_at_once():
    running, most = 0, 0

    @tool
    async def work(n: int) -> int:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return n

    (made,) = opened({"work": {"concurrency": 2}}, work)
    assert [result.content for result in together(made, 7)] == list("0123456")
    assert most == 2
    assert (made.spec, made.stateful) == (work.spec, False)


def test_a_call_is_tried_again_as_often_as_it_says_and_no_oftener():
    tried = []

    @tool
    def flaky(n: int) -> int:
        """Fail twice."""
        tried.append(n)
        if len(tried) < 3:
            raise OSError("not yet")
        return n

    made = LimitedTool(flaky, CallPolicy(retries=2, backoff=0.001))
    assert together(made, 1)[0].content == "0"
    tried.clear()
    assert together(LimitedTool(flaky, CallPolicy(retries=1, backoff=0.001)), 1)[0].kind == "exception"
    tried.clear()
    assert asyncio.run(made.run({"m": 1})).kind == "arguments"  # which the same words will not mend
    assert tried == []


def test_a_timeout_replaces_the_tools_own_and_waiting_for_a_turn_is_no_part_of_it():
    @tool(timeout=0.001)
    async def slow(n: int) -> int:
        """Take a while."""
        await asyncio.sleep(0.05)
        return n

    (made,) = opened({"slow": {"timeout": 0.5, "concurrency": 1}}, slow)
    assert all(result.ok for result in together(made, 12))
    (made,) = opened({"slow": {"timeout": 0.01}}, slow)
    assert together(made, 1)[0].content == "slow: TimeoutError: took longer than 0.01 s"
    assert slow.timeout == 0.001


def test_a_timeout_holds_for_a_tool_of_any_kind():
    class Endless:
        name, spec, stateful, terminal = "endless", ToolSpec("endless", "", {}), False, False

        async def run(self, arguments, context=None):
            await asyncio.sleep(60)

    (made,) = opened({"endless": {"timeout": 0.01}}, Endless())
    assert asyncio.run(made.run({})).kind == "timeout"


def test_limits_of_one_name_must_agree_and_are_free_again_when_a_run_is_over():
    def limited(per_minute: float) -> ToolLoader:
        made = ToolLoader(TOOLS.__getitem__)
        entry = {"calculator": {"limit": {"per_minute": per_minute, "name": f"test-{os.getpid()}"}}}
        made.load(validate(ToolConfig, entry), "tools.0")
        return made

    first = limited(600)
    with pytest.raises(ConfigError, match=r"tools\.0\.limit: RateLimit .* in use with per_minute=600"):
        limited(60)
    asyncio.run(first.close())
    asyncio.run(limited(60).close())


def test_the_wait_for_a_limit_is_not_on_the_clock_of_the_episode():
    from arborl.errors import boundary

    limit = RateLimit(per_minute=600, name=f"clock-{os.getpid()}")
    made = LimitedTool(TOOLS["calculator"], CallPolicy(limit))

    async def play() -> list[bool]:
        async with boundary("episode", 0.25):
            return [(await made.run({"expression": "1"})).ok for _ in range(6)]  # half a second of waiting

    assert all(asyncio.run(play()))
    limit.remove()


def test_python_has_the_limits_that_are_written_beside_it():
    (made,) = ToolLoader(TOOLS.__getitem__).load(validate(ToolConfig, {"python": {"wall_seconds": 0.3}}), "tools.0")
    assert made.limits.wall_seconds == 0.3
    assert made.sandboxed
    assert "ran longer than 0.3 s" in asyncio.run(made.run({"code": "import time; time.sleep(5)"})).content
    with pytest.raises(ConfigError, match=r"tools\.0\.args\.wal_seconds: unknown argument"):
        ToolLoader(TOOLS.__getitem__).load(validate(ToolConfig, {"python": {"wal_seconds": 1}}), "tools.0")


@pytest.fixture
def arrivals() -> Iterator[tuple[str, list[float]]]:
    """A tool server reduced to its times: its address, and when calls came."""
    times: list[float] = []
    about = [{"name": "double", "description": "Double.", "parameters": {"type": "object"}}]

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.say(about)

        def do_POST(self) -> None:
            times.append(time.monotonic())
            self.rfile.read(int(self.headers["content-length"]))
            self.say({"content": "2", "ok": True, "kind": "ok", "seconds": 0.0})

        def say(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", times
    server.shutdown()


CALLER = """
import asyncio, json, sys
from arborl.config.tool_config import ToolConfig
from arborl.tools.tool_loader import CallPolicy, LimitedTool, ToolLoader

async def main():
    opened = ToolLoader({}.__getitem__)
    (tool,) = opened.load(ToolConfig.model_validate(json.loads(sys.argv[1])), "tools.0")
    results = await asyncio.gather(*(tool.run({"n": 1}) for _ in range(15)))
    await opened.close()
    assert all(result.ok for result in results), results

asyncio.run(main())
"""


def test_a_limit_holds_over_two_processes_that_share_a_server(arrivals):
    url, times = arrivals
    rate, burst = 20, 3
    entry = {"server": url, "limit": {"per_minute": 60 * rate, "burst": burst}}
    callers = [subprocess.Popen([sys.executable, "-c", CALLER, json.dumps(entry)]) for _ in range(2)]
    assert [caller.wait(60) for caller in callers] == [0, 0]
    assert len(times) == 30
    late = 0.3  # what a call may take from its grant to the server on a busy machine
    for first in range(30):
        for last in range(first, 30):
            window = times[last] - times[first] + late
            assert last - first + 1 <= rate * window + burst


def test_nothing_of_a_command_outlives_a_process_that_is_killed(tmp_path):
    pytest.importorskip("mcp_types", reason="the extra 'mcp', version 2 or newer")
    command = stubborn(tmp_path, "mark-of-the-killed")
    script = (
        "import sys, time; from arborl.tools.remote.mcp import McpClient\n"
        "McpClient(sys.argv[1:]).tools(); print('there', flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", script, *command], stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"there\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert gone(command[-1])
