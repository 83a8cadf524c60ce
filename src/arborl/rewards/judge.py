"""Answers judged by a language model behind any endpoint with OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Literal

import httpx

from arborl.errors import paused_deadlines
from arborl.retry import BUSY_STATUS, backoff_waits, retry
from arborl.rewards.answers import PenalizedReward, exact_match, final_part, gold_answers, is_too_long
from arborl.types import Episode

PROMPT = """\
Decide whether an answer to a question says the same as the correct answer. Wording does not matter, facts do.

Question:
{question}

Correct answer:
{gold}

Answer to judge:
{answer}

End your reply with \\boxed{{True}} if the answer is correct, else with \\boxed{{False}}."""
BOXED = re.compile(r"\\boxed\{\s*(True|False)\s*\}", re.IGNORECASE)


@dataclass(eq=False)
class ChatEndpoint:
    """Completes prompts at temperature 0, with retries."""

    model: str | None = None
    """Name of the model; the environment variable `OPENAI_MODEL` by default."""
    base_url: str | None = None
    """Of the endpoint, up to `/v1`; `OPENAI_BASE_URL` by default."""
    key: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key."""
    retries: int = 2
    """Further attempts if the server is busy or unreachable."""
    wait: float = 2.0
    """Seconds before the second attempt; doubled each time."""
    seconds: float = 20.0
    """Timeout of one attempt."""
    concurrency: int = 32
    """Concurrent requests."""

    def __post_init__(self) -> None:
        self.model = self.model or os.environ.get("OPENAI_MODEL", "")
        self.base_url = (self.base_url or os.environ.get("OPENAI_BASE_URL", "")).rstrip("/")
        if not self.model or not self.base_url:
            raise ValueError("the judge needs model and base_url; give both, or set OPENAI_MODEL and OPENAI_BASE_URL")
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(f"concurrency={self.concurrency}, retries={self.retries}: give at least 1, and at least 0")
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def complete(self, prompt: str) -> str:
        body: dict[str, object] = {
            "model": self.model,
            "temperature": 0,
            "messages": [{"role": "user", "content": prompt}],
        }
        key = os.environ.get(self.key, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        semaphore = self._loop_semaphore()
        with paused_deadlines():
            await semaphore.acquire()
        try:
            async with httpx.AsyncClient(timeout=self.seconds, headers=headers) as client:
                return await self._post(client, body)
        finally:
            semaphore.release()

    async def _post(self, client: httpx.AsyncClient, body: dict[str, object]) -> str:
        reply = await retry(
            lambda: client.post(f"{self.base_url}/chat/completions", json=body),
            backoff_waits(self.retries, self.wait),
            lambda reply: reply.status_code in BUSY_STATUS,
            (httpx.TransportError,),
        )
        reply.raise_for_status()
        try:
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"the judge's reply is not a chat completion: {reply.text[:200]!r}") from error

    def _loop_semaphore(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop; training and a later evaluation have one each."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self.concurrency))
        return self._semaphore[1]


@dataclass(eq=False)
class Judge(ChatEndpoint, PenalizedReward):
    """`right` or `wrong`, by the verdict of a model.

    The episode fails if the judge is unreachable or gives no verdict; with `fallback="exact"` the texts are compared
    instead.
    """

    fallback: Literal["fail", "exact"] = "fail"
    """`fail`, or `exact`."""
    max_sentences: int | None = 3
    """Longer answers are invalid and not judged; None for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fallback not in ("fail", "exact"):
            raise ValueError(f"fallback={self.fallback!r}: give fail or exact")

    async def judge(self, episode: Episode) -> float:
        answer = final_part(episode.answer)
        if is_too_long(answer, self.max_sentences):
            return self.invalid
        golds = gold_answers(episode, self.field, "reward 'judge'")
        question = next((m.content for m in reversed(episode.opening or episode.task.messages) if m.role == "user"), "")
        try:
            text = await self.complete(PROMPT.format(question=question, gold=" or ".join(golds), answer=answer))
            verdicts = BOXED.findall(text)
            if not verdicts:
                raise ValueError(f"the judge gave no verdict: {text[-200:]!r}")
            is_right = verdicts[-1].lower() == "true"
        except (httpx.HTTPError, ValueError):
            if self.fallback == "fail":
                raise
            is_right = any(exact_match(answer, gold) for gold in golds)
        return self.right if is_right else self.wrong
