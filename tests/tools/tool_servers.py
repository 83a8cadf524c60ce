"""Real servers of tools, each a process of its own."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

MCP = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("foreign")

@server.tool()
def greet(name: str) -> str:
    '''Greet a person.'''
    return f"hello {name} from {os.getpid()} with {os.environ.get('WORD')} in {os.path.basename(os.getcwd())}"

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""
"""An MCP server written with the official SDK: over HTTP where it is given a port, else on standard input."""

STUBBORN = """
import json, os, signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)", sys.argv[1]]
subprocess.Popen(child)
subprocess.Popen(child, start_new_session=True)  # leaves the process group
print("this is no message", flush=True)
print("this is received aside", file=sys.stderr, flush=True)
TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    requested = json.loads(line)
    if "id" not in requested:
        continue
    answer = {"error": {"code": -32601, "message": "unknown"}}
    if requested["method"] == "initialize":
        version = requested["params"]["protocolVersion"]
        about = {"serverInfo": {"name": "stubborn", "version": "1"}, "capabilities": {"tools": {}}}
        answer = {"result": {"protocolVersion": version, **about}}
    elif requested["method"] == "tools/list":
        answer = {"result": {"tools": [TOOL]}}
    elif requested["method"] == "tools/call":
        text = requested["params"]["arguments"].get("text", "")
        if text == "die":
            os._exit(3)
        if text == "wait":
            continue
        answer = {"result": {"content": [{"type": "text", "text": f"{os.getpid()} {text}"}]}}
    print(json.dumps({"jsonrpc": "2.0", "id": requested["id"], **answer}), flush=True)
time.sleep(0 if "gentle" in sys.argv[1] else 600)
"""
"""One that starts at once, by hand; it has two children, one of them in a session of its own, and unless it is gentle
ends neither with its input nor at SIGTERM."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def stubborn(folder: Path, mark: str) -> list[str]:
    """The command of a stubborn server; `mark` is in the command lines of all its processes."""
    path = folder / "stubborn.py"
    path.write_text(STUBBORN)
    return [sys.executable, str(path), mark]


def marked(mark: str) -> set[int]:
    """Processes whose command line holds `mark`."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                if mark in Path(f"/proc/{entry}/cmdline").read_text(errors="replace"):
                    found.add(int(entry))
            except OSError:
                continue
    return found


def gone(mark: str, seconds: float = 10.0) -> bool:
    """Whether no such process is left, soon."""
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


class Process:
    """A server that listens on a port, and can be killed and started again there."""

    def __init__(self, command: list[str], port: int, env: dict[str, str] | None = None):
        self.command, self.port, self.env = command, port, {**os.environ, **(env or {})}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
