"""No engine: for runs that learn from given rows, where nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arborl.engines.engine import Weights
from arborl.errors import EngineError
from arborl.types import Completion, Metrics, Sampling


class NoEngine:
    """Takes weights and does nothing with them."""

    follows_weights = False

    def __init__(self, model: Any = None):
        pass

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        raise EngineError("engine=none: this run learns from given rows, and samples nothing")

    async def load(self, weights: Weights, version: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def metrics(self) -> Metrics:
        return {}
