"""Fixed replies, for stub mode and tests: the whole loop without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arborl.engines.engine import Weights
from arborl.types import Completion, Finish, Metrics, Sampling


class ScriptedEngine:
    """Answers from a script, chosen by the request's seed. It has no doubts: log-probabilities are 0.

    Args:
        replies: what may be said, as token ids; each is equally likely.
        choose: instead of drawing, a function of (prompt, session) that names the reply's index.
    """

    follows_weights = False

    def __init__(self, replies: Sequence[Sequence[int]], choose: Callable[[Sequence[int], str], int] | None = None):
        if not replies or not all(replies):
            raise ValueError("replies: give at least one reply of at least one token")
        self.replies, self.choose = [tuple(reply) for reply in replies], choose
        self.version = 0
        self.sampled = 0

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """A reply, cut at `max_tokens`."""
        index = self.choose(prompt, session) if self.choose else sampling.seed % len(self.replies)
        reply = self.replies[index % len(self.replies)]
        tokens = reply[: sampling.max_tokens]
        finish = Finish.STOP if tokens == reply else Finish.LENGTH
        self.sampled += len(tokens)
        return Completion(tokens, (0.0,) * len(tokens), finish, self.version)

    async def load(self, weights: Weights, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    def metrics(self) -> Metrics:
        sampled, self.sampled = self.sampled, 0
        return {"engine/sampled": float(sampled)}
