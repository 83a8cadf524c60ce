"""A runner for tests that runs ahead as the GPU's does."""

from __future__ import annotations

import dataclasses

import numpy as np

from arborl.engines.local import LocalEngine
from arborl.engines.local.model_runner import FinishedOutput, ModelStep, TorchModelRunner


@dataclasses.dataclass(frozen=True, slots=True)
class LateOutput(FinishedOutput):
    """Is ready when it has been asked `delay` times."""

    asked: list[int] = dataclasses.field(default_factory=list)
    delay: int = 0

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        self.asked.append(1)
        return len(self.asked) > self.delay


class RunAheadRunner(TorchModelRunner):
    """Outputs are read after the next launch, whose input tokens refer to them."""

    runs_ahead = True
    delay = 0
    last = np.zeros(0, np.int64)

    def launch(self, step: ModelStep) -> LateOutput:
        tokens, pending = step.tokens.copy(), step.tokens < 0
        tokens[pending] = self.last[-1 - tokens[pending]]
        output = super().launch(dataclasses.replace(step, tokens=tokens))
        assert isinstance(output, FinishedOutput)
        if len(step.sampled):
            self.last = output.tokens
        return LateOutput(output.tokens, output.logprobs, output.top, delay=self.delay)

    @classmethod
    def install(cls, engine: LocalEngine) -> RunAheadRunner:
        """Let an engine use such a runner."""
        runner = cls(engine.runner.forward, engine.pool.num_blocks, engine.pool.block_size)
        engine.runner = runner
        engine.scheduler.copy = runner.cache.copy
        return runner
