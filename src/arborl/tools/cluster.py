"""A rate limit that machines share: grants come from a tool server."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import time
import weakref

import httpx

from arborl.errors import ConfigError
from arborl.tools.host_limit import LimitTimeout
from arborl.tools.protocol import bearer

ROUND = 20.0
"""Seconds of one request; who must wait longer asks again."""
QUIET = 120.0
"""Seconds without any answer after which who waits for a grant is told so."""
BOUNDS = httpx.Limits(max_connections=None)  # every waiting caller holds one


class ServerBook:
    """The book of one limit, kept by a tool server. While no server answers, nobody is granted anything."""

    def __init__(self, per_minute: float, burst: int, name: str, server: str | None, api_key: str | None):
        server = server or os.environ.get("ARBORL_TOOL_SERVER")
        if not server:
            raise ConfigError(
                f"RateLimit {name!r}: scope='cluster' needs a tool server: give server='http://HOST:PORT', "
                "or set ARBORL_TOOL_SERVER."
            )
        key = api_key if api_key is not None else os.environ.get("ARBORL_TOOL_API_KEY")
        self.name, self.url = name, f"{server.rstrip('/')}/limit"
        self._headers = {b"Content-Type": b"application/json", **bearer(key)}
        self._https: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        self._about = {"name": name, "per_minute": per_minute, "burst": burst}

    async def acquire(self, timeout: float | None) -> float:
        end, quiet = time.monotonic() + (math.inf if timeout is None else timeout), time.monotonic() + QUIET
        loop = asyncio.get_running_loop()
        if loop not in self._https:
            self._https[loop] = httpx.AsyncClient(headers=self._headers, timeout=ROUND + 10, limits=BOUNDS)
        while True:
            try:
                answer = await self._https[loop].post(self.url, content=self._body(end))
            except httpx.HTTPError as error:
                await asyncio.sleep(self._patience(min(end, quiet), str(error) or type(error).__name__))
                continue
            quiet = time.monotonic() + QUIET if answer.status_code in (200, 429) else quiet
            if self._granted(answer):
                return time.monotonic()
            if (wait := self._patience(min(end, quiet), answer.text, answer.status_code)) > 0:
                await asyncio.sleep(wait)

    def acquire_sync(self, timeout: float | None) -> float:
        end, quiet = time.monotonic() + (math.inf if timeout is None else timeout), time.monotonic() + QUIET
        while True:
            try:
                answer = self._http.post(self.url, content=self._body(end))
            except httpx.HTTPError as error:
                time.sleep(self._patience(min(end, quiet), str(error) or type(error).__name__))
                continue
            quiet = time.monotonic() + QUIET if answer.status_code in (200, 429) else quiet
            if self._granted(answer):
                return time.monotonic()
            if (wait := self._patience(min(end, quiet), answer.text, answer.status_code)) > 0:
                time.sleep(wait)

    def check(self) -> None:
        try:
            answer = self._http.post(self.url, content=self._body(time.monotonic()))  # may use up one call
        except httpx.HTTPError as error:
            raise ConfigError(
                f"RateLimit {self.name!r}: no tool server answers at {self.url} ({type(error).__name__}: {error}). "
                "Start one: arborl tools serve --tools calculator"
            ) from error
        self._granted(answer)

    def forget(self) -> bool:
        return False  # the server's

    @functools.cached_property
    def _http(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, timeout=ROUND + 10, limits=BOUNDS)

    def _body(self, end: float) -> bytes:
        left = min(max(end - time.monotonic(), 0.0), ROUND)
        return json.dumps({**self._about, "timeout": left}).encode()

    def _granted(self, answer: httpx.Response) -> bool:
        if answer.status_code in (401, 403, 404, 409, 422):
            raise ConfigError(f"RateLimit {self.name!r}: the tool server at {self.url} answered {answer.text[:300]}")
        try:
            said = answer.json() if answer.status_code == 200 else {}
        except ValueError:  # something else than a tool server answers there
            said = {}
        return isinstance(said, dict) and said.get("granted") is True

    def _patience(self, end: float, why: str, status: int = 0) -> float:
        """Seconds before the next try; LimitTimeout when there is none."""
        if time.monotonic() >= end:
            raise LimitTimeout(f"RateLimit {self.name!r}: no grant from {self.url} in time ({why[:200]})")
        wait = 0.02 if status == 200 else 0.5  # a server that waits for nothing must not be asked without end
        return min(wait, max(end - time.monotonic(), 0.0))
