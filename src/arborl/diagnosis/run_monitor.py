"""Diagnosis during a run: warnings about steps and trends; stops a run in which nearly every episode fails.

One failed episode costs itself. If a whole batch fails at the very start, or several batches in a row later, the run
stops with the causes and one traceback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from arborl.diagnosis.alarms import ALARMS, Alarm, find_alarm
from arborl.diagnosis.metric_history import PATIENCE, MetricHistory
from arborl.diagnosis.step_rules import NEARLY_ALL, StepRule, diagnose_step, step_remark
from arborl.diagnosis.trend_rules import TREND_RULES
from arborl.errors import RunStopped
from arborl.failures import BEGINS as FRAMES
from arborl.failures import Failures, failure_key, printable, trim_traceback
from arborl.types import Episode, Metrics, Task

ALARM_HINT = "This is an alarm: trainer.on_alarm decides whether the run goes on, stops or rolls back."
MIN_FAILURES = 4
"""Failures in the first batch that stop a run at once. Fewer may be chance."""
MAX_CAUSES = 5
"""Causes that a message lists."""
FIRST_TASKS = 8
"""Tasks at the start of a run that stop it if all of them fail with one cause."""
ROLLOUT = "`arborl rollout`, with the settings of the run, plays one episode"
CHECKS = {
    "environment": "`arborl env check {env}` checks the environment alone.",
    "agent": f"{ROLLOUT} with the agent and prints it.",
    "program": f"Start the program alone; {ROLLOUT} with it and prints it.",
    "reward": f"{ROLLOUT} and prints its rewards.",
    "engine": "`arborl doctor --model {model}` checks the model and the engine.",
}
"""How to check a component, by the first word of its name."""


class DiagnosisMonitor:
    """Warns once when a step rule holds for `PATIENCE` steps in a row, and once for each trend; knows the alarm that
    holds."""

    def __init__(self) -> None:
        self.rule_name, self.num_steps = "", 0
        self.history, self.reported_trends = MetricHistory(), set[str]()

    def add(self, metrics: Metrics) -> list[str]:
        """Add a step, whose number is among its metrics; returns the warnings that are due."""
        rule = self._count(metrics)
        warnings = []
        if rule is not None and self.num_steps == PATIENCE:
            warnings.append(f"The last {PATIENCE} steps: {step_remark(metrics)}. {rule.advice}")
        self.history.add(metrics)
        for trend in TREND_RULES:
            if trend.name not in self.reported_trends and (match := trend.check(self.history)) is not None:
                self.reported_trends.add(trend.name)
                hint = " " + ALARM_HINT if trend.name in ALARMS else ""
                warnings.append(f"{trend.summary[0].upper()}{trend.summary[1:]}: {match.detail}. {trend.advice}{hint}")
        return warnings

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue after the steps of these rows; trends that they show are not reported again."""
        for row in rows:
            if "episode/count" in row:
                self._count(row)
                self.history.add(row)
        self.reported_trends |= {trend.name for trend in TREND_RULES if trend.check(self.history) is not None}

    def alarm(self) -> Alarm | None:
        """The alarm that holds after the last step."""
        return find_alarm(self.history)

    def _count(self, metrics: Mapping[str, Any]) -> StepRule | None:
        rule = diagnose_step(metrics)
        name = "" if rule is None else rule.name
        self.num_steps = self.num_steps + 1 if name == self.rule_name else 1
        self.rule_name = name
        return rule


def nearly_all_failed(num_episodes: int, num_failed: int) -> bool:
    return num_episodes > 0 and num_failed >= NEARLY_ALL * num_episodes


class FailureMonitor:
    """Counts a run's failures by cause; raises `RunStopped` if nearly every episode fails. As the observer of the
    rollout it does so once the first tasks have failed with one cause and no episode has succeeded.

    Args:
        env, model: names in the configuration, for the advice.
    """

    def __init__(self, env: str = "NAME", model: str = "NAME") -> None:
        self.names = {"env": env, "model": model}
        self.first: dict[str, Episode | None] = {}
        """The first tasks by id, with the first failed episode of each."""
        self.is_started = False
        """Whether an episode succeeded, or the first tasks failed with different causes."""
        self.failures = Failures()
        self.num_batches: Counter[str] = Counter()
        self.failed_in_a_row: Counter[str] = Counter()

    def on_start(self, task: Task) -> None:
        if len(self.first) < FIRST_TASKS:
            self.first.setdefault(task.id, None)

    def on_end(self, episode: Episode) -> None:
        if self.is_started:
            return
        if episode.failure is None:
            self.is_started = True
        elif episode.task.id in self.first and self.first[episode.task.id] is None:
            self.first[episode.task.id] = episode
            failed = [one for one in self.first.values() if one is not None]
            if len(failed) == FIRST_TASKS:
                self.is_started = True  # raise only once: other episodes end while the batch is cancelled
                if len({failure_key(one.failure) for one in failed if one.failure is not None}) == 1:
                    self.failures.add(failed, "the first tasks")
                    first = f"Stopped: the first {FIRST_TASKS} tasks failed with one cause, and no episode succeeded."
                    raise RunStopped(failure_message(failed, first, "the first tasks", self.names))

    def check(self, kind: str, step: int, episodes: Iterable[Episode], num_episodes: int | None = None) -> None:
        """Count a batch (`kind` is `step` or `evaluation`); `episodes` has at least its failed ones."""
        batch = list(episodes)
        failed = [episode for episode in batch if episode.failure is not None]
        num_episodes = len(batch) if num_episodes is None else num_episodes
        when = f"step {step}" if kind == "step" else f"the {kind} at step {step}"
        self.failures.add(failed, when)
        if num_episodes == 0:
            return
        self.num_batches[kind] += 1
        in_a_row = self.failed_in_a_row[kind] + 1 if nearly_all_failed(num_episodes, len(failed)) else 0
        self.failed_in_a_row[kind] = in_a_row
        fails_at_start = self.num_batches[kind] == 1 and len(failed) >= MIN_FAILURES
        if in_a_row and (fails_at_start or in_a_row >= PATIENCE):
            before = f", and nearly all of the {in_a_row - 1} before" if in_a_row > 1 else ""
            first = f"Stopped: {len(failed)} of {num_episodes} episodes of {when} failed{before}."
            raise RunStopped(failure_message(failed, first, when, self.names))


def failure_message(failed: list[Episode], first_line: str, when: str, names: Mapping[str, str]) -> str:
    causes = Failures()
    causes.add(failed, when)
    first, *_ = causes
    lines = [first_line]
    lines += [f"  {cause}" for cause in causes][:MAX_CAUSES]
    if len(causes) > MAX_CAUSES:
        lines.append(f"  … and {len(causes) - MAX_CAUSES} other causes")
    trace = trim_traceback(first.failure.traceback)
    if FRAMES in trace:  # a timeout has no traceback
        lines += ["", printable(trace)]
    where = first.failure.where
    check = CHECKS.get(where.partition(" ")[0], f"{ROLLOUT} and prints it.").format(**names)
    return "\n".join([*lines, "", f"Fix the cause in {where}, then start the run again. {check}"])
