"""The process that vLLM runs in: start, messages, end.

Messages go both ways through a socket, each a length and that much JSON. A request has a number, and so has every part
of its response.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from arborl.child_process import supervised_command
from arborl.errors import EngineError

WORKER_DIR = Path(__file__).parent / "vllm_worker"
EXIT_SECONDS = 10.0
"""Time in which the process may end by itself."""

Response = dict[str, Any]


class VllmProcessDied(EngineError):
    """The process has ended."""


class PendingResponse:
    """The parts of a response, in the event loop of its caller."""

    def __init__(self, process: VllmProcess, number: int):
        self.process, self.number, self.is_done = process, number, False
        self.loop = asyncio.get_running_loop()
        self.parts: asyncio.Queue[Response] = asyncio.Queue()

    def put(self, part: Response) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self.parts.put_nowait, part)

    async def next(self) -> Response:
        part = await self.parts.get()
        self.is_done |= bool(part.get("done"))
        if "error" in part:
            raise (VllmProcessDied if part.get("dead") else EngineError)(part["error"])
        return part

    def forget(self) -> None:
        self.is_done = True
        with self.process.lock:
            self.process.pending.pop(self.number, None)


class VllmProcess:
    def __init__(self, python: str):
        if shutil.which(python) is None:
            raise EngineError(f"{python} cannot be started: No such file or no permission")
        self.socket, theirs = socket.socketpair()
        self.output: deque[str] = deque(maxlen=400)
        path = os.pathsep.join([str(WORKER_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [python, str(WORKER_DIR / "vllm_main.py"), str(theirs.fileno())]
        with theirs:
            self.child = subprocess.Popen(
                supervised_command(command, keep_stderr=True),
                pass_fds=[theirs.fileno()],
                env={**quiet, **os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.lock = threading.Lock()
        self.number = 0
        self.pending: dict[int, PendingResponse] = {}
        self.end_reason = ""
        self.output_thread = threading.Thread(target=self._read_output, name="arborl-vllm-log", daemon=True)
        self.output_thread.start()
        threading.Thread(target=self._read_responses, name="arborl-vllm", daemon=True).start()

    def request(self, method: str, **args: Any) -> PendingResponse:
        with self.lock:
            self.number += 1
            response = self.pending[self.number] = PendingResponse(self, self.number)
        try:
            if self.end_reason:
                raise OSError
            self._write({"id": response.number, "method": method, **args})
        except OSError:
            response.forget()
            raise VllmProcessDied(self.error_message()) from None
        return response

    def notify(self, method: str, **args: Any) -> None:
        """Send a request without a response."""
        with suppress(OSError):
            self._write({"id": 0, "method": method, **args})

    async def call(self, method: str, seconds: float, **args: Any) -> Response:
        """The only part of a response."""
        response = self.request(method, **args)
        try:
            return await asyncio.wait_for(response.next(), seconds)
        except TimeoutError as error:
            raise EngineError(f"vLLM did not answer {method!r} within {seconds:g} s") from error
        finally:
            response.forget()

    def _write(self, message: dict[str, Any]) -> None:
        packed = json.dumps(message).encode()
        with self.lock:
            self.socket.sendall(struct.pack("!I", len(packed)) + packed)

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
        self.output_thread.join(1.0)
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
        reason = self.end_reason or "its process is gone"
        return f"vLLM: {reason}{ending}{f'; its output: {last[-300:]}' if last else ''}"

    def end(self, reason: str) -> None:
        """Close the socket, upon which the process frees its shared memory and exits; kill it if it does not."""
        self.end_reason = self.end_reason or reason
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.child.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(EXIT_SECONDS)
