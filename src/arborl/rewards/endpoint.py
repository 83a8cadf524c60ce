"""A judging model behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import os

import httpx

from arborl.errors import paused_deadlines

LATER = (408, 409, 429, 500, 502, 503, 504)
"""What a server says when the same request may work later."""


class Endpoint:
    """Completes prompts at temperature 0, and tries again while the server is busy or away.

    Args:
        model: name of the judging model; the environment variable `OPENAI_MODEL` by default.
        base_url: of the endpoint, up to `/v1`; `OPENAI_BASE_URL` by default.
        key: name of the environment variable that holds the key.
        retries: further tries when the server is busy or away.
        wait: seconds before the second try; doubled each time.
        seconds: for one try.
        concurrency: requests in flight.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        key: str = "OPENAI_API_KEY",
        retries: int = 2,
        wait: float = 2.0,
        seconds: float = 20.0,
        concurrency: int = 32,
    ):
        self.model = model or os.environ.get("OPENAI_MODEL", "")
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL", "")).rstrip("/")
        if not self.model or not self.base_url:
            raise ValueError("the judge needs model and base_url; give both, or set OPENAI_MODEL and OPENAI_BASE_URL")
        if concurrency < 1 or retries < 0:
            raise ValueError(f"concurrency={concurrency}, retries={retries}: give at least 1, and at least 0")
        self.key, self.retries, self.wait, self.seconds = key, retries, wait, seconds
        self.concurrency = concurrency
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def __call__(self, prompt: str) -> str:
        """What the model says."""
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
        key = os.environ.get(self.key, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        slots = self._slots_here()
        with paused_deadlines():
            await slots.acquire()
        try:
            async with httpx.AsyncClient(timeout=self.seconds, headers=headers) as client:
                return await self._ask(client, body)
        finally:
            slots.release()

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        for attempt in range(self.retries + 1):
            try:
                reply = await client.post(f"{self.base_url}/chat/completions", json=body)
                if reply.status_code not in LATER or attempt == self.retries:
                    reply.raise_for_status()
                    return content_of(reply)
            except httpx.TransportError:
                if attempt == self.retries:
                    raise
            await asyncio.sleep(self.wait * 2**attempt)
        raise AssertionError("the last try returns or raises")

    def _slots_here(self) -> asyncio.Semaphore:
        """A semaphore belongs to an event loop; training and a later evaluation have one each."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.concurrency))
        return self._slots[1]


def content_of(reply: httpx.Response) -> str:
    """The text of a chat completion; ValueError where it is none."""
    try:
        return str(reply.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"the judge's reply is no chat completion: {reply.text[:200]!r}") from error
