"""What host and guest say to each other, read by a host that believes nothing before it is whole.

An answer is a length, the token of the request it answers, a kind, and texts with their lengths. Foreign code shares
the guest's process and may write anything, at any speed: whatever is not exactly one answer to the request under way
ends the guest. A forger that finds the token has gained nothing: code may say of itself what it likes.
"""

from __future__ import annotations

import marshal
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OK, RAISED, READY, FAILED = range(4)
TOKEN = 16
GREETING = bytes(TOKEN)
"""What a guest answers before it was asked."""
MAX_ANSWER = 3 * 2**20
HEAD = 4


class Forged(ValueError):
    """Not an answer to what was asked; the guest, or code in it, made it up."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One message of a guest."""

    kind: int
    texts: tuple[str, ...]


def request(code: str, stdin: str, files: Mapping[str, str]) -> tuple[bytes, bytes]:
    """A piece of code as a guest reads it, and the token its answer must bring."""
    token = secrets.token_bytes(TOKEN)
    told: dict[str, Any] = {"code": code, "stdin": stdin, "files": dict(files), "token": token}
    data = marshal.dumps(told)
    return struct.pack("<I", len(data)) + data, token


class Inbox:
    """The bytes of one answer, as they come."""

    def __init__(self, token: bytes):
        self._token, self._data = token, bytearray()

    def feed(self, part: bytes) -> Answer | None:
        """The answer once it is whole; Forged as soon as it cannot become one."""
        self._data += part
        data = self._data
        if len(data) < HEAD:
            return None
        whole = struct.unpack_from("<I", data)[0]
        if not TOKEN + 1 <= whole <= MAX_ANSWER:
            raise Forged(f"an answer of {whole} bytes")
        if not data[HEAD:].startswith(self._token[: len(data) - HEAD]):
            raise Forged("an answer that nobody asked for")
        if len(data) > HEAD + whole:
            raise Forged("more than one answer")
        return read(bytes(data[HEAD + TOKEN :])) if len(data) == HEAD + whole else None


def read(data: bytes) -> Answer:
    """What follows the token."""
    texts, place = [], 1
    while place < len(data):
        if place + 4 > len(data):
            raise Forged("an answer that breaks off")
        count = struct.unpack_from("<I", data, place)[0]
        if place + 4 + count > len(data):
            raise Forged("an answer that breaks off")
        texts.append(data[place + 4 : place + 4 + count].decode(errors="replace"))
        place += 4 + count
    wanted = {OK: 2, RAISED: 2, READY: 1, FAILED: 1}.get(data[0])
    if len(texts) != wanted:
        raise Forged(f"an answer of kind {data[0]} with {len(texts)} texts")
    return Answer(data[0], tuple(texts))


class Line:
    """The host's end of the socket to a guest. Nothing here waits: who calls has a clock to look at."""

    def __init__(self, control: socket.socket):
        control.setblocking(False)
        self._control = control
        self._unsent = memoryview(b"")
        self._inbox = Inbox(GREETING)

    def fileno(self) -> int:
        return self._control.fileno()

    @property
    def events(self) -> int:
        """What to poll for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def ask(self, data: bytes, token: bytes) -> None:
        """Begin a request; Forged where the guest has said something already."""
        try:
            said = self._control.recv(1)
        except BlockingIOError:
            self._unsent, self._inbox = memoryview(data), Inbox(token)
            return
        if said:
            raise Forged("an answer before the request")
        raise OSError("the guest is gone")

    def move(self) -> Answer | None:
        """Send and receive what can be without waiting. OSError where the guest is gone, Forged where it lies."""
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
            raise OSError("the guest is gone")
        return self._inbox.feed(part)

    def close(self) -> None:
        self._control.close()
