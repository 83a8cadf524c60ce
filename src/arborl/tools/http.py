"""HTTP/1.1 to one server, over connections that are kept: a request costs a tenth of what a general client makes of it.

Enough for JSON to a tool server, and no more: no redirects, no proxies, no cookies. A rollout makes thousands of small
calls from the event loop that also samples, so their price is paid by everything else.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from arborl.errors import ArborError, ConfigError

MAX_REPLY = 64 * 2**20
"""Bytes: a server that says more is no tool server."""


class Broken(ArborError):
    """No answer came: the server was not there, or the connection ended, or what came was not HTTP."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Connections:
    """Those of one event loop to one server; as many as there are requests at a time.

    Example:
        reply = await Connections("http://127.0.0.1:30003").request("POST", "/call", b"{}")

    Args:
        url: scheme, host and port, perhaps a path that all requests begin with.
        headers: sent with each.
        connect_seconds: patience with a new connection.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, connect_seconds: float = 5.0):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self.host, self.secure = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.secure else 80)
        self.base = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.connect_seconds = connect_seconds
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._tls = ssl.create_default_context() if self.secure else None

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """One request. It may reach the server twice, so it must be one that can: a server may close a kept connection
        just as it is used, and then a new one is tried. Bound the wait from outside (`asyncio.timeout`)."""
        head = f"{method} {self.base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        while self._idle:
            reader, writer = self._idle.pop()
            if reader.at_eof() or writer.is_closing():
                writer.close()
                continue
            try:
                return await self._exchange(reader, writer, data)
            except Broken:
                break
        try:
            async with asyncio.timeout(self.connect_seconds):
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise Broken(f"cannot connect to {self.host}:{self.port}: {error or type(error).__name__}") from error
        return await self._exchange(reader, writer, data)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> Reply:
        kept = False
        try:
            writer.write(data)
            await writer.drain()
            reply, kept = await _read(reader)
            return reply
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            if kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def close(self) -> None:
        """Close those that are kept."""
        while self._idle:
            self._idle.pop()[1].close()


async def _read(reader: asyncio.StreamReader) -> tuple[Reply, bool]:
    """One reply, and whether the connection can be used again."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status = lines[0].split(" ", 2)[:2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    kept = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if status in ("204", "304"):
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(_bounded(int(headers["content-length"])))
    else:
        body, kept = await _rest(reader), False
    return Reply(int(status), headers, body), kept


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Until the connection ends."""
    body = bytearray()
    while piece := await reader.read(2**16):
        body += piece
        _bounded(len(body))
    return bytes(body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts, total = [], 0
    while size := int((await reader.readline()).split(b";")[0], 16):
        total = _bounded(total + size)
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():  # trailers
        pass
    return b"".join(parts)


def _bounded(size: int) -> int:
    if size > MAX_REPLY:
        raise ValueError(f"a reply of {size:,} bytes; {MAX_REPLY:,} are read")
    return size
