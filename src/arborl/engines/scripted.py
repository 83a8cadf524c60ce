"""Engines without a model: fixed replies for stub mode and tests, and none at all for given rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arborl.engines.engine import Engine, TokenListener, Weights
from arborl.engines.engine_requests import StopTextMatcher, check_sampling, read_prompt
from arborl.errors import EngineError
from arborl.types import Completion, FinishReason, Metrics, Sampling


class NoEngine(Engine):
    """For runs that learn from given rows and sample nothing."""

    follows_weights = False

    def __init__(self, model: Any = None):
        pass

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        raise EngineError("engine=none cannot sample: this run learns from given rows")


class ScriptedEngine(Engine):
    """Fixed replies selected by the request's seed. Log-probabilities are 0.

    Args:
        replies: token ids of each reply; all are equally likely.
        choose: selects the index of the reply from (prompt, session) in place of the seed.
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
        self.replies, self.choose, self.decode = [tuple(reply) for reply in replies], choose, decode
        self.version = 0
        self.sampled = 0
        self.closed = False

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        if self.closed:
            raise EngineError("the engine is closed; make another")
        read_prompt(prompt)
        check_sampling(sampling)
        index = self.choose(prompt, session) if self.choose else sampling.seed % len(self.replies)
        reply = self.replies[index % len(self.replies)]
        tokens = reply[: sampling.max_tokens]
        stops = StopTextMatcher.make(self.decode, sampling)
        ends = (n for n in range(1, len(tokens) + 1) if stops is not None and stops.reached(tokens[:n]))
        cut = next(ends, 0)
        finish = FinishReason.STOP if cut or tokens == reply else FinishReason.LENGTH
        tokens = tokens[:cut] if cut else tokens
        self.sampled += len(tokens)
        return Completion(tokens, (0.0,) * len(tokens), finish, self.version)

    async def load(self, weights: Weights, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self.closed = True

    def metrics(self) -> Metrics:
        sampled, self.sampled = self.sampled, 0
        return {"engine/sampled": float(sampled)}
