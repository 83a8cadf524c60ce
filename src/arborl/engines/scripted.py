"""Fixed replies, for stub mode and tests: the whole loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arborl.engines.checks import check_sampling, read_prompt
from arborl.engines.engine import Weights
from arborl.errors import EngineError
from arborl.types import Completion, FinishReason, Metrics, Sampling


class ScriptedEngine:
    """Answers from a script, chosen by the request's seed. It has no doubts: log-probabilities are 0.

    Args:
        replies: what may be said, as token ids; each is equally likely.
        choose: instead of drawing, a function of (prompt, session) that names the reply's index.
        decode: token ids to text, for stop texts.
    """

    follows_weights = False

    def __init__(
        self,
        replies: Sequence[Sequence[int]],
        choose: Callable[[Sequence[int], str], int] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        if not replies or not all(replies):
            raise ValueError("replies: give at least one reply of at least one token")
        self.replies, self.choose = [tuple(reply) for reply in replies], choose
        self.decode = decode
        self.version = 0
        self.sampled = 0
        self.closed = False

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """A reply, cut at `max_tokens` or where a stop text has been written."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        read_prompt(prompt)
        check_sampling(sampling)
        index = self.choose(prompt, session) if self.choose else sampling.seed % len(self.replies)
        reply = self.replies[index % len(self.replies)]
        tokens = reply[: sampling.max_tokens]
        cut = self._stop_text(tokens, sampling.stop_texts)
        finish = FinishReason.STOP if cut or tokens == reply else FinishReason.LENGTH
        tokens = tokens[:cut] if cut else tokens
        self.sampled += len(tokens)
        return Completion(tokens, (0.0,) * len(tokens), finish, self.version)

    def _stop_text(self, tokens: Sequence[int], texts: Sequence[str]) -> int:
        """How many tokens it takes to write one of the texts; 0 if none is written."""
        if not texts:
            return 0
        if self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        counts = range(1, len(tokens) + 1)
        return next((n for n in counts if any(text in self.decode(tokens[:n]) for text in texts)), 0)

    async def load(self, weights: Weights, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self.closed = True

    def metrics(self) -> Metrics:
        sampled, self.sampled = self.sampled, 0
        return {"engine/sampled": float(sampled)}
