"""Torch's own trace of two steps: which operations they were made of, in every thread and on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from arborl.trainer.trainer import Trainer
from arborl.types import Group, Metrics

log = logging.getLogger(__name__)

STEPS = 2


class Profile:
    """A hook: traces the second and third step it sees, as the first is not like the others, and writes the trace.

    Args:
        path: the file, in Chrome's trace format.
    """

    def __init__(self, path: Path):
        self.path = path
        self.began: int | None = None
        self.trace: profile | None = None

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if self.began is None:
            self.began = trainer.step
            if trainer.step < trainer.last:
                self.trace = _tracing()
                self.trace.start()
            else:
                log.warning("--profile: there was one step only, and the first is not traced. Write trainer.steps=3.")
        elif self.trace is not None and (trainer.step >= self.began + STEPS or trainer.step == trainer.last):
            self.trace.stop()
            self.trace.export_chrome_trace(str(self.path))
            self.trace = None
            log.info("torch's trace of steps %d to %d is in %s", self.began + 1, trainer.step, self.path)


def _tracing() -> profile:
    chosen = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the learner has one of its own
    return profile(activities=chosen, experimental_config=everywhere)
