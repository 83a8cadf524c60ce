"""What every rank makes its learner of, so that all are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Needs
from arborl.config.run_config import LearnerConfig
from arborl.learner.learner import Learner
from arborl.learner.schedule import NONE, FirstSteps
from arborl.learner.strategy import Strategy
from arborl.learner.teacher import Teacher
from arborl.models.scalar import Origin
from arborl.types import Sampling


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a rank makes its learner of. Functions travel by name where they have one that can be imported."""

    config: LearnerConfig
    sampling: Sampling
    needs: Needs
    total_steps: int
    seed: int
    model: Callable[[str], PreTrainedModel]
    """The policy, on a device."""
    origin: Callable[[PreTrainedModel], Origin | None] = lambda model: None
    teacher: Callable[[], Teacher | None] = lambda: None
    deterministic: bool = False
    threads: int = 0
    first: FirstSteps = NONE

    def build(
        self,
        model: PreTrainedModel,
        origin: Origin | None = None,
        teacher: Teacher | None = None,
        strategy: Strategy | None = None,
    ) -> Learner:
        """The learner of one process."""
        return Learner(
            model, self.config, self.sampling, self.needs, self.total_steps, self.seed, origin, teacher, strategy,
            self.first,
        )  # fmt: skip
