"""A runner for tests that runs ahead as the GPU's does."""

from __future__ import annotations

import dataclasses

import numpy as np

from arborl.engines.local import LocalEngine
from arborl.engines.local.model_runner import FinishedOutput, ModelStep, TorchModelRunner


class RunAheadRunner(TorchModelRunner):
    """Outputs are read after the next launch, whose input tokens refer to them."""

    runs_ahead = True
    last = np.zeros(0, np.int64)

    def launch(self, step: ModelStep) -> FinishedOutput:
        tokens, pending = step.tokens.copy(), step.tokens < 0
        tokens[pending] = self.last[-1 - tokens[pending]]
        output = super().launch(dataclasses.replace(step, tokens=tokens))
        assert isinstance(output, FinishedOutput)
        if len(step.sampled):
            self.last = output.tokens
        return output

    @classmethod
    def install(cls, engine: LocalEngine) -> RunAheadRunner:
        """Let an engine use such a runner."""
        runner = cls(engine.runner.forward, engine.pool.num_blocks, engine.pool.block_size)
        engine.runner = runner
        engine.scheduler.copy = runner.cache.copy
        return runner
