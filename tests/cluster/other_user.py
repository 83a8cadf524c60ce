"""A second address and a second user on this machine, for tests of what they can reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNPRIVILEGED = 65534


def why_not() -> str | None:
    """What is missing for them."""
    if os.geteuid() != 0:
        return "only root can be another user or make a network namespace"
    missing = [name for name in ("ip", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    name = f"try{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"namespaces are refused: {tried.stderr.decode()[:200]}" if tried.returncode else None


def as_other_user(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as another user, who has none of this one's rights."""
    other = ["setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups", "--inh-caps=-all"]
    return subprocess.run([*other, sys.executable, *words], capture_output=True, text=True, timeout=300, cwd="/")


@contextmanager
def second_address() -> Iterator[tuple[str, list[str]]]:
    """Another host beside this one: this host's address as seen from there, and what runs a command there."""
    number = os.getpid()
    space, near, far, net = f"arbs{number}", f"abn{number}", f"abf{number}", f"10.214.{number % 250}"
    try:
        for words in (
            ["netns", "add", space], ["link", "add", near, "type", "veth", "peer", "name", far, "netns", space],
            ["addr", "add", f"{net}.1/24", "dev", near], ["link", "set", near, "up"],
            ["-n", space, "addr", "add", f"{net}.2/24", "dev", far], ["-n", space, "link", "set", far, "up"],
        ):  # fmt: skip
            subprocess.run(["ip", *words], check=True, capture_output=True)
        yield f"{net}.1", ["ip", "netns", "exec", space]
    finally:
        subprocess.run(["ip", "link", "del", near], capture_output=True)
        subprocess.run(["ip", "netns", "del", space], capture_output=True)


CONNECT = """
import socket, sys
host, *ports = sys.argv[1:]
for port in ports:
    try:
        socket.create_connection((host, int(port)), 5).close()
        print(port)
    except OSError:
        pass
"""


def reached(host: str, ports: list[int], prefix: list[str]) -> list[int]:
    """The ports of a host that accept a connection from where `prefix` runs a command."""
    words = [*prefix, sys.executable, "-I", "-S", "-c", CONNECT, host, *map(str, ports)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    return [int(line) for line in result.stdout.split()]
