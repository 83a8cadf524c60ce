"""A run whose learner has lost a rank goes on by itself: as `--resume latest` would, from its last checkpoint.

All ranks are started anew, as many as before. What was done since the checkpoint is done again, and in every file of
the run each step is found once. A rank that is lost twice at one step is not lost by chance: there the run stops.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborl.errors import LearnerLost
from arborl.types import Group, Metrics

if TYPE_CHECKING:
    from arborl.trainer.trainer import Trainer


@dataclass(slots=True)
class Loss:
    """One time that a rank was lost."""

    what: str
    """Who, and how."""
    step: int | None
    """Steps that were done; None where ranks that were started anew were lost before they had begun."""
    moments: Mapping[int, float]
    """By step: when that state of the run was saved, or loaded."""
    start: int | None = None
    """The step that the run has gone on from."""
    seconds: float = 0.0
    """Between that state and going on from it: what is done again, and starting anew."""

    @property
    def steps(self) -> int:
        """That are done again."""
        return 0 if self.step is None or self.start is None else self.step - self.start


class Losses:
    """All losses of a run, and whether it goes on. As a hook, what they have cost is in the metrics.

    Args:
        restarts: how often it may.

    Example:
        losses = Losses(restarts=2)
        try:
            train()                       # tells where it stood: losses.count(error, step=3, moments={0: …, 2: …})
        except LearnerLost as error:
            if not losses.count(error):
                raise
    """

    def __init__(self, restarts: int):
        self.restarts, self.all = restarts, list[Loss]()

    def count(self, lost: LearnerLost, step: int | None = None, moments: Mapping[int, float] | None = None) -> bool:
        """Whether the run goes on after this; counted the first time that it is asked about."""
        if not lost.counted:
            lost.counted = True
            if lost.again:
                lost.since = self._reason(step)
                lost.again = not lost.since and (step is not None or bool(self.all))
            self.all.append(Loss(lost.what, step, moments or {}))
        return lost.again

    def _reason(self, step: int | None) -> str:
        if len(self.all) >= self.restarts:
            return f" (learner.restarts={self.restarts})"
        if step is not None and any(one.step == step for one in self.all):
            return f", since a rank was lost at this very step, {step + 1}, before"
        return ""

    def goes_on(self, step: int) -> list[str]:
        """The run is about to, from this step; what there is to say."""
        pending = [one for one in self.all if one.start is None]
        for one in pending:
            one.start = step
        if not pending:
            return []
        first, now = pending[0], time.monotonic()
        first.seconds = now - first.moments.get(step, min(first.moments.values(), default=now))
        return [
            *(f"{one.what}." for one in pending),
            f"All ranks were started anew. Lost: {first.steps} step{'s' * (first.steps != 1)}, {first.seconds:.0f} s.",
        ]

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """In the first step after a loss: what was lost then, or was told in steps that are done again."""
        start = trainer.step - 1
        if any(one.start == start for one in self.all):
            told = [one for one in self.all if one.start is not None and one.start >= start]
            metrics["learner/lost"] = float(len(told))
            metrics["learner/steps_lost"] = float(sum(one.steps for one in told))
            metrics["learner/seconds_lost"] = sum(one.seconds for one in told)
