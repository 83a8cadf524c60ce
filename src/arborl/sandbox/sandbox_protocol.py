"""Limits and results of sandboxed code, and the messages between host and sandboxed process.

A message is a length, the token of its request, a kind, and texts with their lengths. Untrusted code shares the process
and can write anything at any speed: any bytes other than exactly one message to the current request end the process.
Code that finds the token gains nothing: it may report anything about itself.
"""

from __future__ import annotations

import marshal
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

StopReason = Literal["", "wall", "cpu", "children", "memory", "processes", "disk", "output", "forged", "died"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of sandboxed code: times per `run`, the others for all processes of the sandbox. Between two runs all
    processes of the sandbox are stopped."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 5.0
    """Processor time of all processes."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all processes. Files are counted separately."""
    file_mb: int = 16
    disk_mb: int = 64
    processes: int = 32
    """Processes and threads. At the level `rlimits` only threads."""
    output_bytes: int = 100_000
    """Standard output and error; code that writes more is stopped."""
    open_files: int = 128

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ValueError(f"{each.name}={getattr(self, each.name)}: give more than 0")
        if self.memory_mb < 32:
            raise ValueError(f"memory_mb={self.memory_mb}: give 32 or more, for Python itself")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one `run`."""

    ok: bool
    stdout: str = ""
    stderr: str = ""
    """Includes the traceback."""
    value: str = ""
    """`repr` of the last line, if it is an expression with a value."""
    error: str = ""
    """One line: the exception, or the exceeded limit."""
    stopped: StopReason = ""
    """The limit that ended the sandbox, `forged` if code wrote to the control descriptor, `died` if the process ended.
    Variables and files are lost."""
    seconds: float = 0.0

    @property
    def output(self) -> str:
        """As at a Python prompt: standard output, the value, and the error."""
        parts = (self.stdout.rstrip("\n"), self.value, (self.stderr.rstrip("\n") or self.error) if not self.ok else "")
        text = "\n".join(part for part in parts if part)
        return f"{text}\n{self.error}" if self.stopped and self.error not in text else text


OK, RAISED, READY, FAILED = range(4)
TOKEN_BYTES = 16
GREETING = bytes(TOKEN_BYTES)  # token of the first message, before any request
MAX_MESSAGE = 3 * 2**20
LENGTH_BYTES = 4


class ForgedMessage(ValueError):
    """Bytes that are not a valid response to the request."""


@dataclass(frozen=True, slots=True)
class GuestMessage:
    """One message of the sandboxed process."""

    kind: int
    texts: tuple[str, ...]


def encode_request(code: str, stdin: str, files: Mapping[str, str]) -> tuple[bytes, bytes]:
    """The bytes of a request, and the token of its response."""
    token = secrets.token_bytes(TOKEN_BYTES)
    fields: dict[str, Any] = {"code": code, "stdin": stdin, "files": dict(files), "token": token}
    data = marshal.dumps(fields)
    return struct.pack("<I", len(data)) + data, token


class MessageParser:
    """Parser of one message, for partial input."""

    def __init__(self, token: bytes):
        self._token, self._data = token, bytearray()

    def feed(self, part: bytes) -> GuestMessage | None:
        """The message when it is complete; ForgedMessage as soon as it is invalid."""
        self._data += part
        data = self._data
        if len(data) < LENGTH_BYTES:
            return None
        length = struct.unpack_from("<I", data)[0]
        if not TOKEN_BYTES + 1 <= length <= MAX_MESSAGE:
            raise ForgedMessage(f"a message of {length} bytes")
        if not data[LENGTH_BYTES:].startswith(self._token[: len(data) - LENGTH_BYTES]):
            raise ForgedMessage("a message with a wrong token")
        if len(data) > LENGTH_BYTES + length:
            raise ForgedMessage("more than one message")
        return parse_message(bytes(data[LENGTH_BYTES + TOKEN_BYTES :])) if len(data) == LENGTH_BYTES + length else None


def parse_message(data: bytes) -> GuestMessage:
    texts, position = [], 1
    while position < len(data):
        if position + 4 > len(data):
            raise ForgedMessage("a truncated message")
        count = struct.unpack_from("<I", data, position)[0]
        if position + 4 + count > len(data):
            raise ForgedMessage("a truncated message")
        texts.append(data[position + 4 : position + 4 + count].decode(errors="replace"))
        position += 4 + count
    expected = {OK: 2, RAISED: 2, READY: 1, FAILED: 1}.get(data[0])
    if len(texts) != expected:
        raise ForgedMessage(f"a message of kind {data[0]} with {len(texts)} texts")
    return GuestMessage(data[0], tuple(texts))


class GuestChannel:
    """The host's end of the socket, non-blocking."""

    def __init__(self, control: socket.socket):
        control.setblocking(False)
        self._control = control
        self._unsent = memoryview(b"")
        self._parser = MessageParser(GREETING)

    def fileno(self) -> int:
        return self._control.fileno()

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def start_request(self, data: bytes, token: bytes) -> None:
        """Start a request; ForgedMessage if there is unexpected input."""
        try:
            unexpected = self._control.recv(1)
        except BlockingIOError:
            self._unsent, self._parser = memoryview(data), MessageParser(token)
            return
        if unexpected:
            raise ForgedMessage("a message before the request")
        raise OSError("the sandboxed process has ended")

    def transfer(self) -> GuestMessage | None:
        """Send and receive without blocking. OSError if the process has ended, ForgedMessage for invalid input."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._control.send(self._unsent) :]
        except BlockingIOError:
            pass
        try:
            part = self._control.recv(65536)
        except BlockingIOError:
            return None
        if not part:
            raise OSError("the sandboxed process has ended")
        return self._parser.feed(part)

    def close(self) -> None:
        self._control.close()
