"""What a request meets first: is it whole in time, small enough, meant for this machine, and from one of ours?"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from arborl.tools.protocol import encodable

if TYPE_CHECKING:
    import uvicorn

OPEN = ("/health",)
"""Paths that need no key."""
REQUEST_SECONDS = 10.0
"""From connecting, or from the last answer, until a request is there whole."""
MOST_HALF_OPEN = 1024


class Gate:
    """Refuses by the head alone what may not be read, then reads the body and hands both on.

    Args:
        app: what comes after.
        key: every request but those to `OPEN` must bring it. Without one, a request must come for an address or
            `localhost`: a name may be anybody's, pointed at this machine so that a page in a browser can reach it.
        max_body: bytes.
    """

    def __init__(self, app: Any, key: bytes | None, max_body: int):
        self.app, self.key, self.max_body = app, key, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":  # no route of ours is a web socket
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if refusal := self._refusal(scope["path"], headers):
            await refusal(scope, receive, send)
            return
        await self.hand_on(scope, receive, send)

    async def hand_on(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body of a request that is not refused, and hand both on."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # it hung up
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body:  # sent in pieces, without saying how many
                await self._too_large()(scope, receive, send)
                return
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Any:
            return pending.pop() if pending else await receive()

        await self.app(scope, replayed, send)

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> JSONResponse | None:
        if self.key is None and not is_ours(headers):
            what = headers.get(b"origin") or headers.get(b"host", b"")
            return say(
                421,
                f"without an API key this server answers to addresses and localhost, not to {what.decode('latin-1')!r}",
            )
        if self.key is not None and path not in OPEN and not hmac.compare_digest(given_key(headers), self.key):
            return say(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        return say(413, f"a body may have {self.max_body:,} bytes")


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")


def is_ours(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the request was meant for this machine by whoever wrote it, as far as a browser lets one tell."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
        return False  # a page from elsewhere
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def say(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An answer that is no result."""
    return JSONResponse({"detail": encodable(detail)}, status, headers)


class HalfOpen:
    """Connections on which it is the client's turn, to send the rest of a request or to read: so many, for so long.

    They are counted before anybody knows who they are. An honest request is whole within milliseconds, so where there
    are too many the oldest goes.
    """

    def __init__(self, seconds: float = REQUEST_SECONDS, most: int | None = None):
        self.seconds = seconds
        self.most = most or min(MOST_HALF_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.closed = 0
        self._timers: dict[Any, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def begin(self, connection: Any) -> None:
        """The client's turn began, or goes on."""
        if connection not in self._timers:
            timer = asyncio.get_running_loop().call_later(self.seconds, self._close, connection)
            self._timers[connection] = timer
            if len(self._timers) > self.most:
                self._close(next(iter(self._timers)))

    def end(self, connection: Any) -> None:
        """A whole request is there, or nobody is."""
        if timer := self._timers.pop(connection, None):
            timer.cancel()

    def _close(self, connection: Any) -> None:
        self.end(connection)
        self.closed += 1
        connection.transport.abort()


def listening(app: Any, host: str, port: int, seconds: int, **more: Any) -> uvicorn.Config:
    """How our servers listen: what strangers send is no news, and whoever begins a request and does not end it is let
    go. `seconds` is what running requests have to end in; `app.state.half_open` is the application's."""
    import uvicorn

    return uvicorn.Config(
        app, host, port, http=protocol(app.state.half_open), ws="none", log_level="error",
        timeout_graceful_shutdown=seconds, access_log=False, **more,
    )  # fmt: skip


def protocol(half_open: HalfOpen) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP, which waits for ever for a request that was begun, with an end to its patience."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        unread = False
        """Whether the client leaves what we said in the pipe."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            half_open.begin(self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.unread = True
            self._look()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.unread = False
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            half_open.end(self)

        def _look(self) -> None:
            cycle = self.cycle
            ours = cycle is not None and not cycle.more_body and not cycle.response_complete
            if ours and not self.unread and not self.transport.is_closing():
                half_open.end(self)
            else:
                half_open.begin(self)

    return Connection
