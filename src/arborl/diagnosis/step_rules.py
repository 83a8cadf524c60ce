"""Rules about the metrics of one step: why it learned nothing. Rules about several steps are in `trend_rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.diagnosis.finding import RULE_TEXTS
from arborl.types import Metrics

NEARLY_ALL = 0.9
OFTEN_CUT_OFF = 0.3
"""Share of completions that end at `sampling.max_tokens`, from which on malformed tool calls are ascribed to it."""


class StepMetrics:
    """The metrics of one step, with a default for missing ones."""

    def __init__(self, metrics: Mapping[str, Any]):
        self.metrics = metrics

    def __call__(self, name: str, default: float = 0.0) -> float:
        value = self.metrics.get(name)
        return default if value is None else float(value)

    def is_one(self, name: str) -> bool:
        """Whether a share was measured and is nearly 1."""
        return self(name, -1.0) >= NEARLY_ALL

    def is_zero(self, name: str) -> bool:
        """Whether a number was measured and is 0."""
        return self(name, -1.0) == 0.0

    @property
    def has_updated(self) -> bool:
        """Whether the weights changed."""
        return self("learner/grad_norm") > 0 and self("learner/skipped") < 1

    @property
    def has_no_variance(self) -> bool:
        """Whether every group has zero reward variance, and nothing was learned."""
        return self("group/zero_variance", -1.0) >= 1 and not self.has_updated

    @property
    def nearly_all_failed(self) -> bool:
        episodes = self("episode/count") + self("rollout/filtered_episodes")
        failed = self("episode/failed") + self("rollout/filtered_failed")
        return episodes > 0 and failed >= NEARLY_ALL * episodes


@dataclass(frozen=True, slots=True)
class StepRule:
    """One cause of a step without learning. `summary` ends the step's line on the console; `advice` names settings."""

    name: str
    holds: Callable[[StepMetrics], bool]
    summary: str
    advice: str


STEP_CONDITIONS: dict[str, Callable[[StepMetrics], bool]] = {
    "failed": lambda step: step.nearly_all_failed,
    "filtered": lambda step: step.is_zero("episode/count") and step("rollout/filtered") > 0,
    "no_episodes": lambda step: step.is_zero("episode/count"),
    "prompts_too_long": lambda step: step.is_zero("episode/calls") and step.is_one("stop/context_full"),
    "model_not_called": lambda step: step.is_zero("episode/calls"),
    "nothing_sampled": lambda step: step.is_zero("episode/sampled"),
    "cut_off": lambda step: step.is_one("call/cut_off") and (not step.has_updated or step.is_zero("episode/valid")),
    "all_invalid": lambda step: step.is_zero("episode/valid"),
    "no_tools": lambda step: step.is_zero("episode/tool/offered") and not step.has_updated,
    "calls_cut_off": lambda step: (
        step("call/cut_off") >= OFTEN_CUT_OFF and 0 < step("episode/tool/calls") <= step("episode/tool/malformed")
    ),
    "tools_fail": lambda step: (
        step("episode/tool/calls") > 0 and step("episode/tool/failed") >= step("episode/tool/calls")
    ),
    "all_solved": lambda step: step.has_no_variance and step("episode/success") >= 1,
    "none_solved": lambda step: step.has_no_variance and step.is_zero("episode/success"),
    "zero_variance": lambda step: step.has_no_variance,
    "not_finite": lambda step: step("learner/skipped") >= 1 and not step("learner/skipped/no_terms"),
    "all_dropped": lambda step: step.is_zero("learner/terms"),
    "no_gradient": lambda step: step.is_zero("learner/grad_norm"),
}
"""From the particular to the general: the first rule that holds is the cause."""
STEP_RULES = tuple(StepRule(name, holds, **RULE_TEXTS[name]) for name, holds in STEP_CONDITIONS.items())
BENIGN_STEP_RULES = frozenset({"all_solved"})
"""Rules that are no fault."""


def diagnose_step(metrics: Mapping[str, Any]) -> StepRule | None:
    """The first rule that holds for a step. A row that holds an evaluation only is no step."""
    if "episode/count" not in metrics:
        return None
    step = StepMetrics(metrics)
    return next((rule for rule in STEP_RULES if rule.holds(step)), None)


def step_remark(metrics: Metrics) -> str:
    """The end of a step's line on the console; mostly empty."""
    rule = diagnose_step(metrics)
    if rule is None:
        return ""
    return rule.summary if StepMetrics(metrics).has_updated else f"no gradient: {rule.summary}"
