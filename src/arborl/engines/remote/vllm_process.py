"""The process that vLLM runs in: start, messages, end.

Messages go both ways through a socket, each a length and that much JSON. A request has a number, and so has every part
of its response.
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

WORKER_DIR = Path(__file__).parent / "vllm_worker"
EXIT_SECONDS = 10.0
"""Time in which the process may end by itself."""

Response = dict[str, Any]


class VllmProcessDied(EngineError):
    """The process has ended."""


class PendingResponse:
    def __init__(self, process: VllmProcess, number: int):
        self.process, self.number, self.is_done = process, number, False
        self.loop = asyncio.get_running_loop()
        self.parts: asyncio.Queue[Response] = asyncio.Queue()

    def put(self, part: Response) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)

    async def next(self) -> Response:
        part = await self.parts.get()
        if part.get("done"):
            self.is_done = True
        if "error" in part:
            raise (VllmProcessDied if part.get("dead") else EngineError)(part["error"])
        return part

    def forget(self) -> None:
        self.is_done = True
        self.process.forget(self.number)


class BlockingResponse:
    def __init__(self, number: int):
        self.number, self.arrived, self.part = number, threading.Event(), Response()

    def put(self, part: Response) -> None:
        self.part = part
        self.arrived.set()

    def get(self, seconds: float, method: str) -> Response:
        if not self.arrived.wait(seconds):
            raise EngineError(f"vLLM did not answer {method!r} within {seconds:g} s")
        if "error" in self.part:
            raise EngineError(self.part["error"])
        return self.part


class VllmProcess:
    def __init__(self, python: str):
        ours, theirs = socket.socketpair()
        self.output: deque[str] = deque(maxlen=400)
        path = os.pathsep.join([str(WORKER_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        try:
            self.child = subprocess.Popen(
                [python, str(WORKER_DIR / "vllm_main.py"), str(theirs.fileno())],
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
        self.socket, self.lock = ours, threading.Lock()
        self.number = 0
        self.pending: dict[int, PendingResponse | BlockingResponse] = {}
        self.end_reason = ""
        self.output_thread = threading.Thread(target=self._read_output, name="arborl-vllm-log", daemon=True)
        self.output_thread.start()
        threading.Thread(target=self._read_responses, name="arborl-vllm", daemon=True).start()

    def request(self, method: str, **args: Any) -> PendingResponse:
        response = PendingResponse(self, self._next_number())
        self._send(response, method, args)
        return response

    def notify(self, method: str, **args: Any) -> None:
        """Send a request without a response."""
        with suppress(OSError):
            self._write({"id": 0, "method": method, **args})

    def request_blocking(self, method: str, seconds: float, **args: Any) -> Response:
        response = BlockingResponse(self._next_number())
        self._send(response, method, args)
        return response.get(seconds, method)

    async def call(self, method: str, seconds: float, **args: Any) -> Response:
        response = self.request(method, **args)
        try:
            return await asyncio.wait_for(response.next(), seconds)
        except TimeoutError as error:
            raise EngineError(f"vLLM did not answer {method!r} within {seconds:g} s") from error
        finally:
            response.forget()

    def _next_number(self) -> int:
        with self.lock:
            self.number += 1
            return self.number

    def _send(self, response: PendingResponse | BlockingResponse, method: str, args: dict[str, Any]) -> None:
        with self.lock:
            self.pending[response.number] = response
        try:
            if self.end_reason:
                raise OSError
            self._write({"id": response.number, "method": method, **args})
        except OSError:
            self.forget(response.number)
            raise VllmProcessDied(self.error_message()) from None

    def _write(self, message: dict[str, Any]) -> None:
        packed = json.dumps(message).encode()
        with self.lock:
            self.socket.sendall(struct.pack("!I", len(packed)) + packed)

    def forget(self, number: int) -> None:
        with self.lock:
            self.pending.pop(number, None)

    def _read_responses(self) -> None:
        with suppress(OSError), self.socket.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                part = json.loads(stream.read(struct.unpack("!I", head)[0]))
                with self.lock:
                    response = self.pending.get(part["id"])
                    if part.get("done"):
                        self.pending.pop(part["id"], None)
                if response is not None:
                    response.put(part)
        self.end_reason = self.end_reason or "its process is gone"
        with self.lock:
            orphans, self.pending = list(self.pending.values()), {}
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(EXIT_SECONDS)
        self.output_thread.join(1.0)  # its children may still hold the pipe
        for response in orphans:
            response.put({"done": True, "error": self.error_message(), "dead": True})

    def _read_output(self) -> None:
        """Keep the end of its output for error messages."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.output.append(line.decode(errors="replace").rstrip())

    def error_message(self) -> str:
        code = self.child.poll()
        last = next((line for line in reversed(self.output) if "Error" in line and "EngineCore" not in line), "")
        ending = "" if code is None else f", exit code {code}"
        return (
            f"vLLM: {self.end_reason or 'its process is gone'}{ending}{f'; its output: {last[-300:]}' if last else ''}"
        )

    def end(self, reason: str) -> None:
        """Close the socket, upon which the process frees its shared memory and exits; kill its group if it does not."""
        self.end_reason = self.end_reason or reason
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(EXIT_SECONDS)
        kill_process_group(self.child.pid)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(EXIT_SECONDS)


def kill_process_group(group: int) -> None:
    """Kill the processes of a group and wait for their end. Python's `resource_tracker` is spared: it frees shared
    memory and exits after the others."""
    deadline = time.monotonic() + EXIT_SECONDS
    while (members := _members(group)) and time.monotonic() < deadline:
        for process, command in members:
            if b"resource_tracker" not in command:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[tuple[int, bytes]]:
    """Processes of a group and their command lines; empty without /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return found
