"""Runs attacks, and looks from outside at what came of them."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from attack_list import ATTACKS, PRELUDE, Attack

from arborl.sandbox import LEVELS, Sandbox, SandboxError, SandboxLimits, SandboxResult, try_level
from arborl.sandbox.process_usage import descendants
from arborl.sandbox.sandbox_protocol import ForgedMessage, MessageParser

LIMITS = SandboxLimits(
    wall_seconds=1.0, cpu_seconds=0.6, memory_mb=128, file_mb=4, disk_mb=8, processes=8, output_bytes=10_000,
    open_files=64,
)  # fmt: skip
GRACE = 4.0
"""Seconds beyond a limit that a busy machine may need to say so."""
HELD, OPEN = "held", "open"


def available() -> list[str]:
    """The levels that work on this machine."""
    found = []
    for level in LEVELS:
        try:
            try_level(level)
            found.append(level)
        except SandboxError:
            continue
    return found


class World:
    """What there is to be harmed: a secret, a folder, a process, a person who listens."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="arborl-attack-"))
        self.folder.chmod(0o777)
        self.secret = self.folder / "secret.txt"
        self.secret.write_text("swordfish")
        self.secret.chmod(0o666)
        os.environ["ARBORL_ATTACK_SECRET"] = "swordfish"
        self.victim = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.reached: list[str] = []
        self._listen(socket.AF_INET, ("127.0.0.1", 0))
        self.port = self._sockets[0].getsockname()[1]
        self._listen(socket.AF_UNIX, str(self.folder / "socket"))
        self.abstract = self.folder.name
        self._listen(socket.AF_UNIX, f"\0{self.abstract}")
        self._receive(str(self.folder / "datagram"))
        for name in ("socket", "datagram"):
            (self.folder / name).chmod(0o666)
        self.before = self.state()

    _sockets: list[socket.socket] = []

    def _listen(self, family: int, address: object) -> None:
        listening = socket.socket(family)
        listening.bind(address)
        listening.listen()
        self._sockets = [*self._sockets, listening]

        def serve() -> None:
            try:
                while True:
                    listening.accept()
                    self.reached.append(str(address))
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()

    def _receive(self, address: str) -> None:
        receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiving.bind(address)
        self._sockets = [*self._sockets, receiving]

        def serve() -> None:
            while receiving.recv(100):
                self.reached.append(address)

        threading.Thread(target=serve, daemon=True).start()

    def state(self) -> dict[str, object]:
        """Everything that must be as it was."""
        paths = [self.folder, *sorted(self.folder.rglob("*"))]
        found: dict[str, object] = {}
        for path in paths:
            info = path.lstat()
            found[str(path)] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_size, info.st_nlink)
        pid = self.victim.pid
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found["victim"] = (status[0] in "TtZX", os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid))
        found["secret"] = (self.secret.read_text(), os.listxattr(self.secret))
        found["host"] = (os.uname().nodename, os.path.exists("/dev/shm/arborl-attack"), self.victim.poll())
        found["reached"] = list(self.reached)
        return found

    def fill(self, code: str) -> str:
        for name, value in (
            ("SECRET", self.secret), ("FOLDER", self.folder), ("HOST", os.getpid()), ("VICTIM", self.victim.pid),
            ("PORT", self.port), ("SOCKET", self.folder / "socket"), ("ABSTRACT", self.abstract),
            ("DATAGRAM", self.folder / "datagram"),
            ("STDLIB", os.__file__),
        ):  # fmt: skip
            code = code.replace(name, str(value))
        return code

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for listening in self._sockets:
            listening.shutdown(socket.SHUT_RDWR)  # or who accepts would hold it
            listening.close()
        for path in (self.secret, self.folder / "socket", self.folder / "datagram"):
            path.unlink(missing_ok=True)
        self.folder.rmdir()


@contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


def attempt(attack: Attack, level: str, there: World) -> tuple[str, str]:
    """`held`, or `open` with what came of it, which a level may be known for."""
    limits = replace(LIMITS, **attack.limits)
    start = time.perf_counter()
    box = Sandbox(limits, level)
    started = time.perf_counter() - start
    try:
        namespaces = Spaces(box._supervisor.pid)
        outcomes = [box.run_sync(f"{PRELUDE}\n{there.fill(attack.code)}")]
        if attack.then:
            time.sleep(0.5)
            outcomes.append(box.run_sync(there.fill(attack.then)))
    finally:
        box.close()
    seconds = time.perf_counter() - start - started - (0.5 if attack.then else 0.0)
    trouble = harm(outcomes, limits, seconds) or left(box, namespaces)
    return (OPEN, trouble) if trouble else (HELD, outcomes[-1].error)


def fuzz(level: str, count: int, seed: int = 0) -> dict[str, int]:
    """Run sandboxed code that writes random frames to the response channel; counts the causes that ended each run."""
    rng = random.Random(seed)
    limits = replace(LIMITS, wall_seconds=0.6)
    counts: dict[str, int] = {}
    for _ in range(count):
        writes = [frame(rng) for _ in range(rng.randint(1, 5))]
        sent = "\n".join(f"os.write(3, {part})\ntime.sleep({rng.choice((0, 0, 0.01))})" for part in writes)
        with Sandbox(limits, level) as box:
            start = time.perf_counter()
            runs = [box.run_sync(f"{PRELUDE}\n{sent}"), box.run_sync("6 * 7")]
            seconds = time.perf_counter() - start
        if seconds > 2 * limits.wall_seconds + GRACE:
            raise AssertionError(f"{writes} took {seconds:.1f} s")
        if runs[1].value not in ("", "42"):
            raise AssertionError(f"{writes} answered another's question")
        for run in runs:
            counts[run.stopped or "answered"] = counts.get(run.stopped or "answered", 0) + 1
    return counts


def frame(rng: random.Random) -> str:
    """An expression for bytes that are nothing, nearly an answer, or one."""
    length, kind = rng.choice((0, 1, 16, 17, 25, 100, 2**20, 2**31, 2**32 - 1)), rng.choice((0, 1, 2, 3, 4, 255))
    texts = [bytes(rng.randbytes(rng.randint(0, 20))) for _ in range(rng.randint(0, 3))]
    whole = f"answer({rng.choice(('token()', 'bytes(16)', repr(rng.randbytes(16))))}, *{texts!r}, kind={kind})"
    return rng.choice(
        (
            whole,
            f"{whole}[:{rng.randint(1, 40)}]",
            f"struct.pack('<I', {length}) + token() + {rng.randbytes(rng.randint(0, 60))!r}",
            repr(rng.randbytes(rng.randint(1, 200))),
        )
    )


def fuzz_reader(frames: int, seed: int = 0) -> dict[str, int]:
    """The host's reader alone, on random bytes in random pieces: it answers, waits for more, or calls them forged."""
    rng, counts = random.Random(seed), {"answer": 0, "waits": 0, "forged": 0}
    token = rng.randbytes(16)
    for _ in range(frames):
        body = rng.choice((token, token, bytes(16), b"")) + bytes([rng.choice((0, 1, 2, 3, 9))])
        for _ in range(rng.randint(0, 3)):
            text = rng.randbytes(rng.randint(0, 8))
            body += struct.pack("<I", max(len(text) + rng.choice((0, 0, 0, 0, 1, -1, 2**31)), 0)) + text
        size = max(len(body) + rng.choice((0, 0, 0, 0, 1, -1, -9)), 0)
        data = struct.pack("<I", size) + body
        inbox, place, came = MessageParser(token), 0, "waits"
        try:
            while place < len(data) and came == "waits":
                step = rng.randint(1, 12)
                came = "answer" if inbox.feed(data[place : place + step]) is not None else "waits"
                place += step
        except ForgedMessage:
            came = "forged"
        counts[came] += 1
    return counts


def harm(outcomes: list[SandboxResult], limits: SandboxLimits, seconds: float) -> str:
    """What the attack received or used that it must not."""
    for outcome in outcomes:
        received = outcome.stdout + outcome.stderr + outcome.value + outcome.error
        if "FELL" in outcome.stdout:
            return next(line for line in outcome.stdout.splitlines() if line.startswith("FELL"))
        if "swordfish" in received:
            return "the secret came out"
        if len(received.encode()) > 3 * 2**20:
            return f"{len(received)} characters came out"
    if len(outcomes) > 1 and outcomes[-1].value == "42":
        return "a forged answer was taken for another"
    if seconds > len(outcomes) * limits.wall_seconds + GRACE:
        return f"took {seconds:.1f} s"
    return ""


def left(box: Sandbox, namespaces: Spaces) -> str:
    """What is still there of a sandbox that was closed."""
    deadline = time.monotonic() + 3
    while (here := namespaces.alive()) or os.path.exists(box._folder):
        if time.monotonic() > deadline:
            return f"left behind: {here or box._folder}"
        time.sleep(0.02)
    namespaces.close()
    return ""


class Spaces:
    """PID namespaces of the children of a supervisor, held open so that their numbers are not reused; and the processes
    themselves where the namespace is the host's."""

    def __init__(self, keeper: int):
        own = os.readlink("/proc/self/ns/pid")
        children = list(descendants(keeper))
        self.held = [os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY) for pid in children]
        self.names = {os.readlink(f"/proc/{pid}/ns/pid") for pid in children} - {own}
        self.processes = {(pid, began(pid)) for pid in children}

    def alive(self) -> list[int]:
        found = [pid for pid, start in self.processes if began(pid) == start]
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") in self.names and began(int(name)):
                    found.append(int(name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)


def began(pid: int) -> str:
    """When a process began; empty where it is gone, or dead and not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def outcomes(level: str, attacks: list[Attack] = ATTACKS) -> dict[str, tuple[str, str]]:
    """Every attack at a level, six at a time, and alone once more where it took too long, which may have been the
    others' doing; and after all of them, the world as it was."""
    with world() as there, ThreadPoolExecutor(6) as several:
        results = several.map(lambda attack: attempt(attack, level, there), attacks)
        found = dict(zip((attack.name for attack in attacks), results, strict=True))
        for attack in attacks:
            if found[attack.name][1].startswith("took "):
                found[attack.name] = attempt(attack, level, there)
        after = there.state()
        changed = {key: after.get(key) for key in {*after, *there.before} if after.get(key) != there.before.get(key)}
        found["the world is as it was"] = (OPEN, str(changed)) if changed else (HELD, "")
    return found
