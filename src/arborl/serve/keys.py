"""Who may ask: API keys, how they are given, and how often each may be used. A key is never written anywhere."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from arborl.errors import ArborError, ConfigError
from arborl.serve.source import Unavailable
from arborl.tools.core.rate_limit import RateLimit, RateLimitTimeout
from arborl.tools.remote.tool_protocol import encode_api_key

log = logging.getLogger(__name__)

NO_KEY = "anyone"
"""The name of requests to a server without keys."""
CHECK_SECONDS = 1.0


class Keys:
    """Some keys. What is compared are their hashes, all of them every time, so that the time taken says nothing.

    Example:
        keys = Keys(["sk-long-and-random"])
        keys.find(b"sk-long-and-random")      # 'key-3f9a0c12': what logs and metrics call it
    """

    def __init__(self, keys: Iterable[str] = ()):
        self._known = {hashlib.sha256(encode_api_key(key)).digest() for key in keys}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all keys; without any, the name of requests that need none."""
        return tuple(_name(digest) for digest in sorted(self._known)) or (NO_KEY,)

    def find(self, given: bytes) -> str | None:
        """What the key is called, if it is one."""
        digest, found = hashlib.sha256(given).digest(), None
        for known in self._known:
            if hmac.compare_digest(known, digest):
                found = _name(digest)
        return found


def _name(digest: bytes) -> str:
    return f"key-{digest.hex()[:8]}"


def read_keys(flags: Iterable[str], file: Path | None, environment: str | None) -> Keys:
    """Keys from the command line, a file with one a line, and a variable with commas between them."""
    found = [*flags, *(key.strip() for key in (environment or "").split(",") if key.strip())]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read ({error}).") from error
        own = [line for line in lines if line and not line.startswith("#")]
        if not own:
            raise ConfigError(f"--api-key-file {file}: holds no key. Write one a line.")
        found += own
    return Keys(found)


class Rates:
    """So many requests a minute of each key, over all servers of this machine that have the key and the same numbers.

    Servers with other numbers count apart, so that what an earlier server left behind cannot stop a new one.

    Args:
        names: of the keys.
        per_minute: 0 for no limit.
        burst: requests at once after a pause.
    """

    def __init__(self, names: Iterable[str], per_minute: float = 0.0, burst: int = 1):
        self.per_minute = per_minute
        self._limits: dict[str, RateLimit] = {}
        self._fault: str | None = None
        self._checked = -math.inf
        try:
            if per_minute:
                numbers = f"{per_minute:g} {burst}"
                self._limits = {who: RateLimit(per_minute, burst, f"serve {who} {numbers}") for who in names}
            if (fault := self.fault()) is not None:
                raise ConfigError(fault)
        except (ArborError, OSError) as error:
            raise ConfigError(f"--per-minute {per_minute:g}: requests cannot be counted: {error}") from error

    def fault(self) -> str | None:
        """Why requests of some key cannot be counted, if they cannot; looked up once a second at most."""
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self._checked, self._fault = time.monotonic(), None
            try:
                for limit in self._limits.values():
                    limit.check()
            except (ArborError, OSError) as error:
                self._fault = str(error)
        return self._fault

    async def take(self, who: str) -> None:
        """Count one request; `Unavailable` where it is one too many, or cannot be counted."""
        if not self.per_minute:
            return
        try:
            await self._limits[who].acquire(timeout=0)
        except RateLimitTimeout as error:
            wait = math.ceil(60.0 / self.per_minute)
            told = f"more than {self.per_minute:g} requests a minute of this key"
            raise Unavailable(told, wait, 429, "rate_limit_exceeded") from error
        except (ArborError, OSError) as error:
            self._checked, self._fault = time.monotonic(), str(error)
            log.warning("requests of %s cannot be counted: %s", who, error)
            raise Unavailable("requests cannot be counted, so none are answered", code="rate_limit_failed") from error

    def forget(self) -> None:
        for limit in self._limits.values():
            with suppress(OSError):
                limit.remove()
