"""API keys, body size and connection limits in front of a server."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from arborl.tools.remote.tool_protocol import replace_surrogates

if TYPE_CHECKING:
    import uvicorn

REQUEST_SECONDS = 10.0  # time from connecting, or from the last response, to a complete request
MAX_PENDING = 1024


class RequestFilter:
    """ASGI middleware: rejects requests by their headers, then reads the body within its limit.

    Args:
        app: the application.
        key: API key of all requests except those to `public_paths`. Without a key, the `Host` must be an address or
            `localhost`: another name may be DNS rebinding from a web page.
        max_body: maximum bytes of a body.
    """

    public_paths: tuple[str, ...] = ("/health",)

    def __init__(self, app: Any, key: bytes | None, max_body: int):
        self.app, self.key, self.max_body = app, key, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":  # web sockets are not used
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if rejection := self._rejection(scope["path"], headers):
            await rejection(scope, receive, send)
            return
        await self.forward(scope, receive, send)

    async def forward(self, scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client disconnected
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body:  # chunked, without Content-Length
                await self._too_large()(scope, receive, send)
                return
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_buffered() -> Any:
            return pending.pop() if pending else await receive()

        await self.app(scope, receive_buffered, send)

    def _rejection(self, path: str, headers: Mapping[bytes, bytes]) -> JSONResponse | None:
        if self.key is None and not is_local_request(headers):
            name = (headers.get(b"origin") or headers.get(b"host", b"")).decode("latin-1")
            return self.error(421, f"a server without API keys accepts only addresses and localhost, not {name!r}")
        if self.key is not None and path not in self.public_paths and not self.is_key(request_api_key(headers)):
            return self.error(401, "wrong or missing API key", {"WWW-Authenticate": "Bearer"})
        return self._length_error(headers)

    def _length_error(self, headers: Mapping[bytes, bytes]) -> JSONResponse | None:
        length = headers.get(b"content-length", b"0")
        is_allowed = length.isdigit() and len(length) <= 18 and int(length) <= self.max_body
        return None if is_allowed else self._too_large()

    def _too_large(self) -> JSONResponse:
        return self.error(413, f"the body is larger than {self.max_body:,} bytes")

    def is_key(self, key: bytes) -> bool:
        return hmac.compare_digest(key, self.key or b"")

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return error_response(status, detail, headers)


def request_api_key(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")


def is_local_request(headers: Mapping[bytes, bytes]) -> bool:
    """Whether `Host` and `Origin` show that the request is not from a foreign web page."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
        return False  # a foreign web page
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def error_response(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": replace_surrogates(detail)}, status, headers)


class PendingConnections:
    """Connections that wait for the client, to complete a request or to read a response: bounded number and time. They
    are counted before authentication. Above the maximum the oldest is closed."""

    def __init__(self, seconds: float = REQUEST_SECONDS, maximum: int | None = None):
        self.seconds = seconds
        self.maximum = maximum or min(MAX_PENDING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.closed = 0
        self._timers: dict[Any, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def begin(self, connection: Any) -> None:
        if connection not in self._timers:
            timer = asyncio.get_running_loop().call_later(self.seconds, self._close, connection)
            self._timers[connection] = timer
            if len(self._timers) > self.maximum:
                self._close(next(iter(self._timers)))

    def end(self, connection: Any) -> None:
        if timer := self._timers.pop(connection, None):
            timer.cancel()

    def _close(self, connection: Any) -> None:
        self.end(connection)
        self.closed += 1
        connection.transport.abort()


def uvicorn_config(app: Any, host: str, port: int, seconds: int, **more: Any) -> uvicorn.Config:
    """Configuration of Arbor's servers; `app.state.half_open` holds the `PendingConnections`."""
    import uvicorn

    return uvicorn.Config(
        app, host, port, http=limited_http_protocol(app.state.half_open), ws="none", log_level="error",
        timeout_graceful_shutdown=seconds, access_log=False, **more,
    )  # fmt: skip


def limited_http_protocol(pending: PendingConnections) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol with a time limit for incomplete requests."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedHttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        unread = False  # the client does not read the response

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            pending.begin(self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._update()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.unread = True
            self._update()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.unread = False
            self._update()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            pending.end(self)

        def _update(self) -> None:
            cycle = self.cycle
            responding = cycle is not None and not cycle.more_body and not cycle.response_complete
            if responding and not self.unread and not self.transport.is_closing():
                pending.end(self)
            else:
                pending.begin(self)

    return LimitedHttpProtocol
