"""HTTP middleware of `arborl serve`: API keys, rate and size limits, concurrency, request log, error responses."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from arborl.errors import ArborError, ConfigError
from arborl.serve.model_backend import RequestError, ServiceUnavailable
from arborl.spans import span
from arborl.tools.core.rate_limit import RateLimit, RateLimitTimeout
from arborl.tools.remote.http_middleware import RequestFilter, request_api_key
from arborl.tools.remote.tool_protocol import encode_api_key, replace_surrogates

log = logging.getLogger(__name__)

NO_KEY = "anyone"
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
RATE_CHECK_SECONDS = 1.0
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_response(
    status: int, message: str, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(status, message, code, param), status, headers)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": replace_surrogates(message)[:2000], "type": kind, "param": param, "code": code}}


def error_of(error: RequestError | ServiceUnavailable) -> tuple[int, dict[str, Any]]:
    param = error.param if isinstance(error, RequestError) else None
    return error.status, error_body(error.status, str(error), error.code, param)


def add_error_handlers(app: FastAPI) -> None:

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError | ServiceUnavailable)
        status, body = error_of(error)
        retry = isinstance(error, ServiceUnavailable) and status in (429, 503)
        return JSONResponse(body, status, retry_after(error) if retry else None)  # type: ignore[arg-type]

    async def validation_error(request: Request, error: Exception) -> Response:
        """States what is wrong without repeating the input, which may have no JSON form."""
        errors = error.errors() if isinstance(error, RequestValidationError) else []
        pairs = [(".".join(str(part) for part in one.get("loc", ())[1:]), one.get("msg", "")) for one in errors]
        message = "; ".join(f"{where}: {what}" if where else what for where, what in pairs)
        return error_response(400, message or "invalid request", param=pairs[0][0] or None if pairs else None)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail), headers=dict(error.headers or {}))

    app.add_exception_handler(RequestError, api_error)
    app.add_exception_handler(ServiceUnavailable, api_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def retry_after(error: ServiceUnavailable) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(error.retry_seconds)))}


class ApiKeys:
    """API keys, stored as hashes. All of them are compared on every lookup, so that its time reveals nothing."""

    def __init__(self, keys: Iterable[str] = ()):
        self._digests = {hashlib.sha256(encode_api_key(key)).digest() for key in keys}

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_key_name(digest) for digest in sorted(self._digests)) or (NO_KEY,)

    def find(self, key: bytes) -> str | None:
        digest, name = hashlib.sha256(key).digest(), None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                name = _key_name(digest)
        return name


def _key_name(digest: bytes) -> str:
    return f"key-{digest.hex()[:8]}"


def read_api_keys(flags: Iterable[str], file: Path | None, environment: str | None) -> ApiKeys:
    """Keys of the command line, of a file with one key per line, and of a comma-separated environment variable."""
    keys = [*flags, *(key.strip() for key in (environment or "").split(",") if key.strip())]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read ({error}).") from error
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"--api-key-file {file}: contains no key. Write one per line.")
        keys += in_file
    return ApiKeys(keys)


class KeyRateLimits:
    """Requests per minute of each key, counted across all servers of this machine with the same key and limits. Servers
    with other limits count separately, so that files of an earlier server cannot block a new one."""

    def __init__(self, names: Iterable[str], per_minute: float = 0.0, burst: int = 1):
        self.per_minute = per_minute
        self._limits: dict[str, RateLimit] = {}
        self._failure: str | None = None
        self._checked_at = -math.inf
        try:
            if per_minute:
                suffix = f"{per_minute:g} {burst}"
                self._limits = {name: RateLimit(per_minute, burst, f"serve {name} {suffix}") for name in names}
            if (failure := self.failure()) is not None:
                raise ConfigError(failure)
        except (ArborError, OSError) as error:
            raise ConfigError(f"--per-minute {per_minute:g}: requests cannot be counted: {error}") from error

    def failure(self) -> str | None:
        """Why requests cannot be counted; None if they can. Checked at most once per second."""
        if time.monotonic() - self._checked_at > RATE_CHECK_SECONDS:
            self._checked_at, self._failure = time.monotonic(), None
            try:
                for limit in self._limits.values():
                    limit.check()
            except (ArborError, OSError) as error:
                self._failure = str(error)
        return self._failure

    async def count(self, name: str) -> None:
        if not self.per_minute:
            return
        try:
            await self._limits[name].acquire(timeout=0)
        except RateLimitTimeout as error:
            message = f"more than {self.per_minute:g} requests per minute with this key"
            seconds = math.ceil(60.0 / self.per_minute)
            raise ServiceUnavailable(message, seconds, 429, "rate_limit_exceeded") from error
        except (ArborError, OSError) as error:
            self._checked_at, self._failure = time.monotonic(), str(error)
            log.warning("requests of %s cannot be counted: %s", name, error)
            raise ServiceUnavailable("requests cannot be counted", code="rate_limit_failed") from error

    def remove_files(self) -> None:
        for limit in self._limits.values():
            with suppress(OSError):
                limit.remove()


class RequestLoad:
    """Number of running requests, its limit, and whether the server is draining."""

    def __init__(self, max_requests: int = 1024):
        self.max_requests, self.num_running, self.is_draining = max_requests, 0, False
        self._idle = asyncio.Event()

    def __enter__(self) -> None:
        if self.is_draining:
            raise ServiceUnavailable("the server is shutting down", 2.0)
        if self.num_running >= self.max_requests:
            raise ServiceUnavailable(f"{self.num_running} requests are running", 1.0, 429, "overloaded")
        self.num_running += 1

    def __exit__(self, *error: object) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; whether all of them ended in time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                while self.num_running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True


class ApiMiddleware(RequestFilter):
    """Rejects requests by their headers alone; counts, limits and logs the others."""

    public_paths = ("/health", "/live", "/ready")

    def __init__(
        self,
        app: Any,
        keys: ApiKeys,
        max_body: int,
        load: RequestLoad,
        rates: KeyRateLimits,
        on_request: Callable[[str, int, float], None] = lambda path, status, seconds: None,
    ):
        super().__init__(app, b"" if keys else None, max_body)
        self.keys, self.load, self.rates, self.on_request = keys, load, rates, on_request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        client_id = headers.get(b"x-request-id", b"")
        request_id = client_id.decode("ascii") if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        key_name = (self.keys.find(request_api_key(headers)) if self.keys else None) or NO_KEY
        state = scope.setdefault("state", {})
        state["request_id"], state["key"] = request_id, key_name
        start, status = time.perf_counter(), 499  # until a response starts

        async def send_with_headers(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if self.load.is_draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        with span("arborl.request", http__route=scope["path"], arborl__request=request_id) as request_span:
            try:
                await self._handle(scope, receive, send_with_headers, headers, key_name)
            finally:
                seconds = time.perf_counter() - start
                route = getattr(scope.get("route"), "path", "other")
                request_span.note(http__response__status_code=status)
                self.on_request(route, status, seconds)
                self._log(scope, route, status, seconds)

    async def _handle(self, scope: Any, receive: Any, send: Any, headers: Mapping[bytes, bytes], key_name: str) -> None:
        """Apply the limits. Only POST requests are counted as load."""
        if (refusal := self._rejection(scope["path"], headers)) is not None:
            await refusal(scope, receive, send)
            return
        if scope["method"] != "POST" or scope["path"] in self.public_paths:
            await self.forward(scope, receive, send)
            return
        try:
            with self.load:
                await self.rates.count(key_name)
                await self.forward(scope, receive, send)
        except ServiceUnavailable as error:
            response = error_response(error.status, str(error), error.code, headers=retry_after(error))
            await response(scope, receive, send)

    def is_key(self, key: bytes) -> bool:
        return self.keys.find(key) is not None

    def error(self, status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return error_response(status, detail, "invalid_api_key" if status == 401 else None, headers=headers)

    def _log(self, scope: Any, route: str, status: int, seconds: float) -> None:
        """One line of JSON per request, without contents and without the key."""
        if not log.isEnabledFor(logging.INFO):
            return
        state = scope["state"]
        usage = {name: value for name, value in (state.get("usage") or {}).items() if isinstance(value, int)}
        row = {
            "time": round(time.time(), 3), "request": state["request_id"], "key": state["key"],
            "method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4), **usage,
        }  # fmt: skip
        log.info("%s", json.dumps(row))
