"""What is wrong with a run, from its folder alone: while it goes on, or later. Without torch.

Rules about metrics are the trainer's own; here they get a state and episodes as evidence. Rules about episodes are in
`episode_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from arborl.doctor.episode_rules import EPISODE_RULES, SHOWN, evidence
from arborl.doctor.finding import Evidence, Finding, State, worst_first
from arborl.doctor.run_files import Played, RunFiles
from arborl.failures import one_line
from arborl.trainer.diagnosis import FINE_STEP, PATIENCE, Diagnosis, Notice, notices
from arborl.types import Episode, FinishReason, StopReason


def examine_run(folder: Path) -> list[Finding]:
    """How the run stands, and what is wrong with it, the worst first.

    Example:
        for finding in examine_run(Path("runs/frozen-lake-001")):
            print(finding.state, finding.name, finding.detail, finding.advice, *finding.evidence)
    """
    files = RunFiles(folder)
    found = [_from_notice(notice, files) for notice in notices(files.rows) if _counts(notice, files)]
    for rule in EPISODE_RULES:
        if (shown := rule.look(files)) is not None:
            found.append(Finding(rule.name, rule.state, shown.detail, rule.advice, shown.evidence))
    return [_standing(files), *_execution(files), *worst_first([*found, *_unread(files)])]


def _execution(files: RunFiles) -> list[Finding]:
    """What the run's model is executed on, and whether fast paths are missing."""
    if not files.execution:
        return []
    detail = ", ".join(f"{name}: {value}" for name, value in files.execution.items())
    slow = sum((files.rows[-1].get(f"{part}/fallbacks") or 0) for part in ("engine", "learner")) if files.rows else 0
    if not slow:
        return [Finding("execution", "ok", detail)]
    return [Finding("execution", "warn", detail, "Faster execution paths are not used; run.log has one line for each.")]


def _standing(files: RunFiles) -> Finding:
    """The run in one row."""
    steps = [row for row in files.rows if "episode/count" in row]
    asked = files.setting("trainer.steps")
    played = sum(row["episode/count"] or 0 for row in steps)
    ended = "finished" if files.summary else "running, or ended before its time"
    if files.summary.get("stopped"):
        causes = files.summary.get("failures") or [{}]
        where = causes[0].get("failure", {})
        detail = (
            f"stopped at step {len(steps)}: nearly every episode failed ({where.get('where')}: {where.get('kind')})"
        )
        return Finding("run", "fail", detail, "Mend that; summary.json has the causes with their tracebacks.")
    told = f"{len(steps)}{f' of {asked}' if asked else ''} steps, {played:.0f} episodes, {ended}"
    if not steps:
        return Finding("run", "warn", told, "No step is done yet: look again when there is one; run.log says more.")
    kept = "" if files.steps else "; episodes were not kept, so only metrics were looked at"
    return Finding("run", "ok", told + kept)


def _unread(files: RunFiles) -> list[Finding]:
    """Files that were torn or are no longer what they were."""
    told = dict.fromkeys(files.problems)
    advice = "Something else wrote there, or the disk was full: leave the file out, and look at the rest."
    return [Finding("files", "warn", problem, advice) for problem in told]


# ------------------------------------------------------------------------------------------------ metrics


def _counts(notice: Notice, files: RunFiles) -> bool:
    """Whether it is worth a word. A single step in which nothing is learned is not: chance does that."""
    if not isinstance(notice.rule, Diagnosis):
        return True
    return notice.rule.name not in FINE_STEP and _longest(notice, files) >= min(PATIENCE, _steps(files))


def _from_notice(notice: Notice, files: RunFiles) -> Finding:
    rule = notice.rule
    if isinstance(rule, Diagnosis):
        detail = f"{rule.short} in {len(notice.steps)} of {_steps(files)} steps"
        lasting = notice.steps[-1] == max(row["step"] for row in files.rows if "episode/count" in row)
        state: State = "fail" if lasting else "warn"
    else:
        detail, state = f"{rule.short}: {notice.detail}", rule.state
    return Finding(rule.name, state, detail, rule.advice, _shown_by(notice, files))


def _steps(files: RunFiles) -> int:
    return sum("episode/count" in row for row in files.rows)


def _longest(notice: Notice, files: RunFiles) -> int:
    """Steps in a row."""
    longest = count = 0
    for row in files.rows:
        if "episode/count" in row:
            count = count + 1 if row["step"] in notice.steps else 0
            longest = max(longest, count)
    return longest


# ------------------------------------------------------------------------------------------------ evidence

Worth = Callable[[Episode], float]
"""How well an episode shows something; 0 or less: not at all."""


def _cut(episode: Episode) -> float:
    return sum(call.completion.finish is FinishReason.LENGTH for call in episode.calls)


def _failed(episode: Episode) -> float:
    return float(episode.failure is not None)


def _bad_calls(episode: Episode) -> float:
    return episode.metrics.get("tool/failed", 0.0)


def _unlikeliest(episode: Episode) -> float:
    """How unlikely its least likely token was."""
    return max((-min(call.completion.logprobs, default=0.0) for call in episode.calls), default=0.0) + 1e-9


def _no_success(episode: Episode) -> float:
    return (1.0 + episode.reward) * (episode.metrics.get("success", 0.0) < 1)


SHOWS: dict[str, Worth] = {
    "failed": _failed,
    "some_fail": _failed,
    "cut_off": _cut,
    "cut_off_often": _cut,
    "prompts_too_long": lambda episode: episode.stop is StopReason.CONTEXT_FULL,
    "context_often_full": lambda episode: episode.stop is StopReason.CONTEXT_FULL,
    "out_of_turns": lambda episode: episode.stop is StopReason.MAX_TURNS,
    "length_explodes": lambda episode: episode.sampled,
    "all_invalid": lambda episode: 1.0 - episode.metrics.get("valid", 0.0),
    "form_lost": lambda episode: 1.0 - episode.metrics.get("valid", 1.0),
    "tools_fail": _bad_calls,
    "calls_unreadable": _bad_calls,
    "tool_misused": _bad_calls,
    "tool_dead": _bad_calls,
    "reward_hacked": _no_success,
    "gap_wide": _unlikeliest,
    "gap_growing": _unlikeliest,
}
"""Which episodes to name; where nothing else is said, those that earned least."""


def _shown_by(notice: Notice, files: RunFiles) -> tuple[Evidence, ...]:
    """The episodes of its last steps that show it best."""
    steps = [step for step in notice.steps if step in files.steps][-2:]
    played = files.of(steps)
    worth = SHOWS.get(notice.rule.name)
    if worth is None:
        chosen: Sequence[Played] = sorted(played, key=lambda one: one.episode.reward)
    else:
        chosen = sorted((one for one in played if worth(one.episode) > 0), key=lambda one: -worth(one.episode))
    return tuple(evidence(one, _why(one.episode)) for one in chosen[:SHOWN])


def _why(episode: Episode) -> str:
    if episode.failure is not None:
        return one_line(episode.failure)
    return f"{episode.stop}, reward {episode.reward:.3g}, {episode.sampled} tokens"
