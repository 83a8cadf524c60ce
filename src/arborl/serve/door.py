"""What a request meets first: who asks, is it small, is there room; and what is written down of it afterwards."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from arborl.serve.keys import NO_KEY, Keys, Rates
from arborl.serve.problems import problem
from arborl.serve.source import Unavailable
from arborl.spans import span
from arborl.tools.remote.http_middleware import RequestFilter, is_local_request, request_api_key

log = logging.getLogger(__name__)

OPEN = ("/health", "/live", "/ready")
"""Paths that need no key."""
WORDS = re.compile(rb"[\w.:-]{1,128}")
"""Ids that a client may give its request."""


class Load:
    """How many requests are being answered, and whether more are taken.

    Args:
        most: at once; one more is told to come back.
    """

    def __init__(self, most: int = 1024):
        self.most, self.running, self.draining = most, 0, False
        self._idle = asyncio.Event()

    def enter(self) -> None:
        if self.draining:
            raise Unavailable("the server is about to stop", 2.0)
        if self.running >= self.most:
            raise Unavailable(f"{self.running} requests are being answered", 1.0, 429, "overloaded")
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    async def drained(self, seconds: float) -> bool:
        """Take no more, and wait for those there are; whether all were answered."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self.running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Door(RequestFilter):
    """Refuses by the head alone what may not be read; counts, limits and writes down the rest.

    Args:
        app: what comes after.
        keys: every request but those to `OPEN` must bring one. Without any, a request must come for an address or
            `localhost`.
        max_body: bytes.
        load, rates: bounds on what is answered at once, and how often.
        seen: told the path, the status and the seconds of every request.
    """

    def __init__(
        self,
        app: Any,
        keys: Keys,
        max_body: int,
        load: Load,
        rates: Rates,
        seen: Callable[[str, int, float], None] = lambda path, status, seconds: None,
    ):
        super().__init__(app, None, max_body)
        self.keys, self.load, self.rates, self.seen = keys, load, rates, seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        name = given.decode("ascii") if WORDS.fullmatch(given) else uuid.uuid4().hex
        who = (self.keys.find(request_api_key(headers)) if self.keys else None) or NO_KEY
        state = scope.setdefault("state", {})
        state["request_id"], state["key"] = name, who
        began, status = time.perf_counter(), 499  # as long as nothing was said

        async def told(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                if self.load.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        with span("arborl.request", http__route=scope["path"], arborl__request=name) as own:
            try:
                await self._counted(scope, receive, told, headers, who)
            finally:
                seconds = time.perf_counter() - began
                route = getattr(scope.get("route"), "path", "other")
                own.note(http__response__status_code=status)
                self.seen(route, status, seconds)
                self._write(scope, route, name, who, status, seconds)

    async def _counted(self, scope: Any, receive: Any, send: Any, headers: Mapping[bytes, bytes], who: str) -> None:
        """Requests that make work are counted from here to their last byte."""
        if (refusal := self._refusal(scope["path"], headers)) is not None:
            await refusal(scope, receive, send)
            return
        if scope["method"] != "POST" or scope["path"] in OPEN:
            await self.hand_on(scope, receive, send)
            return
        try:
            self.load.enter()
        except Unavailable as full:
            await _later(full)(scope, receive, send)
            return
        try:
            await self.rates.take(who)
            await self.hand_on(scope, receive, send)
        except Unavailable as often:
            await _later(often)(scope, receive, send)
        finally:
            self.load.leave()

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> Any:
        if not self.keys and not is_local_request(headers):
            what = headers.get(b"origin") or headers.get(b"host", b"")
            told = (
                f"without an API key this server answers to addresses and localhost, not to {what.decode('latin-1')!r}"
            )
            return problem(421, told)
        if self.keys and path not in OPEN and self.keys.find(request_api_key(headers)) is None:
            return problem(401, "wrong or missing API key", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> Any:
        return problem(413, f"a body may have {self.max_body:,} bytes")

    def _write(self, scope: Any, route: str, name: str, who: str, status: int, seconds: float) -> None:
        """One line of JSON a request. What was asked and answered is not in it, and neither is a key."""
        if not log.isEnabledFor(logging.INFO):
            return
        usage = scope["state"].get("usage") or {}
        counts = {key: value for key, value in usage.items() if isinstance(value, int)}
        row = {
            "time": round(time.time(), 3), "request": name, "key": who, "method": scope["method"], "route": route,
            "status": status, "seconds": round(seconds, 4), **counts,
        }  # fmt: skip
        log.info("%s", json.dumps(row))


def _later(error: Unavailable) -> Any:
    return problem(error.status, str(error), error.code, headers={"Retry-After": str(max(1, math.ceil(error.seconds)))})
