"""Who may ask: API keys, how they are given, and how often each may be used. A key is never written anywhere."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable
from pathlib import Path

from arborl.errors import ConfigError
from arborl.serve.source import Unavailable
from arborl.tools.limit import LimitTimeout, RateLimit
from arborl.tools.protocol import key_bytes


class Keys:
    """Some keys. What is compared are their hashes, all of them every time, so that the time taken says nothing.

    Example:
        keys = Keys(["sk-long-and-random"])
        keys.find(b"sk-long-and-random")      # 'key-3f9a0c12': what logs and metrics call it
    """

    def __init__(self, keys: Iterable[str] = ()):
        self._known = {hashlib.sha256(key_bytes(key)).digest() for key in keys}

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, given: bytes) -> str | None:
        """What the key is called, if it is one."""
        digest, found = hashlib.sha256(given).digest(), None
        for known in self._known:
            if hmac.compare_digest(known, digest):
                found = f"key-{digest.hex()[:8]}"
        return found


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
    """So many requests a minute of each key, over all servers of this machine that use it.

    Args:
        per_minute: 0 for no limit.
        burst: requests at once after a pause.
    """

    def __init__(self, per_minute: float = 0.0, burst: int = 1):
        self.per_minute, self.burst = per_minute, burst
        self._limits: dict[str, RateLimit] = {}

    async def take(self, who: str) -> None:
        """Count one request; `Unavailable` where it is one too many."""
        if not self.per_minute:
            return
        if who not in self._limits:
            self._limits[who] = RateLimit(self.per_minute, self.burst, f"serve {who}")
        try:
            await self._limits[who].acquire(timeout=0)
        except LimitTimeout as error:
            wait = math.ceil(60.0 / self.per_minute)
            told = f"more than {self.per_minute:g} requests a minute of this key"
            raise Unavailable(told, wait, 429, "rate_limit_exceeded") from error

    def forget(self) -> None:
        for limit in self._limits.values():
            limit.forget()
