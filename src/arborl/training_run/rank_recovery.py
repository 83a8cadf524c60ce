"""Recovery of a run that lost a rank of its learner: all ranks restart from the last checkpoint.

Steps after the checkpoint are repeated; the files of the run contain each step once. A rank that is lost twice at the
same step is not lost by chance: the run stops.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborl.errors import LearnerRankLost
from arborl.types import Group, Metrics

if TYPE_CHECKING:
    from arborl.trainer.trainer import Trainer


@dataclass(slots=True)
class LostRank:
    what: str
    step: int | None
    """Number of finished steps; None if restarted ranks were lost before they began."""
    moments: Mapping[int, float]
    """By step: the time at which that state of the run was saved or loaded."""
    start: int | None = None
    seconds: float = 0.0
    """Time from that state to the resumption: repeated work and restart."""

    @property
    def steps(self) -> int:
        return 0 if self.step is None or self.start is None else self.step - self.start


class RankRecovery:
    """Counts lost ranks and decides whether the run resumes. As a hook it adds their cost to the metrics."""

    def __init__(self, restarts: int):
        self.restarts, self.lost_ranks = restarts, list[LostRank]()

    def count(self, lost: LearnerRankLost, step: int | None = None, moments: Mapping[int, float] | None = None) -> bool:
        """Whether the run resumes after this loss. A second call with the same error does not count it again."""
        if not lost.counted:
            lost.counted = True
            if lost.again:
                lost.since = self._reason(step)
                lost.again = not lost.since and (step is not None or bool(self.lost_ranks))
            self.lost_ranks.append(LostRank(lost.what, step, moments or {}))
        return lost.again

    def _reason(self, step: int | None) -> str:
        if len(self.lost_ranks) >= self.restarts:
            return f" (learner.restarts={self.restarts})"
        if step is not None and any(one.step == step for one in self.lost_ranks):
            return f", because a rank was lost at the same step, {step + 1}, before"
        return ""

    def resumed(self, step: int) -> list[str]:
        """Record that the run resumes from this step; returns messages for the console."""
        pending = [one for one in self.lost_ranks if one.start is None]
        for one in pending:
            one.start = step
        if not pending:
            return []
        first, now = pending[0], time.monotonic()
        first.seconds = now - first.moments.get(step, min(first.moments.values(), default=now))
        return [
            *(f"{one.what}." for one in pending),
            f"All ranks were restarted. Lost: {first.steps} step{'s' * (first.steps != 1)}, {first.seconds:.0f} s.",
        ]

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        """In the first step after a restart: add the cost of all losses since that step."""
        start = trainer.step - 1
        if any(one.start == start for one in self.lost_ranks):
            lost = [one for one in self.lost_ranks if one.start is not None and one.start >= start]
            metrics["learner/lost"] = float(len(lost))
            metrics["learner/steps_lost"] = float(sum(one.steps for one in lost))
            metrics["learner/seconds_lost"] = sum(one.seconds for one in lost)
