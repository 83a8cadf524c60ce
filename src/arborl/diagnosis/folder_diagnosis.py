"""examine_run: the findings of a run folder, of a finished or a running run. Works without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.config.training_config import MAX_LEARNING_RATE
from arborl.diagnosis.episode_rules import EPISODE_RULES, MAX_EVIDENCE, evidence
from arborl.diagnosis.finding import Evidence, Finding, State, worst_first
from arborl.diagnosis.metric_history import MIN_STEPS, PATIENCE, MetricHistory
from arborl.diagnosis.run_files import RunFiles
from arborl.diagnosis.step_rules import BENIGN_STEP_RULES, STEP_RULES, StepRule, diagnose_step
from arborl.diagnosis.trend_rules import TREND_RULES, TrendRule
from arborl.failures import one_line
from arborl.track.folder_files import finite_number
from arborl.types import Episode, FinishReason, StopReason


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule about metrics that holds, and the steps that show it."""

    rule: StepRule | TrendRule
    steps: tuple[int, ...]
    detail: str = ""
    """The numbers behind a trend."""


def match_rules(rows: Iterable[Mapping[str, Any]]) -> list[RuleMatch]:
    """The step rules that hold, most frequent first, then the trends."""
    rows = list(rows)
    steps: dict[str, list[int]] = {}
    for row in rows:
        if rule := diagnose_step(row):
            steps.setdefault(rule.name, []).append(int(row["step"]))
    matches = [RuleMatch(rule, tuple(steps[rule.name])) for rule in STEP_RULES if rule.name in steps]
    matches.sort(key=lambda match: -len(match.steps))
    history = MetricHistory(rows)
    trends = [(trend, trend.check(history)) for trend in TREND_RULES]
    return matches + [RuleMatch(trend, match.steps, match.detail) for trend, match in trends if match is not None]


def examine_run(folder: Path) -> list[Finding]:
    """The state of a run, then its faults, worst first."""
    files = RunFiles(folder)
    faults = _learning_rate(files) + _rollbacks(files)  # the first causes: other faults follow from them
    faults += [_metric_finding(match, files) for match in match_rules(files.rows) if _is_fault(match, files)]
    for rule in EPISODE_RULES:
        if (match := rule.check(files)) is not None:
            faults.append(Finding(rule.name, rule.state, match.detail, rule.advice, match.evidence))
    advice = "Another program wrote the file, or the disk was full: remove the file and run the doctor again."
    faults += [Finding("files", "warn", problem, advice) for problem in dict.fromkeys(files.problems)]
    return [_state(files), *_learning(files), *_execution(files), *_accounting(files), *worst_first(faults)]


def _state(files: RunFiles) -> Finding:
    steps = files.step_rows
    if isinstance(alarm := files.summary.get("alarm"), dict):
        detail = f"stopped at step {len(steps)} by the alarm {alarm.get('name')}: {alarm.get('detail')}"
        return Finding("run", "fail", detail, str(alarm.get("advice", "")))
    if files.summary.get("stopped"):
        failure = (files.summary.get("failures") or [{}])[0].get("failure", {})
        cause = f"{failure.get('where')}: {failure.get('kind')}"
        detail = f"stopped at step {len(steps)}: nearly every episode failed ({cause})"
        return Finding("run", "fail", detail, "Fix the cause; summary.json has all causes with tracebacks.")
    total = files.setting("trainer.steps")
    num_episodes = sum(row["episode/count"] or 0 for row in steps)
    state = "finished" if files.summary else "running or interrupted"
    detail = f"{len(steps)}{f' of {total}' if total else ''} steps, {num_episodes:.0f} episodes, {state}"
    if files.setting("stub"):
        detail = f"a stub run, with scripted replies: {detail}"
    if not steps:
        return Finding("run", "warn", detail, "No step is done yet: try again later; run.log has more.")
    if not files.episode_paths:
        detail += "; episodes were not stored, so only metrics were examined"
    return Finding("run", "ok", detail)


def _learning(files: RunFiles) -> list[Finding]:
    """Whether the reward changed. Too few steps to judge is a warning, not health."""
    num_steps = len(files.step_rows)
    if not num_steps:
        return []
    if num_steps < MIN_STEPS:
        detail = f"not judged: {num_steps} steps are too few, trends need at least {MIN_STEPS}"
        return [Finding("learning", "warn", detail, "Train for more steps, then run the doctor again.")]
    history = MetricHistory(files.rows)
    for name, sign in (("reward/mean", 1), ("policy/loss", -1)):
        series = history[name]
        if series.is_long:
            change = sign * series.change()
            verdict = "improved" if change > 0 else "got worse" if change < 0 else "no significant change"
            return [Finding("learning", "ok", f"{name} {series.early:.3g} → {series.late:.3g}: {verdict}")]
    detail = "not measured: the metrics have neither reward/mean nor policy/loss in enough steps"
    return [Finding("learning", "warn", detail, "Check metrics.jsonl and run.log.")]


def _learning_rate(files: RunFiles) -> list[Finding]:
    rate = files.setting("learner.lr")
    if not isinstance(rate, int | float) or rate <= MAX_LEARNING_RATE:
        return []
    has_improved = any("improved" in finding.detail for finding in _learning(files))
    detail = f"learner.lr is {rate:g}: AdamW changes each weight by about this much in a step"
    advice = "Write learner.lr=1e-6 to 1e-3, or leave it out for a default by the size of the model; start again."
    return [Finding("learning_rate", "warn" if has_improved else "fail", detail, advice)]


def _rollbacks(files: RunFiles) -> list[Finding]:
    """The steps after a rollback are examined like those of any run; the discarded ones are not among them."""
    if not files.rollbacks:
        return []
    back = [f"{one.get('alarm')} at step {one.get('step')}, back to step {one.get('to')}" for one in files.rollbacks]
    factor = files.rollbacks[-1].get("lr_factor")
    times = f"{factor:g}" if isinstance(factor, int | float) else factor
    detail = f"{len(back)} ({'; '.join(back)}): the learning rate is multiplied by {times}"
    advice = "Begin the next run with the lower learning rate, or find what caused the alarm in run.log."
    return [Finding("rollbacks", "warn", detail, advice)]


def _execution(files: RunFiles) -> list[Finding]:
    if not files.execution:
        return []
    detail = ", ".join(f"{name}: {value}" for name, value in files.execution.items())
    last = files.rows[-1] if files.rows else {}
    if not any(last.get(f"{part}/fallbacks") for part in ("engine", "learner")):
        return [Finding("execution", "ok", detail)]
    return [Finding("execution", "warn", detail, "Faster execution paths are not used; run.log has one line for each.")]


def _accounting(files: RunFiles) -> list[Finding]:
    """Whether every started episode is trained, dropped or pending at every step; none for older runs."""
    previous = dict.fromkeys(ACCOUNTED, 0.0)
    for row in files.step_rows:
        counts = {name: finite_number(row.get(f"episodes/{name}")) for name in ACCOUNTED}
        known = {name: count for name, count in counts.items() if count is not None}
        if not known:
            continue
        text = ", ".join(f"{count:.0f} {name}" for name, count in known.items())
        by_reason = [value for name in row if name.startswith(DROPPED) and (value := finite_number(row[name]))]
        is_whole = len(known) == len(ACCOUNTED) and known["dropped"] == sum(by_reason)
        if not is_whole or known["started"] != known["trained"] + known["dropped"] + known["pending"]:
            detail = f"step {row['step']}: {text}: the sum is wrong, episodes were lost or counted twice"
        elif any(known[name] < previous[name] for name in ("started", "trained", "dropped")):
            detail = f"step {row['step']}: {text}: a total is smaller than in the step before"
        else:
            previous, detail = known, ""
        if detail:
            advice = "This is a defect of Arbor, unless metrics.jsonl was edited: report it with the run folder."
            return [Finding("accounting", "fail", detail, advice)]
    if not previous["started"]:
        return []
    return [Finding("accounting", "ok", ", ".join(f"{count:.0f} {name}" for name, count in previous.items()))]


# ------------------------------------------------------------------------------------------------ metrics

ACCOUNTED = ("started", "trained", "dropped", "pending")
DROPPED = "episodes/dropped/"


def _is_fault(match: RuleMatch, files: RunFiles) -> bool:
    """A step rule must hold for some steps in a row: a single step without learning may be chance."""
    if isinstance(match.rule, TrendRule):
        return True
    longest = count = 0
    for row in files.step_rows:
        count = count + 1 if row["step"] in match.steps else 0
        longest = max(longest, count)
    return match.rule.name not in BENIGN_STEP_RULES and longest >= min(PATIENCE, len(files.step_rows))


def _metric_finding(match: RuleMatch, files: RunFiles) -> Finding:
    rule = match.rule
    if isinstance(rule, StepRule):
        detail = f"{rule.summary} in {len(match.steps)} of {len(files.step_rows)} steps"
        holds_at_end = match.steps[-1] == max(row["step"] for row in files.step_rows)
        state: State = "fail" if holds_at_end else "warn"
    else:
        detail, state = f"{rule.summary}: {match.detail}", rule.state
    return Finding(rule.name, state, detail, rule.advice, _metric_evidence(match, files))


def _num_cut_off(episode: Episode) -> float:
    return sum(call.completion.finish is FinishReason.LENGTH for call in episode.calls)


def _has_failed(episode: Episode) -> float:
    return float(episode.failure is not None)


def _num_failed_calls(episode: Episode) -> float:
    return episode.metrics.get("tool/failed", 0.0)


def _lowest_logprob(episode: Episode) -> float:
    return max((-min(call.completion.logprobs, default=0.0) for call in episode.calls), default=0.0) + 1e-9


def _is_context_full(episode: Episode) -> float:
    return episode.stop is StopReason.CONTEXT_FULL


EVIDENCE_SCORES: dict[str, Callable[[Episode], float]] = {
    "failed": _has_failed,
    "episodes_fail": _has_failed,
    "cut_off": _num_cut_off,
    "cut_off_often": _num_cut_off,
    "prompts_too_long": _is_context_full,
    "context_often_full": _is_context_full,
    "out_of_turns": lambda episode: episode.stop is StopReason.MAX_TURNS,
    "length_explodes": lambda episode: episode.sampled,
    "all_invalid": lambda episode: 1.0 - episode.metrics.get("valid", 0.0),
    "format_lost": lambda episode: 1.0 - episode.metrics.get("valid", 1.0),
    "calls_cut_off": _num_cut_off,
    "tools_fail": _num_failed_calls,
    "calls_unreadable": _num_failed_calls,
    "tool_misused": _num_failed_calls,
    "tool_broken": _num_failed_calls,
    "reward_hacked": lambda episode: (1.0 + episode.reward) * (episode.metrics.get("success", 0.0) < 1),
    "logprob_diff_high": _lowest_logprob,
    "logprob_diff_grows": _lowest_logprob,
}
"""How well an episode shows a fault; 0 or less: not at all. Other faults show the episodes with the lowest reward."""


def _metric_evidence(match: RuleMatch, files: RunFiles) -> tuple[Evidence, ...]:
    """The episodes of the last two matching steps that show the fault best."""
    steps = [step for step in match.steps if step in files.episode_paths][-2:]
    episodes = files.episodes(steps)
    score = EVIDENCE_SCORES.get(match.rule.name)
    if score is None:
        episodes = sorted(episodes, key=lambda one: one.episode.reward)
    else:
        episodes = sorted(
            (one for one in episodes if score(one.episode) > 0), key=lambda one: score(one.episode), reverse=True
        )
    return tuple(evidence(one, _describe(one.episode)) for one in episodes[:MAX_EVIDENCE])


def _describe(episode: Episode) -> str:
    if episode.failure is not None:
        return one_line(episode.failure)
    return f"{episode.stop}, reward {episode.reward:.3g}, {episode.sampled} tokens"
