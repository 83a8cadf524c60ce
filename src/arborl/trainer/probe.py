"""Proof, once a run, that the engine samples from the weights the learner has changed.

A weight sync that silently does nothing looks like slow learning for weeks. So the log-probability of one fixed token
is taken at the start and after updates whose gradients were not zero, until it has moved.
"""

from __future__ import annotations

from arborl.engines.engine import PROBE_SESSION, Engine
from arborl.types import Completion, Metrics, Sampling

PROMPT = (1, 2, 3, 5, 8, 13)
"""Ids that every vocabulary has; what they mean does not matter."""
PATIENCE = 3
"""Updates that may go unseen: in bfloat16 a small one can leave a single number where it was."""


class StaleEngine(RuntimeError):
    """The engine's weights and the learner's are not the same."""


class SyncProbe:
    """Asked right after the engine was given weights, when nothing is cached: equal weights then answer bit for bit."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.settled = not engine.follows_weights or engine.verifies_weights
        self.before: Completion | None = None
        self.missed = 0

    async def ask(self) -> None:
        """At the start."""
        if not self.settled:
            self.before = await self._sample()

    async def check(self, metrics: Metrics) -> None:
        """After the engine was given updated weights; `metrics` are the learner's of that update."""
        if self.settled or self.before is None:
            return
        length = metrics.get("learner/step_share", metrics.get("learner/lr", 0.0))  # a trust region reads no rate
        stepped = metrics.get("learner/steps", 0.0) > 0 and length > 0
        moved = stepped and metrics.get("learner/grad_norm", 0.0) > 0
        after = await self._sample()
        same = (after.tokens, after.logprobs) == (self.before.tokens, self.before.logprobs)
        if not same and not stepped and not self.missed:  # a step without a gradient may decay weights
            raise StaleEngine("the engine's answer to a probe changed although the learner did not move its weights.")
        self.settled = not same
        self.missed += same and moved
        if self.missed >= PATIENCE:
            raise StaleEngine(
                f"the learner changed its weights {PATIENCE} times, but the engine's answer to a probe is the same to "
                "the last bit: the new weights did not arrive. Check that engine.load copies into, or shares, what it "
                "samples from; in bfloat16, that learner.lr is large enough to move a weight."
            )

    async def _sample(self) -> Completion:
        return await self.engine.generate(PROMPT, Sampling(max_tokens=1), session=PROBE_SESSION)
