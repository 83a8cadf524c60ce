"""An answer judged by a language model behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import re
from typing import Literal

import httpx

from arborl.rewards.choice import Penalised, exactly, sentences
from arborl.rewards.endpoint import Endpoint
from arborl.rewards.fields import field_of
from arborl.rewards.numbers import final_part
from arborl.types import Episode

ASK = """Decide whether an answer to a question says the same as the correct answer. Wording does not matter, facts do.

Question:
{question}

Correct answer:
{gold}

Answer to judge:
{said}

End your reply with \\boxed{{True}} if the answer is correct, else with \\boxed{{False}}."""
BOXED = re.compile(r"\\boxed\{\s*(True|False)\s*\}", re.IGNORECASE)


class Judge(Penalised):
    """`right` or `wrong`, as a model says.

    A judge that cannot be reached, or says neither, costs the episode, with its name on the failure; it never becomes a
    number by itself. `fallback="exact"` compares the texts instead.

    Args:
        model, base_url, key, retries, wait, seconds, concurrency: see `Endpoint`.
        right, wrong: what both verdicts are worth.
        fallback: `fail`, or `exact`.
        field: that holds the correct answer.
        max_sentences: longer answers are invalid and not judged.
        exceeded, too_few_turns, invalid: see `Penalised`.
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
        right: float = 1.0,
        wrong: float = -0.5,
        fallback: Literal["fail", "exact"] = "fail",
        field: str = "answer",
        max_sentences: int = 3,
        invalid: float = -1.0,
        exceeded: float = -1.0,
        too_few_turns: float = -1.0,
    ):
        super().__init__(exceeded, too_few_turns, invalid)
        self.complete = Endpoint(model, base_url, key, retries, wait, seconds, concurrency)
        if fallback not in ("fail", "exact"):
            raise ValueError(f"fallback={fallback!r}: give fail or exact")
        self.right, self.wrong, self.fallback = right, wrong, fallback
        self.field, self.max_sentences = field, max_sentences

    async def judge(self, episode: Episode) -> float:
        said = final_part(episode.answer)
        if not said.strip() or sentences(said) > self.max_sentences:
            return self.invalid
        gold = str(field_of(episode, self.field, "reward 'judge'"))
        question = next((m.content for m in reversed(episode.opening or episode.task.messages) if m.role == "user"), "")
        try:
            verdict = await self._verdict(ASK.format(question=question, gold=gold, said=said))
        except (httpx.HTTPError, ValueError):
            if self.fallback == "fail":
                raise
            verdict = exactly(said, gold) == 1.0
        return self.right if verdict else self.wrong

    async def _verdict(self, prompt: str) -> bool:
        text = await self.complete(prompt)
        found = BOXED.findall(text)
        if not found:
            raise ValueError(f"the judge gave no verdict: {text[-200:]!r}")
        return bool(found[-1].lower() == "true")
