"""The key-value store through which ranks find each other, open to holders of the run's secret alone.

torch's own TCPStore listens on all interfaces and serves every client. This store listens on a Unix socket in a folder
of mode 0700 where all ranks are on one host, or on one given address. Client and server prove to each other that they
hold the secret before any request is read. Requests and answers are JSON; nothing that arrives is unpickled.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

UNIX = "unix:"
"""Begins the address of a Unix socket."""
LONGEST_PATH = 100
"""Bytes of a Unix socket's path; Linux takes 107."""
HANDSHAKE = 10.0
"""Seconds that a client has to prove that it holds the secret."""
CONNECT_SECONDS = 30.0
"""How long a rank tries to connect while other connections keep the server busy."""
PENDING = 256
"""Clients that may be about to prove it; further ones are turned away, and ranks try again."""
GRACE = 2.0
"""Seconds that clients have to leave before the server closes their connections."""
UNREACHABLE_MS = 60_000
"""Milliseconds after which data that a host does not acknowledge breaks the connection."""
NONCE = 32
MOST = 2**26
"""Bytes of a request."""


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """What a rank needs to join the others."""

    address: str
    """`unix:PATH` or `HOST:PORT`."""
    secret: str = field(repr=False)


def seal(secret: str, *parts: str | bytes) -> bytes:
    """HMAC-SHA256 of the parts, each with its length."""
    made = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        made.update(struct.pack("<Q", len(text)) + text)
    return made.digest()


class StoreData:
    """The entries, for threads."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.entries[key] = value
            self.changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes:
        self.wait([key], seconds)
        return self.entries[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.entries.get(key, b"0")) + amount
            self.entries[key] = str(total).encode()
            self.changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self.changed:
            if self.entries.get(key, b"") == expected:
                self.entries[key] = desired
                self.changed.notify_all()
            return self.entries.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            return all(key in self.entries for key in keys)

    def wait(self, keys: list[str], seconds: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.entries for key in keys), seconds):
                missing = [key for key in keys if key not in self.entries]
                raise TimeoutError(f"after {seconds:g} s the store has no {', '.join(missing)}")

    def delete_key(self, key: str) -> bool:
        with self.changed:
            return self.entries.pop(key, None) is not None

    def num_keys(self) -> int:
        with self.changed:
            return len(self.entries)


REQUESTS = ("set", "get", "add", "compare_set", "check", "wait", "delete_key", "num_keys")
"""Methods of `StoreData` that a client may call."""


class StoreServer:
    """Serves a store.

    Args:
        host: an address of this machine; without one a Unix socket, for this user alone.
        secret: of the run; without one it is made here.
    """

    def __init__(self, host: str = "", secret: str = ""):
        self.data, self.folder = StoreData(), ""
        self.lines: set[Connection] = set()
        self.lock, self.pending = threading.Lock(), threading.Semaphore(PENDING)
        self.closed = False
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket = socket.create_server((host, 0), family=family, backlog=512)
            address = f"{host}:{self.socket.getsockname()[1]}"
        else:
            self.folder = private_folder()
            path = os.path.join(self.folder, "store")
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(path)
            self.socket.listen(512)
            address = UNIX + path
        self.info = JoinInfo(address, secret or secrets.token_hex(32))
        threading.Thread(target=self._accept, name="arborl-store", daemon=True).start()

    def _accept(self) -> None:
        while not self.closed:
            try:
                line, _ = self.socket.accept()
            except OSError:
                if not self.closed:
                    time.sleep(0.05)  # no descriptor is free
                continue
            if not self.pending.acquire(blocking=False):
                line.close()
                continue
            threading.Thread(target=self._serve, args=(line,), name="arborl-store", daemon=True).start()

    def _admit(self, line: Connection) -> bool:
        """Whether the client holds the secret."""
        try:
            admitted = admits(line, self.info.secret)
            unlimited(line)
            return admitted
        finally:
            self.pending.release()

    def _serve(self, accepted: socket.socket) -> None:
        limit_waits(accepted, HANDSHAKE)
        with Connection(accepted.detach()) as line, suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            if not self._admit(line):
                return
            with self.lock:
                if self.closed:
                    return
                self.lines.add(line)
            try:
                while True:
                    line.send_bytes(self._answer(line.recv_bytes(MOST)))
            finally:
                with self.lock:
                    self.lines.discard(line)

    def _answer(self, packed: bytes) -> bytes:
        name, given = json.loads(packed)
        if name not in REQUESTS:
            raise ValueError(name)
        try:
            return pack({"answer": getattr(self.data, name)(*map(unpacked, given))})
        except TimeoutError as error:
            return pack({"late": str(error)})

    def close(self) -> None:
        """Close it, a moment after the last client or after `GRACE`."""
        if self.closed:
            return
        until = time.monotonic() + GRACE
        while self.lines and time.monotonic() < until:
            time.sleep(0.02)
        self.closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the other thread
        self.socket.close()
        with self.lock:
            for line in self.lines:
                with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        remove_folder(self.info.address)


class RunStore(dist.Store):
    """The store as torch wants it. In the process that serves it, it is used directly; elsewhere each thread has a
    connection of its own, so that one that waits does not hold up others.

    Args:
        info: where it is.
        server: where it is in this process.
        seconds: that `get` and `wait` wait.
    """

    def __init__(self, info: JoinInfo, server: StoreServer | None = None, seconds: float = 300.0):
        super().__init__()
        self.info, self.server, self.seconds = info, server, seconds
        self.mine = threading.local()

    @property
    def line(self) -> Connection:
        """This thread's connection."""
        if not hasattr(self.mine, "line"):
            self.mine.line = connect_patiently(self.info)
        return self.mine.line  # type: ignore[no-any-return]

    def _ask(self, name: str, *given: Any) -> Any:
        if self.server is not None:
            return getattr(self.server.data, name)(*given)
        try:
            line = self.line
            line.send_bytes(pack([name, given]))
            said = json.loads(line.recv_bytes())
        except (EOFError, OSError) as error:
            raise ConnectionError(f"the store of the ranks at {self.info.address} is gone ({error!r})") from error
        if "late" in said:
            raise TimeoutError(said["late"])
        return unpacked(said["answer"])

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", key, self.seconds)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (one.encode() if isinstance(one, str) else bytes(one) for one in (expected, desired))
        return self._ask("compare_set", key, old, new)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", list(keys))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._ask("wait", list(keys), self.seconds if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self._ask("num_keys")  # type: ignore[no-any-return]

    def clone(self) -> RunStore:
        return self

    @property
    def local_address(self) -> str:
        """The address of this host on the way to the store; that of the loopback interface where all is on one host."""
        if self.info.address.startswith(UNIX):
            return "127.0.0.1"
        if self.server is not None:
            return self.info.address.rpartition(":")[0]
        with socket.socket(fileno=os.dup(self.line.fileno())) as line:
            return str(line.getsockname()[0])


# ------------------------------------------------------------------------------------------------ proof of the secret


def admits(line: Connection, secret: str) -> bool:
    """The server's side: whether the client holds the secret. It is then shown that the server does too."""
    ours = secrets.token_bytes(NONCE)
    line.send_bytes(ours)
    said = line.recv_bytes(2 * NONCE)
    theirs, proof = said[:NONCE], said[NONCE:]
    if len(theirs) != NONCE or not hmac.compare_digest(proof, seal(secret, "client", ours, theirs)):
        return False
    line.send_bytes(seal(secret, "server", ours, theirs))
    return True


def connect(info: JoinInfo) -> Connection:
    """A connection to the server, once both have proved that they hold the secret."""
    if info.address.startswith(UNIX):
        made = socket.socket(socket.AF_UNIX)
        made.connect(info.address.removeprefix(UNIX))
    else:
        host, _, port = info.address.rpartition(":")
        made = socket.create_connection((host, int(port)), UNREACHABLE_MS / 1000)
        made.settimeout(None)
        watch_peer(made)
    limit_waits(made, CONNECT_SECONDS)
    line = Connection(made.detach())
    theirs, ours = line.recv_bytes(NONCE), secrets.token_bytes(NONCE)
    line.send_bytes(ours + seal(info.secret, "client", theirs, ours))
    proof = line.recv_bytes(NONCE)
    if not hmac.compare_digest(proof, seal(info.secret, "server", theirs, ours)):
        raise ConnectionError(f"what listens at {info.address} does not hold the secret of this run")
    unlimited(line)
    return line


def connect_patiently(info: JoinInfo) -> Connection:
    """As `connect`, again for a while where the server has too many clients."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return connect(info)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def limit_waits(line: socket.socket, seconds: float) -> None:
    """A read that takes longer fails; 0 for never."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), 0))


def unlimited(line: Connection) -> None:
    with socket.socket(fileno=os.dup(line.fileno())) as same:
        limit_waits(same, 0)


def watch_peer(line: socket.socket) -> None:
    """A host that is cut off breaks the connection."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE_MS)


# ------------------------------------------------------------------------------------------------ small parts


def pack(what: Any) -> bytes:
    return json.dumps(what, default=lambda value: {"bytes": base64.b64encode(value).decode()}).encode()


def unpacked(what: Any) -> Any:
    return base64.b64decode(what["bytes"]) if isinstance(what, dict) else what


def private_folder() -> str:
    """A new folder of mode 0700, with a path short enough for a socket in it."""
    made = tempfile.mkdtemp(prefix="arborl-ranks-")
    if len(os.fsencode(made)) > LONGEST_PATH - len("/store"):
        os.rmdir(made)
        made = tempfile.mkdtemp(prefix="arborl-ranks-", dir="/tmp")
    return made


def remove_folder(address: str) -> None:
    """Remove the folder of a Unix socket."""
    if address.startswith(UNIX):
        shutil.rmtree(os.path.dirname(address.removeprefix(UNIX)), ignore_errors=True)
