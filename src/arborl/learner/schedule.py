"""What the learning rates are multiplied by, step by step: up over the warm-up, then down as the configuration says.

Each is transformers' schedule of the same name (`get_scheduler`); with `min_lr`, `cosine` is its `cosine_with_min_lr`
and `linear` its `polynomial` of power 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arborl.config.training_config import LearnerConfig


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Updates at the start of a run that have a constant learning rate of their own."""

    count: int = 0
    lr: float = 0.0


NONE = FirstSteps()


def warmup(config: LearnerConfig, total: int) -> int:
    """Steps of the warm-up.

    >>> warmup(LearnerConfig(warmup_ratio=0.1), 25)
    3
    """
    return math.ceil(total * config.warmup_ratio) if config.warmup_ratio else config.warmup_steps


def scale(config: LearnerConfig, step: int, total: int, floor: float = 0.0) -> float:
    """The factor at a step.

    Args:
        step: optimiser steps before it.
        total: optimiser steps of the run; 0 where that is not known, and nothing comes down.
        floor: what is left of the rates at the end.

    >>> [scale(LearnerConfig(warmup_steps=2, decay="linear"), step, 6) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    rising = warmup(config, total)
    if step < rising:
        return step / rising
    if config.decay not in ("linear", "cosine") or not total:
        return 1.0
    done = min(1.0, (step - rising) / max(1, total - rising))
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * left


def usual_rate(parameters: int) -> float:
    """A learning rate that is a fair start for a policy of this size."""
    return 6e-4 if parameters < 10_000_000 else 1e-5 if parameters < 500_000_000 else 1e-6
