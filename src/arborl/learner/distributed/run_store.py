"""The key-value store through which ranks find each other; only holders of the run's secret can use it.

torch's TCPStore listens on all interfaces and serves every client. This store listens on a Unix socket in a folder of
mode 0700 if all ranks are on one host, otherwise on one address. Client and server prove to each other that they hold
the secret before any request is read. Requests and answers are JSON; nothing that arrives is unpickled.
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

UNIX = "unix:"  # prefix of the address of a Unix socket
MAX_SOCKET_PATH = 100  # bytes of a Unix socket's path; Linux allows 107
HANDSHAKE_SECONDS = 10.0  # seconds in which a client must prove that it holds the secret
CONNECT_SECONDS = 30.0  # seconds for which a rank tries to connect while other clients keep the server busy
MAX_PENDING = 256  # clients in the handshake at once; further ones are disconnected and try again
CLOSE_GRACE_SECONDS = 2.0  # seconds that clients have to disconnect before the server closes their connections
UNREACHABLE_MS = 60_000  # milliseconds after which unacknowledged data breaks the connection
NONCE_BYTES = 32
MAX_REQUEST_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class JoinInfo:
    address: str  # `unix:PATH` or `HOST:PORT`
    secret: str = field(repr=False)


def hmac_sha256(secret: str, *parts: str | bytes) -> bytes:
    """HMAC-SHA256 of the parts, each preceded by its length."""
    made = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        made.update(struct.pack("<Q", len(text)) + text)
    return made.digest()


REQUESTS = ("set", "get", "add", "compare_set", "check", "wait", "delete_key", "num_keys")
"""Operations of a store that a client may call."""


def perform(data: dist.Store, name: str, *args: Any) -> Any:
    """An operation on the data; `get` and `wait` take keys and a timeout in seconds."""
    if name not in ("get", "wait"):
        return getattr(data, name)(*args)
    keys, seconds = args
    try:
        data.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        raise TimeoutError(f"the store has no {', '.join(keys)} after {seconds:g} s") from error
    return data.get(keys[0]) if name == "get" else None


class StoreServer:
    """Serves a store at an address of this host, or without one at a Unix socket, for this user alone."""

    def __init__(self, host: str = "", secret: str = ""):
        self.data = dist.HashStore()
        self.connections: set[Connection] = set()
        self.lock, self.pending = threading.Lock(), threading.Semaphore(MAX_PENDING)
        self.closed = False
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket = socket.create_server((host, 0), family=family, backlog=512)
            address = f"{host}:{self.socket.getsockname()[1]}"
        else:
            path = os.path.join(private_folder(), "store")
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(path)
            self.socket.listen(512)
            address = UNIX + path
        self.info = JoinInfo(address, secret or secrets.token_hex(32))
        threading.Thread(target=self._accept, name="arborl-store", daemon=True).start()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                if not self.closed:
                    time.sleep(0.05)  # no file descriptor is free
                continue
            if not self.pending.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="arborl-store", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with Connection(accepted.detach()) as connection, suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            try:
                set_read_timeout(connection, HANDSHAKE_SECONDS)
                verified = verify_client(connection, self.info.secret)
                set_read_timeout(connection, 0)
            finally:
                self.pending.release()
            if not verified:
                return
            with self.lock:
                if self.closed:
                    return
                self.connections.add(connection)
            try:
                while True:
                    connection.send_bytes(self._answer(connection.recv_bytes(MAX_REQUEST_BYTES)))
            finally:
                with self.lock:
                    self.connections.discard(connection)

    def _answer(self, request: bytes) -> bytes:
        name, args = json.loads(request)
        if name not in REQUESTS:
            raise ValueError(name)
        try:
            return encode({"answer": perform(self.data, name, *map(decode_value, args))})
        except TimeoutError as error:
            return encode({"timeout": str(error)})

    def close(self) -> None:
        """Close the store after the last client has disconnected, at most after `CLOSE_GRACE_SECONDS`."""
        if self.closed:
            return
        until = time.monotonic() + CLOSE_GRACE_SECONDS
        while self.connections and time.monotonic() < until:
            time.sleep(0.02)
        self.closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the other thread
        self.socket.close()
        with self.lock:
            for connection in self.connections:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        remove_folder(self.info.address)


class RunStore(dist.Store):
    """The store as a `torch.distributed.Store`. The serving process uses the data directly; elsewhere each thread has
    its own connection, so that a waiting thread does not block others."""

    def __init__(self, info: JoinInfo, server: StoreServer | None = None, seconds: float = 300.0):
        super().__init__()
        self.info, self.server, self.seconds = info, server, seconds
        self.thread_local = threading.local()

    @property
    def connection(self) -> Connection:
        if not hasattr(self.thread_local, "connection"):
            self.thread_local.connection = connect_with_retry(self.info)
        return self.thread_local.connection  # type: ignore[no-any-return]

    def _request(self, name: str, *args: Any) -> Any:
        if self.server is not None:
            return perform(self.server.data, name, *args)
        try:
            connection = self.connection
            connection.send_bytes(encode([name, args]))
            reply = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise ConnectionError(f"the ranks' store at {self.info.address} is unreachable ({error!r})") from error
        if "timeout" in reply:
            raise TimeoutError(reply["timeout"])
        return decode_value(reply["answer"])

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._request("get", [key], self.seconds)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._request("add", key, amount)  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (one.encode() if isinstance(one, str) else bytes(one) for one in (expected, desired))
        return self._request("compare_set", key, old, new)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._request("check", list(keys))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._request("wait", list(keys), self.seconds if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._request("delete_key", key)  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self._request("num_keys")  # type: ignore[no-any-return]

    def clone(self) -> RunStore:
        return self

    @property
    def local_address(self) -> str:
        if self.info.address.startswith(UNIX):
            return "127.0.0.1"
        if self.server is not None:
            return self.info.address.rpartition(":")[0]
        with socket.socket(fileno=os.dup(self.connection.fileno())) as connection:
            return str(connection.getsockname()[0])


def verify_client(connection: Connection, secret: str) -> bool:
    """The server's side of the handshake: whether the client holds the secret. The server then proves that it holds it
    too."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(ours)
    answer = connection.recv_bytes(2 * NONCE_BYTES)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if len(theirs) != NONCE_BYTES or not hmac.compare_digest(proof, hmac_sha256(secret, "client", ours, theirs)):
        return False
    connection.send_bytes(hmac_sha256(secret, "server", ours, theirs))
    return True


def connect(info: JoinInfo) -> Connection:
    if info.address.startswith(UNIX):
        made = socket.socket(socket.AF_UNIX)
        made.connect(info.address.removeprefix(UNIX))
    else:
        host, _, port = info.address.rpartition(":")
        made = socket.create_connection((host, int(port)), UNREACHABLE_MS / 1000)
        made.settimeout(None)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a host that has become unreachable
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE_MS)
    connection = Connection(made.detach())
    set_read_timeout(connection, CONNECT_SECONDS)
    theirs, ours = connection.recv_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(ours + hmac_sha256(info.secret, "client", theirs, ours))
    proof = connection.recv_bytes(NONCE_BYTES)
    if not hmac.compare_digest(proof, hmac_sha256(info.secret, "server", theirs, ours)):
        raise ConnectionError(f"the server at {info.address} does not hold the secret of this run")
    set_read_timeout(connection, 0)
    return connection


def connect_with_retry(info: JoinInfo) -> Connection:
    """As `connect`, repeated for `CONNECT_SECONDS` while the server has too many clients."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return connect(info)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def set_read_timeout(connection: Connection, seconds: float) -> None:
    """Reads that take longer fail; 0 for no timeout."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), 0))


def encode(what: Any) -> bytes:
    return json.dumps(what, default=lambda value: {"bytes": base64.b64encode(value).decode()}).encode()


def decode_value(what: Any) -> Any:
    return base64.b64decode(what["bytes"]) if isinstance(what, dict) else what


def private_folder() -> str:
    """A new folder of mode 0700 whose path is short enough for a socket."""
    made = tempfile.mkdtemp(prefix="arborl-ranks-")
    if len(os.fsencode(made)) > MAX_SOCKET_PATH - len("/store"):
        os.rmdir(made)
        made = tempfile.mkdtemp(prefix="arborl-ranks-", dir="/tmp")
    return made


def remove_folder(address: str) -> None:
    if address.startswith(UNIX):
        shutil.rmtree(os.path.dirname(address.removeprefix(UNIX)), ignore_errors=True)
