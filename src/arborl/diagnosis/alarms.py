"""Alarms: rules of the diagnosis on which a run can act (`trainer.on_alarm`).

`ALARMS` is the only list of them. Their conditions, summaries and advice are those of `trend_rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arborl.diagnosis.metric_history import MAX_WINDOW, MetricHistory
from arborl.diagnosis.trend_rules import TREND_RULES, TrendRule

ALARMS: dict[str, str] = {
    "not_finite_repeated": "loss or gradient not finite",
    "lr_too_high": "reward lost after a jump of the policy",
    "reward_falls": "reward lost",
    "reward_collapsed": "reward lost",
    "far_from_reference": "KL too high",
    "entropy_collapsed": "entropy too low",
    "length_explodes": "replies too long",
    "logprob_diff_high": "log-probabilities of engine and learner differ",
    "logprob_diff_grows": "log-probabilities of engine and learner differ",
    "engine_stale": "log-probabilities of engine and learner differ",
}
"""Names of the rules that are alarms, and their kind. In this order: the first that holds is reported."""
EVIDENCE_STEPS = MAX_WINDOW + 1
"""A checkpoint this many steps old is before the evidence of most alarms: a window of steps, and the update before."""


@dataclass(frozen=True, slots=True)
class Alarm:
    rule: TrendRule
    step: int
    """Number of finished steps when it was raised."""
    first_step: int
    """The first step whose metrics are evidence."""
    detail: str

    @property
    def last_healthy_step(self) -> int:
        """The metrics of step N are those of episodes sampled by the weights after N - 1 updates: the checkpoint before
        the first evidence already has the weights that caused it."""
        return max(self.first_step - 2, 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.rule.name,
            "step": self.step,
            "first_step": self.first_step,
            "detail": f"{self.rule.summary}: {self.detail}",
            "advice": self.rule.advice,
        }

    def __str__(self) -> str:
        return f"{self.rule.name} at step {self.step}: {self.rule.summary} ({self.detail})"


ALARM_RULES = tuple(next(rule for rule in TREND_RULES if rule.name == name) for name in ALARMS)


def find_alarm(history: MetricHistory) -> Alarm | None:
    """The first alarm that holds at the last step."""
    return next(_alarms(history), None)


def _alarms(history: MetricHistory) -> Iterator[Alarm]:
    for rule in ALARM_RULES:
        if (match := rule.check(history)) is not None:
            yield Alarm(rule, history.last_step, min(match.steps), match.detail)
