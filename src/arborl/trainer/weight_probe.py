"""Checks once per run that the engine samples with the weights that the learner has updated.

A weight sync that does nothing looks like slow learning. So the log-probability of one fixed token is taken at the
start and after updates with a gradient, until it has changed.
"""

from __future__ import annotations

from arborl.engines.engine import PROBE_SESSION, Engine
from arborl.types import Completion, Metrics, Sampling

PROMPT = (1, 2, 3, 5, 8, 13)
PATIENCE = 3
"""Updates that may leave the probe unchanged: in bfloat16 a small update can round to nothing."""


class StaleEngine(RuntimeError):
    """The engine's weights are not the learner's."""


class WeightSyncProbe:
    """Samples right after a weight sync, when nothing is cached: equal weights give equal bits."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.is_done = not engine.follows_weights or engine.verifies_weights
        self.before: Completion | None = None
        self.num_unchanged = 0

    async def start(self) -> None:
        if not self.is_done:
            self.before = await self._sample()

    async def check(self, metrics: Metrics) -> None:
        """Sample after a weight sync; `metrics` are the learner's of the update before it."""
        if self.is_done or self.before is None:
            return
        step_size = metrics.get("learner/step_share", metrics.get("learner/lr", 0.0))  # a trust region has no rate
        has_stepped = metrics.get("learner/steps", 0.0) > 0 and step_size > 0
        after = await self._sample()
        is_same = (after.tokens, after.logprobs) == (self.before.tokens, self.before.logprobs)
        if not is_same and not has_stepped and not self.num_unchanged:  # weight decay needs no gradient
            raise StaleEngine("the engine's reply to a probe changed, but the learner did not change its weights.")
        self.is_done = not is_same
        self.num_unchanged += is_same and has_stepped and metrics.get("learner/grad_norm", 0.0) > 0
        if self.num_unchanged >= PATIENCE:
            raise StaleEngine(
                f"the learner changed its weights {PATIENCE} times, but the engine's reply to a probe is the same to "
                "the last bit: the new weights did not arrive. Check that engine.load copies into, or shares, the "
                "weights it samples with; in bfloat16, that learner.lr is large enough to change a weight."
            )

    async def _sample(self) -> Completion:
        return await self.engine.generate(PROMPT, Sampling(max_tokens=1), session=PROBE_SESSION)
