"""The supervisor process, and how processes of a cluster are found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from .cluster_folder import ENDED

VARIABLE = "ARBORL_CLUSTER"
"""In the environment of every process that a cluster has on a host."""
SUBREAPER, DEATH_SIGNAL, NAME = 36, 1, 15
"""Of prctl(2)."""
GRACE = 15.0
"""Seconds that Ray has to end by itself."""


def start_time(pid):
    """Start time of a process in clock ticks; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def alive(record):
    """Whether the supervisor of a record runs; a pid alone may belong to another process by now."""
    return bool(record.get("pid")) and start_time(record["pid"]) == record["born"]


def descendants(pid):
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


def processes_with_id(mark):
    """Processes with the start id in their environment."""
    found = []
    wanted = f"{VARIABLE}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and int(name) != os.getpid():
                    found.append(int(name))
        except OSError:
            continue
    return found


def send_signal(number, pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def supervise(words, environment):
    """Run Ray until it ends or a signal arrives; then end all of its processes."""
    prctl(SUBREAPER, 1)
    prctl(NAME, b"arborl-keeper")  # the name in `ps -o comm`
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: signals.append(True))
    supervisor, ray = os.getpid(), os.fork()
    if ray == 0:
        try:
            prctl(DEATH_SIGNAL, signal.SIGTERM)  # in case the supervisor is killed
            os.chdir(os.path.expanduser("~") if os.path.isdir(os.path.expanduser("~")) else "/")
            os.execvpe(words[0], words, environment)
        except OSError as error:
            os.write(2, f"{words[0]}: {error}\n".encode())
        os._exit(127)
    ended = False
    while not (ended or signals):
        ended = reap(ray)
        time.sleep(0.2)
    os.write(1, f"{ENDED} Ray ended {'by itself' if ended else 'by a signal'}.\n".encode())
    send_signal(signal.SIGTERM, [] if ended else [ray])
    until = time.monotonic() + GRACE
    while not ended and time.monotonic() < until:
        ended = reap(ray)
        time.sleep(0.1)
    send_signal(signal.SIGTERM, descendants(supervisor))
    until = time.monotonic() + 2
    while left := descendants(supervisor):
        if time.monotonic() > until:
            send_signal(signal.SIGKILL, left)
        reap(ray)
        time.sleep(0.1)


def reap(pid):
    """Reap ended children; whether this child was among them."""
    gone = False
    try:
        while (found := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            gone = gone or found == pid
    except ChildProcessError:
        return True
    return gone
