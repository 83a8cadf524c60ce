"""Servers that run code by `POST /execute`, as tools of a run."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from typer.testing import CliRunner

from arborl.agents.tool_agents import CodeAgent
from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.tool_config import ToolConfig
from arborl.errors import ConfigError
from arborl.tools import TOOLS
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.remote.tool_client import CodeServerClient, execution_text
from arborl.tools.tool_loader import ToolLoader
from arborl.types import Message

PRINTS_42 = (200, {"success": True, "output": "42\n", "error": None, "execution_time": 0.01})


class CodeServer:
    """Answers with these (status, body) in turn, the last one again and again; a body may wait for `go_on`."""

    def __init__(self, *answers):
        self.answers, self.codes, self.headers, self.go_on = list(answers), [], [], threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.codes.append(body["code"])
                server.headers.append(dict(self.headers))
                status, reply = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                if reply == "wait":
                    server.go_on.wait(30)
                    return
                data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
                self.send_response(status if self.path == "/execute" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.go_on.set()
        self.http.shutdown()
        self.http.server_close()


def execute(server, code="print(6 * 7)", **options):
    async def run():
        client = CodeServerClient(server.url, backoff=0.001, **options)
        result = await client.execute(code)
        await client.close()
        return result

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (PRINTS_42[1], "42"),
        ({"output": "42"}, "42"),
        ({"output": "", "error": ""}, "(no output)"),
        ({"success": True, "output": None}, "(no output)"),
        ({"output": "1", "error": "ZeroDivisionError: division by zero"}, "1\nZeroDivisionError: division by zero"),
        ({"success": False, "output": "", "error": "SyntaxError"}, "SyntaxError"),
        ({"success": False, "output": "Traceback: KeyError", "error": "KeyError"}, "Traceback: KeyError"),
        ({"success": False}, "the code failed"),
        ({"success": True, "output": "42", "error": "a warning"}, "42"),
        ({"success": None, "output": [1, {"a": 2}]}, '[1, {"a": 2}]'),
    ],
)
def test_output_and_error_are_the_text_for_the_model(reply, text):
    assert execution_text(reply) == text
    with CodeServer((200, reply)) as server:
        result = execute(server)
        assert (result.content, result.ok, result.kind) == (text, True, "ok")  # failed code is a successful call


def test_a_server_error_a_busy_server_and_a_reply_that_is_no_json_are_tried_again():
    with CodeServer((500, "oops"), (429, "busy"), (200, "<html>"), (200, "[1]"), PRINTS_42) as server:
        assert execute(server).content == "42"
        assert server.codes == ["print(6 * 7)"] * 5


def test_after_the_last_retry_the_call_fails_with_the_reason():
    with CodeServer((500, "oops")) as server:
        result = execute(server, retries=2)
        assert (result.ok, result.kind, len(server.codes)) == (False, "unavailable", 3)
        assert "did not respond within 2 retries (500: oops)" in result.content
    with CodeServer((200, "<html>")) as server:
        assert "the reply is not JSON" in execute(server, retries=0).content


def test_a_refused_code_is_not_sent_again():
    with CodeServer((422, '{"detail": "code is too long"}')) as server:
        result = execute(server)
        assert (result.kind, len(server.codes)) == ("refused", 1)
        assert "code is too long" in result.content


def test_code_that_takes_too_long_is_a_failed_call():
    with CodeServer((200, "wait")) as server:
        result = execute(server, attempt_seconds=0.05, retries=1)
        assert (result.kind, len(server.codes)) == ("unavailable", 2)
        assert "timeout of 0.05 s" in result.content


def test_a_closed_client_and_an_unreachable_server_give_a_failed_call():
    with CodeServer(PRINTS_42) as server:
        client = CodeServerClient(server.url, retries=0)
        asyncio.run(client.close())
        assert asyncio.run(client.execute("1")).kind == "unavailable"
    assert execute(server, retries=0).kind == "unavailable"


# ------------------------------------------------------------------------------------------------ tools of a run


def load(server, **entry):
    loader = ToolLoader(TOOLS.__getitem__)
    return loader.load(validate(ToolConfig, {"server": server.url, "protocol": "execute", **entry}), "tools.0")


def test_an_entry_gives_the_tool_python_after_a_test_of_the_server(monkeypatch):
    monkeypatch.setenv("ARBORL_TOOL_API_KEY", "of-another-server")
    with CodeServer(PRINTS_42) as server:
        (tool,) = load(server, code_prefix="from tools import *\n", limit={"per_minute": 600}, concurrency=2)
        assert (tool.name, tool.spec.parameters["required"], tool.terminal) == ("python", ["code"], False)
        assert asyncio.run(tool.run({"code": "print(6 * 7)"})).content == "42"
        assert server.codes == ["print(6 * 7)", "from tools import *\nprint(6 * 7)"]
        assert asyncio.run(tool.run({"cod": "1"})).kind == "arguments"
        assert all("Authorization" not in headers for headers in server.headers)
        monkeypatch.setenv("CODE_KEY", "secret")
        (tool,) = load(server, api_key_env="CODE_KEY", prefix="far_")
        assert (tool.name, server.headers[-1]["Authorization"]) == ("far_python", "Bearer secret")


def test_long_outputs_are_cut():
    with CodeServer((200, {"output": "x" * 10_000})) as server:
        (tool,) = load(server)
        content = asyncio.run(tool.run({"code": "1"})).content
        assert len(content) < 5_000
        assert "cut:" in content


@pytest.mark.parametrize(
    ("answer", "says"),
    [((404, "no"), "status 404"), ((200, "<html>"), "not JSON"), ((200, {"a": 1}), "neither output nor error")],
)
def test_a_server_that_does_not_run_code_is_refused_before_the_run(answer, says):
    with (
        CodeServer(answer) as server,
        pytest.raises(ConfigError, match=f"tools.0: .*/execute does not run code .*{says}"),
    ):
        load(server)


def test_an_address_without_a_server_is_refused_before_the_run():
    with CodeServer(PRINTS_42) as server:
        pass
    with pytest.raises(ConfigError, match="no code server answers at http://127"):
        load(server)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "python", "protocol": "execute"}, "protocol is for server"),
        ({"server": "http://h:1", "code_prefix": "x"}, "code_prefix is for protocol: execute"),
        ({"server": "http://h:1", "protocol": "execute", "tools": ["python"]}, "has one tool, python"),
        ({"server": "http://h:1", "protocol": "grpc"}, "arborl.*execute"),
        (
            {"server": "http://h:1", "protocol": "execute", "limit": {"per_minute": 1, "server": "auto"}},
            "limit.server: auto is a tool server",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(entry, says):
    with pytest.raises(ConfigError, match=says):
        validate(ToolConfig, entry)


class Counter:
    """The part of a model that counts metrics."""

    def __init__(self):
        self.counts = {}

    def count(self, metrics):
        self.counts |= metrics


def test_the_code_agent_runs_its_code_on_that_server_and_not_in_the_sandbox():
    async def run():
        agent, model = CodeAgent(tools=load(server, code_prefix="import math\n")), Counter()
        async with ToolContext() as context:
            message = Message("assistant", "<code>\nprint(1)\n</code>")
            return agent, model, await agent.process(message, context, model, last=False)

    with CodeServer(PRINTS_42, PRINTS_42, (500, "oops"), PRINTS_42) as server:
        agent, model, shown = asyncio.run(run())
        assert shown == [Message("tool", "<result>\n42\n</result>", name="python")]
        assert server.codes[1:] == ["import math\nprint(1)"]
        assert model.counts == {"tool/used": 1.0, "tool/calls": 1.0}
        assert not agent.sandboxed


@pytest.mark.slow
def test_a_run_with_the_code_agent_needs_nothing_but_the_entry(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([{"question": "6 * 7?", "answer": 42}] * 8))
    with CodeServer(PRINTS_42) as server:
        tree = {
            "data": str(tmp_path / "rows.json"), "agent": {"name": "code", "args": {"max_tool_rounds": 1}},
            "tools": [{"server": server.url, "protocol": "execute", "retries": 3}], "rewards": ["equal"],
            "trainer": {"steps": 1}, "rollout": {"tasks_per_step": 1, "group_size": 2},
            "engine": {"name": "scripted", "args": {"replies": ["<code>print(6 * 7)</code>"]}},
            "evaluation": {"tasks": 0}, "track": {"tensorboard": False, "gifs": 0}, "output_dir": str(tmp_path / "run"),
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
        assert done.exit_code == 0, done.output
        assert server.codes == ["print(6 * 7)"] * 3  # the test of the server, and a call of each episode
    (path,) = (tmp_path / "run" / "episodes").glob("*.jsonl")
    assert all("<result>\\n42\\n</result>" in line for line in path.read_text().splitlines())
