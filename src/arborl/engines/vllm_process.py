"""The process that vLLM runs in: started, asked, heard out, ended.

Messages go both ways through a socket, each a length and that much JSON. What is asked carries a number, and so does
every piece of its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from arborl.errors import EngineError

log = logging.getLogger(__name__)

SIDE = Path(__file__).parent / "vllm_side"
END = 10.0
"""Seconds that it may take to end by itself."""

Said = dict[str, Any]


class Dead(EngineError):
    """The process is gone."""


class Asked:
    """What comes back for one request, in the event loop that asked."""

    def __init__(self, process: Process, number: int):
        self.process, self.number, self.over = process, number, False
        self.loop = asyncio.get_running_loop()
        self.pieces: asyncio.Queue[Said] = asyncio.Queue()

    def put(self, piece: Said) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def next(self) -> Said:
        piece = await self.pieces.get()
        if piece.get("done"):
            self.over = True
        if "error" in piece:
            raise (Dead if piece.get("dead") else EngineError)(piece["error"])
        return piece

    def forget(self) -> None:
        """Nobody waits any more."""
        self.over = True
        self.process.forget(self.number)


class Process:
    """The process, and who waits for what it says."""

    def __init__(self, python: str):
        ours, theirs = socket.socketpair()
        self.said: deque[str] = deque(maxlen=400)
        path = os.pathsep.join([str(SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        try:
            self.child = subprocess.Popen(
                [python, str(SIDE / "main.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**quiet, **os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"{python} cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.pipe, self.lock = ours, threading.Lock()
        self.number = 0
        self.waiting: dict[int, Asked | Blocking] = {}
        self.gone = ""
        self.hearing = threading.Thread(target=self._hear_out, name="arborl-vllm-log", daemon=True)
        self.hearing.start()
        threading.Thread(target=self._listen, name="arborl-vllm", daemon=True).start()

    def ask(self, do: str, **more: Any) -> Asked:
        """Ask from an event loop."""
        with self.lock:
            self.number += 1
            asked = Asked(self, self.number)
        return self._send(asked, do, more)

    def tell(self, do: str, **more: Any) -> None:
        """Ask for nothing."""
        with suppress(OSError):
            self._write({"id": 0, "do": do, **more})

    def wait(self, do: str, seconds: float, **more: Any) -> Said:
        """Ask and wait here."""
        with self.lock:
            self.number += 1
            asked = Blocking(self.number)
        return self._send(asked, do, more).get(seconds, do)

    async def answer(self, do: str, seconds: float, **more: Any) -> Said:
        """Ask for one answer."""
        asked = self.ask(do, **more)
        try:
            return await asyncio.wait_for(asked.next(), seconds)
        except TimeoutError as error:
            raise EngineError(f"vLLM did not answer {do!r} within {seconds:g} s") from error
        finally:
            asked.forget()

    def _send(self, asked: Any, do: str, more: dict[str, Any]) -> Any:
        with self.lock:
            self.waiting[asked.number] = asked
        try:
            if self.gone:
                raise OSError
            self._write({"id": asked.number, "do": do, **more})
        except OSError:
            self.forget(asked.number)
            raise Dead(self.why()) from None
        return asked

    def _write(self, message: dict[str, Any]) -> None:
        packed = json.dumps(message).encode()
        with self.lock:
            self.pipe.sendall(struct.pack("!I", len(packed)) + packed)

    def forget(self, number: int) -> None:
        with self.lock:
            self.waiting.pop(number, None)

    def _listen(self) -> None:
        """Hands answers out until the process is gone."""
        with suppress(OSError), self.pipe.makefile("rb") as heard:
            while len(head := heard.read(4)) == 4:
                said = json.loads(heard.read(struct.unpack("!I", head)[0]))
                with self.lock:
                    asked = self.waiting.get(said["id"])
                    if said.get("done"):
                        self.waiting.pop(said["id"], None)
                if asked is not None:
                    asked.put(said)
        self.gone = self.gone or "its process is gone"
        with self.lock:
            orphans, self.waiting = list(self.waiting.values()), {}
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(END)
        self.hearing.join(1.0)  # its last words; others that it started may still hold the line
        for one in orphans:
            one.put({"done": True, "error": self.why(), "dead": True})

    def _hear_out(self) -> None:
        """Keep the end of what it prints, for messages."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.said.append(line.decode(errors="replace").rstrip())

    def why(self) -> str:
        code = self.child.poll()
        last = next((line for line in reversed(self.said) if "Error" in line and "EngineCore" not in line), "")
        told = f"; it said: {last[-300:]}" if last else ""
        return f"vLLM: {self.gone or 'its process is gone'}{'' if code is None else f', exit code {code}'}{told}"

    def end(self, why: str) -> None:
        """Hang up: it then puts away what it has in shared memory. One that does not is killed, with all it started."""
        self.gone = self.gone or why
        with suppress(OSError):
            self.pipe.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(END)
        kill_all(self.child.pid)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(END)


def kill_all(group: int) -> None:
    """Kill the processes of a group, and wait until they are gone. Python's own that puts shared memory away (its
    `resource_tracker`) is left to do so: it ends when the others have."""
    until = time.monotonic() + END
    while (members := _members(group)) and time.monotonic() < until:
        for process, command in members:
            if b"resource_tracker" not in command:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[tuple[int, bytes]]:
    """The processes of a group and their command lines; none where the system does not say so in files."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return found


class Blocking:
    """Who waits for one answer in a thread."""

    def __init__(self, number: int):
        self.number, self.there, self.said = number, threading.Event(), Said()

    def put(self, piece: Said) -> None:
        self.said = piece
        self.there.set()

    def get(self, seconds: float, do: str) -> Said:
        if not self.there.wait(seconds):
            raise EngineError(f"vLLM did not answer {do!r} within {seconds:g} s")
        if "error" in self.said:
            raise EngineError(self.said["error"])
        return self.said
