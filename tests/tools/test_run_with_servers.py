"""Runs whose tools are named in a YAML file alone: real servers, killed and started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp_types", reason="the extra 'mcp', version 2 or newer")
pytest.importorskip("fastapi", reason="the extra 'serve'")

import yaml
from tool_servers import MCP, Process, free_port, gone, marked, stubborn
from typer.testing import CliRunner

from arborl.cli.main import app

KEY = "a-very-secret-key"


def call(tool: str, /, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def config(folder: Path, tools: list, replies: list[str], **more) -> Path:
    """A run's file, and its rows."""
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]
    (folder / "rows.json").write_text(json.dumps(rows))
    tree = {
        "data": str(folder / "rows.json"), "agent": {"name": "tool", "args": {"max_tool_rounds": 1}}, "tools": tools,
        "rewards": ["equal"], "engine": {"name": "scripted", "args": {"replies": replies}}, "trainer": {"steps": 2},
        "rollout": {"tasks_per_step": 1, "group_size": 2}, "evaluation": {"tasks": 0},
        "track": {"tensorboard": False, "gifs": 0}, "output_dir": str(folder / "run"), **more,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def train(*words: object):
    return CliRunner().invoke(app, ["train", *map(str, words)])


def first_step(folder: Path) -> None:
    """Return when a run has done its first step."""
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)


def results(folder: Path) -> dict[str, list[str]]:
    """What the model was outcome, by tool, in the order of steps."""
    found: dict[str, list[str]] = {}
    for path in sorted((folder / "run" / "episodes").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            assert episode["failure"] is None
            outcome = [message for call in episode["calls"] for message in call["messages"][2]]
            for message in outcome:
                if message["role"] == "tool":
                    found.setdefault(message["name"], []).append(message["content"])
    return found


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """`arborl tools serve`, with a key."""
    port = free_port()
    command = [sys.executable, "-m", "arborl", "tools", "serve", "--tools", "calculator", "--port", str(port)]
    journal = str(tmp_path_factory.mktemp("journal") / "j")
    made = Process([*command, "--journal", journal], port, {"ARBORL_TOOL_API_KEY": KEY})
    yield made
    made.kill()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "foreign.py"
    path.write_text(MCP)
    return path


@pytest.fixture(scope="module")
def web(program):
    """The MCP server, over HTTP."""
    port = free_port()
    made = Process([sys.executable, str(program), str(port)], port)
    yield made
    made.kill()


def test_a_run_uses_a_tool_server_and_mcp_servers_that_only_its_file_names(tmp_path, monkeypatch, far, web, program):
    """And lives through deaths: after its first step the tool server is killed and started again, and the command is
    killed."""
    monkeypatch.setenv("FAR_KEY", KEY)
    monkeypatch.setenv("WORD", "a word")
    tools = [
        "calculator",
        {
            "server": f"http://127.0.0.1:{far.port}", "prefix": "far_", "tools": ["calculator"], "timeout": 30,
            "api_key_env": "FAR_KEY", "limit": {"per_minute": 60000, "burst": 50}, "concurrency": 2,
        },
        {"mcp": {"url": f"http://127.0.0.1:{web.port}/mcp"}, "prefix": "web_", "timeout": 20},
        {"mcp": {"command": [sys.executable, str(program)], "pass_env": ["WORD"], "cwd": str(tmp_path)}},
    ]  # fmt: skip
    calls = [call("far_calculator", expression="6*7"), call("web_greet", name="web"), call("greet", name="here")]
    file = config(tmp_path, tools, ["".join(calls)], trainer={"steps": 6})

    def kill() -> None:
        first_step(tmp_path)
        far.kill()
        for pid in marked(str(program)) - {web.process.pid} - marked("child_process.py"):
            os.kill(pid, signal.SIGKILL)
        far.start()

    killer = threading.Thread(target=kill)
    killer.start()
    received = train(file)
    killer.join()
    assert received.exit_code == 0, received.output
    outcome = results(tmp_path)
    assert outcome["far_calculator"] == ["42"] * 12  # every call was answered, however late
    assert len(outcome["web_greet"]) == 12
    assert all(text.startswith("hello web from") for text in outcome["web_greet"])
    worked = [text for text in outcome["greet"] if text.startswith("hello here from")]
    assert all(f"with a word in {tmp_path.name}" in text for text in worked)
    assert len({text.split()[3] for text in worked}) == 2  # one process a life, shared by all episodes
    assert [
        text for text in outcome["greet"] if "does not respond: Connection closed" in text
    ]  # who called it then was outcome so
    assert marked(str(program)) == {web.process.pid}
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert KEY not in received.output

    monkeypatch.delenv("FAR_KEY")
    received = train("--resume", tmp_path / "run", "trainer.steps=7")
    assert received.exit_code == 2
    assert "tools.1.api_key_env: the environment has no FAR_KEY. Write: export FAR_KEY=…" in received.stderr


def test_a_stopped_run_leaves_no_process(tmp_path):
    command = stubborn(tmp_path, "mark-of-a-run-outcome-to-stop")
    file = config(tmp_path, [{"mcp": {"command": command}}], [call("echo", text="x")], trainer={"steps": 10**6})
    lived = []

    def stop() -> None:
        first_step(tmp_path)
        lived.extend(marked(command[-1]))
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    received = train(file)
    stopper.join()
    assert received.exit_code == 143, received.output
    assert len(lived) == 5  # the server, its children, and the two processes of the guard
    assert gone(command[-1])
    assert "this is received aside" not in received.output


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_real_run_however_that_ends(tmp_path, stop):
    command = stubborn(tmp_path, f"mark-of-a-real-run-{stop}")
    file = config(tmp_path, [{"mcp": {"command": command}}], [call("echo", text="x")], trainer={"steps": 10**6})
    run = subprocess.Popen([sys.executable, "-m", "arborl", "train", str(file)], stdout=subprocess.DEVNULL)
    first_step(tmp_path)
    assert len(marked(command[-1])) == 5
    run.send_signal(stop)
    assert run.wait(60) in (130, 143, -9)
    assert gone(command[-1])


@pytest.mark.parametrize(
    ("entry", "received"),
    [
        ({"server": "http://127.0.0.1:1"}, "tools.0: no tool server answers at http://127.0.0.1:1 (ConnectError"),
        ({"mcp": {"url": "http://127.0.0.1:1/mcp"}}, "tools.0: no MCP server answers at http://127.0.0.1:1/mcp: "),
        ({"mcp": {"command": ["no-such-program", "x"]}}, "tools.0: program 'no-such-program' not found."),
        ({"mcp": {"command": ["sh", "-c", "echo oh no >&2; exit 3"]}}, "Connection closed. Its last line: oh no"),
        ({"mcp": {"command": ["sh"], "cwd": "/nowhere"}}, "cwd='/nowhere' of sh is not a folder."),
        ({"mcp": {"command": ["sh"], "pass_env": ["NOT_THERE"]}}, "tools.0.mcp.pass_env: the environment has no NOT"),
        ({"server": "http://127.0.0.1:1", "api_key_env": "NOT_THERE"}, "tools.0.api_key_env: the environment has no"),
        ("calculater", "tools.0: no tool is called 'calculater'. Did you mean 'calculator'?"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line_before_anything_is_written(tmp_path, entry, received):
    outcome = train(config(tmp_path, [entry], ["x"]))
    assert outcome.exit_code == 2, outcome.output
    assert received in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_mistakes_end_the_processes_that_were_started_for_the_tools(tmp_path):
    command = stubborn(tmp_path, "gentle-mark-of-a-missing-tool")
    outcome = train(config(tmp_path, [{"mcp": {"command": command}, "tools": ["eco"]}], ["x"]))
    assert outcome.exit_code == 2, outcome.output
    assert "has no tool 'eco'. Did you mean 'echo'? It has: echo." in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert gone(command[-1])
    command = stubborn(tmp_path, "gentle-mark-of-another-mistake")
    outcome = train(config(tmp_path, [{"mcp": {"command": command}}], ["x"], rewards=["equl"]))
    assert outcome.exit_code == 2, outcome.output
    assert gone(command[-1])


def test_each_source_may_name_its_own_the_same_entry_is_one_process_and_resume_opens_it_again(tmp_path):
    command = stubborn(tmp_path, "gentle-mark-of-two-sources")
    file = config(tmp_path, [], [call("echo", text="x")])
    tree = yaml.safe_load(file.read_text())
    rows = tree["data"]
    entry = [{"mcp": {"command": command}}]
    tree["data"] = {"sources": {name: {"path": rows, "tools": entry} for name in ("one", "two")}}
    tree["rollout"]["tasks_per_step"] = 2
    file.write_text(yaml.safe_dump(tree))
    outcome = train(file)
    assert outcome.exit_code == 0, outcome.output
    assert len({text.split()[0] for text in results(tmp_path)["echo"]}) == 1
    outcome = train("--resume", tmp_path / "run", "trainer.steps=3")
    assert outcome.exit_code == 0, outcome.output
    assert len({text.split()[0] for text in results(tmp_path)["echo"]}) == 2


def test_tools_list_and_show_ask_the_servers_of_a_run(tmp_path):
    command = stubborn(tmp_path, "gentle-mark-of-a-list")
    file = config(tmp_path, ["calculator", {"mcp": {"command": command}, "prefix": "my_"}], ["x"])
    outcome = CliRunner().invoke(app, ["tools", "list", str(file)])
    assert outcome.exit_code == 0, outcome.output
    assert [line.split()[0] for line in outcome.stdout.splitlines()] == ["calculator", "my_echo"]
    outcome = CliRunner().invoke(app, ["tools", "show", "my_echo", str(file)])
    assert json.loads(outcome.stdout)["parameters"]["properties"] == {"text": {"type": "string"}}
    assert "has no tool 'echo'" in CliRunner().invoke(app, ["tools", "show", "echo", str(file)]).stderr
    assert json.loads(CliRunner().invoke(app, ["tools", "show", "calculator"]).stdout)["name"] == "calculator"
    outcome = train(file, "--print")
    assert outcome.exit_code == 0
    assert yaml.safe_load(outcome.stdout)["tools"] == ["calculator", {"mcp": {"command": command}, "prefix": "my_"}]
    assert gone(command[-1])


STAMP = """
import os, time
from arborl.tools import tool

@tool
def stamp(text: str) -> str:
    '''Say when.'''
    with open(os.environ["LEDGER"], "a") as file:
        file.write(f"{time.monotonic()}" + chr(10))
    return "done"
"""


@pytest.mark.slow
def test_a_limit_holds_over_two_real_runs_that_share_a_real_server(tmp_path):
    (tmp_path / "stamps.py").write_text(STAMP)
    port, ledger = free_port(), tmp_path / "ledger"
    command = [sys.executable, "-m", "arborl", "tools", "serve", "--tools", "stamps:stamp", "--port", str(port)]
    env = {"PYTHONPATH": str(tmp_path), "LEDGER": str(ledger)}
    server = Process([*command, "--journal", str(tmp_path / "journal")], port, env)
    rate, burst = 8, 4
    entry = {"server": f"http://127.0.0.1:{port}", "limit": {"per_minute": 60 * rate, "burst": burst}}
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        file = config(
            tmp_path / name, [entry], [call("stamp", text="x")], rollout={"tasks_per_step": 4, "group_size": 4}
        )
        runs.append(subprocess.Popen([sys.executable, "-m", "arborl", "train", str(file)], stdout=subprocess.DEVNULL))
    assert [run.wait(300) for run in runs] == [0, 0]
    server.kill()
    times = sorted(map(float, ledger.read_text().split()))
    assert len(times) == 2 * 2 * 16
    for first in range(len(times)):
        for last in range(first, len(times)):
            assert last - first + 1 <= rate * (times[last] - times[first] + 0.5) + burst
    assert len(times) <= rate * (times[-1] - times[0]) + burst + 2  # all together it is kept closely
