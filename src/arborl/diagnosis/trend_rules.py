"""Rules about the metrics of several steps. Rules about one step are in `step_rules.py`.

A rule matches only where chance hardly explains the numbers: a healthy run must not be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from arborl.diagnosis.finding import RULE_TEXTS
from arborl.diagnosis.metric_history import (
    MIN_STEPS,
    NUM_STANDARD_ERRORS,
    PATIENCE,
    MetricHistory,
    MetricSeries,
    Steps,
    mean,
    window_means,
)

NUM_ERRORS_OF_BEST = 6.0
"""Standard errors between the best and the last mean that count as a fall: the best of many is high by chance."""


@dataclass(frozen=True, slots=True)
class TrendMatch:
    """The numbers behind a trend in one run, and the steps that show it."""

    detail: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrendRule:
    """One thing that can go wrong with a run over its steps."""

    name: str
    check: Callable[[MetricHistory], TrendMatch | None]
    summary: str
    advice: str
    state: Literal["warn", "fail"] = "warn"


def _change_text(what: str, series: MetricSeries, unit: str = "") -> str:
    return f"{what} went from {series.early:.3g} to {series.late:.3g}{f' {unit}' if unit else ''}"


def _share_above(name: str, limit: float, text: str, history: MetricHistory) -> TrendMatch | None:
    series = history[name]
    if not series.is_long or series.late <= limit:
        return None
    return TrendMatch(f"{series.late:.0%} {text}", series.last_steps)


# ------------------------------------------------------------------------------------------------ policy


def entropy_collapsed(history: MetricHistory) -> TrendMatch | None:
    entropy = history["policy/entropy"]
    has_collapsed = entropy.is_long and entropy.late < 0.02 and entropy.late < 0.1 * entropy.early
    if not has_collapsed or history.is_solved or history.late("group/zero_variance") < 0.5:
        return None
    return TrendMatch(_change_text("entropy", entropy, "nats per token"), entropy.last_steps)


JUMPS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
    ("policy/entropy", "entropy", lambda before, now: now > 2 * before + 0.5),
    ("learner/grad_norm", "the gradient norm", lambda before, now: now > np.maximum(20 * before, 5)),
    ("policy/kl", "KL to the reference", lambda before, now: now > np.maximum(5 * before, 0.5)),
    ("episode/valid", "the share of valid messages", lambda before, now: (now < 0.3 * before) & (before > 0.5)),
    ("call/cut_off", "the share of completions cut off", lambda before, now: (now > 0.8) & (before < 0.3)),
)
"""Metric, its name in the message, and which changes from one step to the next are jumps (of arrays)."""


def policy_jumped(history: MetricHistory) -> TrendMatch | None:
    """The policy changed within one step, and the reward was lost: its mean before that step is never reached again."""
    reward = history["reward/mean"]
    if len(reward) < 3 or not (reward.late < reward.early - 0.5 * abs(reward.early) or reward.change() < 0):
        return None
    for name, what, is_jump in JUMPS:
        series = history[name]
        jumps = 1 + np.flatnonzero(is_jump(series.values[:-1], series.values[1:]))
        jumps = jumps[_is_lower_from(reward, series.steps[jumps])]
        if len(jumps):
            step, (before, now) = int(series.steps[jumps[0]]), series.values[jumps[0] - 1 : jumps[0] + 1]
            jump = f"{what} went from {before:.3g} to {now:.3g} at step {step}"
            return TrendMatch(f"{jump}, and {_change_text('reward', reward)}", (step,))
    return None


def _is_lower_from(series: MetricSeries, steps: Steps) -> Any:
    """For each of these steps, whether the mean before it is never reached again."""
    values, window = series.values, series.window
    highest_later = np.maximum.accumulate(series.window_means[::-1])[::-1]  # of windows that begin here or later
    lower = np.zeros(len(steps), dtype=bool)
    for index, begin in enumerate(np.searchsorted(series.steps, steps).tolist()):
        if not 0 < begin < len(values):
            continue
        after = values[begin:]
        highest = highest_later[begin] if len(after) >= window else mean(after)
        lower[index] = highest < mean(values[max(0, begin - window) : begin])
    return lower


def gradient_spikes(history: MetricHistory) -> TrendMatch | None:
    norm = history["learner/grad_norm"]
    if not norm.is_long:
        return None
    limit = max(20 * norm.median, 5.0)
    steps = norm.steps_where(lambda values: values > limit)
    return TrendMatch(f"up to {norm.highest:.3g}, the median is {norm.median:.3g}", steps) if steps else None


def far_from_reference(history: MetricHistory) -> TrendMatch | None:
    kl = history["policy/kl"]
    if not kl.is_long or kl.late < 1:
        return None
    return TrendMatch(f"{kl.late:.2f} nats per token at the end", kl.last_steps)


def not_finite(history: MetricHistory) -> TrendMatch | None:
    names = ("policy/loss", "policy/entropy", "policy/kl", "policy/value_loss", "reward/mean")
    metrics = {name: history.not_finite[name] for name in names if history.not_finite.get(name)}
    skipped = history["learner/skipped/gradient"].steps_where(lambda values: values > 0)
    dropped = {cause: history[f"dropped/{cause}"] for cause in ("not_finite", "reward_not_finite")}
    parts = [f"{name} at {len(steps)} steps" for name, steps in metrics.items()]
    parts += [f"{series.total:.0f} dropped for {cause}" for cause, series in dropped.items() if series.total]
    parts += [f"{len(skipped)} updates without a finite gradient"] if skipped else []
    steps = {step for one in metrics.values() for step in one} | set(skipped)
    steps |= {step for series in dropped.values() for step in series.steps_where(lambda values: values > 0)}
    return TrendMatch(", ".join(parts), tuple(sorted(steps))) if parts else None


def not_finite_repeated(history: MetricHistory) -> TrendMatch | None:
    """Each of the last steps: one step whose update is skipped costs only itself."""
    steps = {step for name in ("policy/loss", "learner/grad_norm") for step in history.not_finite.get(name, ())}
    for cause in ("gradient", "not_finite"):
        steps |= set(history[f"learner/skipped/{cause}"].steps_where(lambda values: values > 0))
    if len(steps) < PATIENCE:
        return None
    trained = sorted({*history["episode/count"].steps.tolist(), *steps})
    last = list(takewhile(lambda step: step in steps, reversed(trained)))
    if len(last) < PATIENCE:
        return None
    return TrendMatch(f"loss or gradient of the last {len(last)} steps", tuple(reversed(last)))


# ------------------------------------------------------------------------------------------------ engine and learner


def logprob_diff_high(history: MetricHistory) -> TrendMatch | None:
    """On tokens that the current weights sampled, so that only numerics can differ."""
    difference, lag = history["policy/logprob_diff"], history["batch/lag_mean"]
    is_current = ~np.isin(difference.steps, lag.steps[lag.values != 0])
    steps = difference.steps_where(lambda values: (values > 0.05) & is_current)
    if 2 * len(steps) < len(difference) or not steps:
        return None
    return TrendMatch(f"exp|Δ| - 1 is {difference.highest:.3g} on average over tokens", steps)


def logprob_diff_grows(history: MetricHistory) -> TrendMatch | None:
    difference = history["policy/logprob_diff"]
    window = difference.window
    has_grown = difference.is_long and difference.values[-window:].min() > difference.values[:window].max()
    if not has_grown or difference.late < max(5 * difference.early, 0.01):
        return None
    return TrendMatch(_change_text("exp|Δ| - 1", difference), difference.last_steps)


def engine_stale(history: MetricHistory) -> TrendMatch | None:
    difference = history["engine/probe_gap"]
    steps = difference.steps_where(lambda values: values > 0.25)
    return TrendMatch(f"up to {difference.highest:.3g} nats", steps) if steps else None


def stale_dropped(history: MetricHistory) -> TrendMatch | None:
    stale = history["rollout/dropped_stale"]
    trained = history["episode/count"].total
    if stale.total < 8 or stale.total < 0.25 * (trained + stale.total):
        return None
    detail = f"{stale.total:.0f} episodes dropped, {trained:.0f} trained on"
    return TrendMatch(detail, stale.steps_where(lambda values: values > 0))


# ------------------------------------------------------------------------------------------------ messages


def length_explodes(history: MetricHistory) -> TrendMatch | None:
    """Episodes became longer and not better: since the beginning, or since success was highest if it has risen."""
    length, success = history["episode/sampled"], history["episode/success"]
    if not length.is_long:
        return None
    best = success.best_step if success.change() > 0 else None
    before = length.early if best is None else length.mean_until(best)
    if length.late - before <= NUM_STANDARD_ERRORS * length.standard_error or length.late < 2.5 * max(before, 8):
        return None
    since = "" if best is None else f" after step {best}, where success was highest"
    return TrendMatch(
        f"sampled tokens per episode went from {before:.3g} to {length.late:.3g}{since}", length.last_steps
    )


def out_of_turns(history: MetricHistory) -> TrendMatch | None:
    if history["episode/success"].change() > 0 or history.late("episode/success") > 0.5:
        return None
    return _share_above("stop/max_turns", 0.8, "of episodes end at rollout.max_turns", history)


def format_lost(history: MetricHistory) -> TrendMatch | None:
    valid = history["episode/valid"]
    if valid.change() >= 0 or valid.early < 0.6 or valid.late > 0.6 * valid.early:
        return None
    return TrendMatch(_change_text("share of messages that the environment can parse", valid), valid.last_steps)


# ------------------------------------------------------------------------------------------------ rewards


def reward_constant(history: MetricHistory) -> TrendMatch | None:
    reward, deviation = history["reward/mean"], history["reward/std"]
    is_constant = deviation.is_long and reward.is_long and not deviation.values.any()
    if not is_constant or reward.highest - reward.lowest > 1e-9 or history.is_solved:
        return None
    detail = f"every episode of {len(reward)} steps has reward {reward.values[0]:g}"
    return TrendMatch(detail, tuple(reward.steps.tolist()))


def mostly_zero_variance(history: MetricHistory) -> TrendMatch | None:
    """Most groups, not all: a step without any variance is reported by `step_rules.py`."""
    share = history["group/zero_variance"]
    is_learning = history.late("episode/success") > 0.75 or history["reward/mean"].change() > 0
    if not share.is_long or not 0.8 <= share.late < 1 or is_learning:
        return None
    return TrendMatch(f"{share.late:.0%} of groups at the end", share.last_steps)


def reward_falls(history: MetricHistory) -> TrendMatch | None:
    reward = history["reward/mean"]
    if not len(reward) or reward.change(0.05 * (reward.highest - reward.lowest)) >= 0:
        return None
    if history["episode/success"].change() > 0:
        return None
    return TrendMatch(_change_text("reward", reward), reward.last_steps)


def reward_collapsed(history: MetricHistory) -> TrendMatch | None:
    """The reward rose, and at least half of the gain is lost. `reward_falls` compares with the beginning only."""
    reward = history["reward/mean"]
    window = reward.window
    if len(reward) < MIN_STEPS + window:
        return None
    best = float(window_means(reward.values[:-window], window).max())
    lost = best - reward.late
    if best <= reward.early or lost < 0.5 * (best - reward.early) or lost < NUM_ERRORS_OF_BEST * reward.standard_error:
        return None
    reached = np.flatnonzero(reward.values >= best - 0.5 * lost)
    low = reward.steps[reached[-1] + 1 :] if len(reached) else reward.steps
    detail = f"reward went from {reward.early:.3g} to {best:.3g} and back to {reward.late:.3g}"
    return TrendMatch(detail, tuple(sorted({*reward.last_steps, *low.tolist()})))


def reward_hacked(history: MetricHistory) -> TrendMatch | None:
    """The reward rises while success falls, in training or on held-out tasks."""
    reward, success = history["reward/mean"], history["episode/success"]
    if reward.change() <= 0 or history.late("reward/std") == 0 == history.late("group/zero_variance"):
        return None
    if success.change() < 0:
        detail = f"{_change_text('reward', reward)}, while {_change_text('success', success)}"
        return TrendMatch(detail, reward.last_steps)
    held_out = history["evaluation/success"]
    if len(held_out) >= 2 and _certainly_fell(history, "success"):
        fell = f"success on held-out tasks went from {held_out.values[0]:.2f} to {held_out.values[-1]:.2f}"
        return TrendMatch(f"{_change_text('reward', reward)}, while {fell}", reward.last_steps)
    return None


def evaluation_worse(history: MetricHistory) -> TrendMatch | None:
    for name in ("success", "reward", "loss"):
        series = history[f"evaluation/{name}"]
        if len(series) < 2:
            continue
        first, last = series.values[0], series.values[-1]
        detail = f"held-out {name} went from {first:.3g} to {last:.3g}"
        if name == "loss" and last > first + 0.02 * abs(first):
            return TrendMatch(detail, (int(series.steps[-1]),))
        if name != "loss" and _certainly_fell(history, name):
            return TrendMatch(f"{detail}; the intervals do not overlap", (int(series.steps[-1]),))
    return None


def _certainly_fell(history: MetricHistory, name: str) -> bool:
    """Whether the last evaluation's interval lies below the first one's."""
    high, low = history[f"evaluation/{name}_high"], history[f"evaluation/{name}_low"]
    return len(high) >= 2 and len(low) >= 2 and bool(high.values[-1] < low.values[0])


def reward_unchanged(history: MetricHistory) -> TrendMatch | None:
    """The last third of a run of at least 30 steps has no higher reward than the first third."""
    reward = history["reward/mean"]
    held_out = history["evaluation/success"] if len(history["evaluation/success"]) else history["evaluation/reward"]
    third = len(reward) // 3
    if len(reward) < 30 or history.is_solved or reward.values[-third:].mean() > reward.values[:third].mean():
        return None
    if len(held_out) >= 2 and held_out.values[-1] > held_out.values[0]:
        return None
    return TrendMatch(f"{_change_text('reward', reward)} in {len(reward)} steps", reward.last_steps)


# ------------------------------------------------------------------------------------------------ episodes and tools


def episodes_fail(history: MetricHistory) -> TrendMatch | None:
    failed, num_episodes = history["episode/failed"], history["episode/count"].total
    if len(history["episode/count"]) < 3 or failed.total < max(0.05 * num_episodes, 3):
        return None
    parts = sorted(((series.total, part) for part, series in history.with_prefix("failed/").items()), reverse=True)
    causes = ", ".join(f"{part} {count:.0f}" for count, part in parts[:3])
    detail = f"{failed.total:.0f} of {num_episodes:.0f} episodes failed ({causes})"
    return TrendMatch(detail, failed.steps_where(lambda values: values > 0))


def calls_hang(history: MetricHistory) -> TrendMatch | None:
    for name in ("rollout/threads_stuck", "rollout/tool_calls_stuck", "rewards/calls_stuck", "rollout/processes_hung"):
        series = history[name]
        if steps := series.steps_where(lambda values: values > 0):
            return TrendMatch(f"{name} is up to {series.highest:.0f}", steps)
    return None


LOST_PROCESSES = (
    ("engine/lost", "engine/seconds_lost", "engine"),
    ("rollout/processes_replaced", "rollout/seconds_lost", "environment process"),
    ("rewards/lost", "rewards/seconds_lost", "reward worker"),
    ("learner/lost", "learner/seconds_lost", "learner rank"),
)
"""Metric of the count, metric of the lost seconds, and kind of process."""


def processes_lost(history: MetricHistory) -> TrendMatch | None:
    lost = [(history[count], history[seconds].total, kind) for count, seconds, kind in LOST_PROCESSES]
    lost = [one for one in lost if one[0].total]
    if not lost:
        return None
    detail = "; ".join(f"{count.total:.0f} × {kind}, {seconds:.1f} s" for count, seconds, kind in lost)
    steps = {step for count, *_ in lost for step in count.steps_where(lambda values: values > 0)}
    return TrendMatch(detail, tuple(sorted(steps)))


def groups_missing(history: MetricHistory) -> TrendMatch | None:
    missing, trained = history["rollout/missing"], history["learner/groups"].total
    if not missing.is_long or missing.total < max(0.3 * (missing.total + trained), 1):
        return None
    detail = f"{missing.total:.0f} groups are missing from the batches, {trained:.0f} were trained on"
    return TrendMatch(detail, missing.steps_where(lambda values: values > 0))


def _failing_calls(kinds: tuple[str, ...], text: str, history: MetricHistory) -> TrendMatch | None:
    calls = history["episode/tool/calls"]
    bad = sum(history.late(f"episode/tool/{kind}") for kind in kinds)
    if not calls.is_long or bad <= 0.5 * calls.late or not calls.late:
        return None
    return TrendMatch(f"{bad / calls.late:.0%} of calls {text}", calls.last_steps)


def tools_unused(history: MetricHistory) -> TrendMatch | None:
    offered, used = history["episode/tool/offered"], history["episode/tool/used"]
    share = used.late if len(used) else 0.0
    if not offered.is_long or not offered.late or share > 0.02:
        return None
    before = f", {used.early:.0%} at the beginning" if len(used) and used.early > 0.02 else ""
    return TrendMatch(f"{share:.0%} of episodes call one of {offered.late:.0f} tools{before}", offered.last_steps)


TREND_CHECKS: dict[str, Callable[[MetricHistory], TrendMatch | None]] = {
    "not_a_number": not_finite,
    "not_finite_repeated": not_finite_repeated,
    "lr_too_high": policy_jumped,
    "gradient_spikes": gradient_spikes,
    "far_from_reference": far_from_reference,
    "entropy_collapsed": entropy_collapsed,
    "clipped": partial(_share_above, "policy/clipped", 0.4, "of tokens at the end"),
    "logprob_diff_high": logprob_diff_high,
    "logprob_diff_grows": logprob_diff_grows,
    "engine_stale": engine_stale,
    "stale_dropped": stale_dropped,
    "length_explodes": length_explodes,
    "cut_off_often": partial(_share_above, "call/cut_off", 0.3, "of completions end at sampling.max_tokens"),
    "context_often_full": partial(
        _share_above, "stop/context_full", 0.3, "of episodes end because the context is full"
    ),
    "out_of_turns": out_of_turns,
    "format_lost": format_lost,
    "reward_constant": reward_constant,
    "mostly_zero_variance": mostly_zero_variance,
    "reward_falls": reward_falls,
    "reward_collapsed": reward_collapsed,
    "reward_hacked": reward_hacked,
    "evaluation_worse": evaluation_worse,
    "reward_unchanged": reward_unchanged,
    "episodes_fail": episodes_fail,
    "calls_hang": calls_hang,
    "processes_lost": processes_lost,
    "groups_missing": groups_missing,
    "calls_unreadable": partial(_failing_calls, ("malformed",), "cannot be parsed"),
    "tool_misused": partial(
        _failing_calls, ("unknown_tool", "arguments"), "name an unknown tool or have wrong arguments"
    ),
    "tool_broken": partial(_failing_calls, ("exception", "timeout"), "end in an exception or a timeout of the tool"),
    "tools_unused": tools_unused,
}
"""More specific rules first."""
TREND_RULES = tuple(TrendRule(name, check, **RULE_TEXTS[name]) for name, check in TREND_CHECKS.items())
