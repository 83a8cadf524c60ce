"""The questions about a run's course, one small function each; `trends.py` lists them with what to do.

Each answers with what is wrong and where to look, or with nothing. It answers only where that is hardly chance: a run
that is well must not be talked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from arborl.trainer.course import Course, Series


@dataclass(frozen=True, slots=True)
class Seen:
    """A trend as it is in one run."""

    detail: str
    """With its numbers."""
    steps: tuple[int, ...]
    """Where to look."""


# ------------------------------------------------------------------------------------------------ the policy


def entropy_collapsed(course: Course) -> Seen | None:
    own = course["policy/entropy"]
    gone = own.long and own.late < 0.02 and own.late < 0.1 * own.early
    if not gone or course.solved or course.late("group/zero_variance") < 0.5:
        return None
    return Seen(_moved("entropy", own, "nats a token"), own.latest)


def too_far_at_once(course: Course) -> Seen | None:
    """Within a step the policy becomes another one, and what was earned is lost."""
    earned = course["reward/mean"]
    lost = len(earned) >= 3 and (earned.late < earned.early - 0.5 * abs(earned.early) or earned.change() < 0)
    if not lost:
        return None
    leaps: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
        ("policy/entropy", "entropy", lambda before, now: now > 2 * before + 0.5),
        ("learner/grad_norm", "the gradient", lambda before, now: now > max(20 * before, 5)),
        ("policy/kl", "KL to the reference", lambda before, now: now > max(5 * before, 0.5)),
        ("episode/valid", "the share of valid messages", lambda before, now: now < 0.3 * before and before > 0.5),
        ("call/cut_off", "the share of replies cut off", lambda before, now: now > 0.8 and before < 0.3),
    )
    for name, what, holds in leaps:
        own = list(course[name])
        for (_, before), (step, now) in pairwise(own):
            if holds(before, now):
                leapt = f"{what} went from {before:.3g} to {now:.3g} at step {step}"
                return Seen(f"{leapt}, and {_moved('reward', earned)}", (step,))
    return None


def gradient_spikes(course: Course) -> Seen | None:
    own = course["learner/grad_norm"]
    if not own.long:
        return None
    high = _where(own, lambda value: value > max(20 * own.middle, 5.0))
    return Seen(f"up to {max(own.values):.3g}, the median is {own.middle:.3g}", high) if high else None


def far_from_reference(course: Course) -> Seen | None:
    own = course["policy/kl"]
    if not own.long or own.late < 1:
        return None
    return Seen(f"{own.late:.2f} nats a token at the end", own.latest)


def clipped(course: Course) -> Seen | None:
    own = course["policy/clipped"]
    if not own.long or own.late < 0.4:
        return None
    return Seen(f"{own.late:.0%} of tokens at the end", own.latest)


def not_a_number(course: Course) -> Seen | None:
    names = ("policy/loss", "policy/entropy", "policy/kl", "policy/value_loss", "reward/mean")
    bad = {name: course.not_finite[name] for name in names if course.not_finite.get(name)}
    skipped = _where(course["learner/skipped/gradient"], lambda share: share > 0)
    left_out = {why: _total(course[f"dropped/{why}"]) for why in ("not_finite", "reward_not_finite")}
    told = [f"{name} at {len(steps)} steps" for name, steps in bad.items()]
    told += [f"{count:.0f} dropped for {why}" for why, count in left_out.items() if count]
    told += [f"{len(skipped)} updates without a finite gradient"] if skipped else []
    steps = {step for own in bad.values() for step in own} | set(skipped)
    steps |= {step for why in left_out for step in _where(course[f"dropped/{why}"], lambda count: count > 0)}
    return Seen(", ".join(told), tuple(sorted(steps))) if told else None


# ------------------------------------------------------------------------------------------------ engine and learner


def wide_gap(course: Course) -> Seen | None:
    """On tokens of the very weights that learn, so that nothing but numerics can differ."""
    own, lag = course["policy/logprob_diff"], dict(course["batch/lag_mean"])
    wide = tuple(step for step, gap in own if gap > 0.05 and not lag.get(step))
    if 2 * len(wide) < len(own) or not wide:
        return None
    return Seen(f"exp|Δ| - 1 is {max(own.values):.3g} on average over tokens", wide)


def growing_gap(course: Course) -> Seen | None:
    own = course["policy/logprob_diff"]
    apart = own.long and min(own.values[-own.window :]) > max(own.values[: own.window])
    if not apart or own.late < max(5 * own.early, 0.01):
        return None
    return Seen(_moved("exp|Δ| - 1", own), own.latest)


def stale_engine(course: Course) -> Seen | None:
    own = course["engine/probe_gap"]
    wide = _where(own, lambda gap: gap > 0.25)
    return Seen(f"up to {max(own.values):.3g} nats", wide) if wide else None


def stale_tokens(course: Course) -> Seen | None:
    thrown = _total(course["rollout/dropped_stale"])
    played = _total(course["episode/count"])
    if thrown < 8 or thrown < 0.25 * (played + thrown):
        return None
    where = _where(course["rollout/dropped_stale"], lambda count: count > 0)
    return Seen(f"{thrown:.0f} episodes thrown away, {played:.0f} learned from", where)


# ------------------------------------------------------------------------------------------------ what is said


def length_explodes(course: Course) -> Seen | None:
    own = course["episode/sampled"]
    if own.change() <= 0 or own.late < 2.5 * max(own.early, 8) or course["episode/success"].change() > 0:
        return None
    return Seen(_moved("sampled tokens an episode", own), own.latest)


def cut_off_often(course: Course) -> Seen | None:
    return _share(course["call/cut_off"], 0.3, "of replies end at sampling.max_tokens")


def context_often_full(course: Course) -> Seen | None:
    return _share(course["stop/context_full"], 0.3, "of episodes end because the context is full")


def out_of_turns(course: Course) -> Seen | None:
    if course["episode/success"].change() > 0 or course.late("episode/success") > 0.5:
        return None
    return _share(course["stop/max_turns"], 0.8, "of episodes end at rollout.max_turns")


def form_lost(course: Course) -> Seen | None:
    own = course["episode/valid"]
    if own.change() >= 0 or own.early < 0.6 or own.late > 0.6 * own.early:
        return None
    return Seen(_moved("share of messages that the environment understands", own), own.latest)


# ------------------------------------------------------------------------------------------------ rewards


def reward_always_same(course: Course) -> Seen | None:
    own, spread = course["reward/mean"], course["reward/std"]
    known = spread.long and own.long and not any(spread.values)
    if not known or max(own.values) - min(own.values) > 1e-9 or course.solved:
        return None
    return Seen(f"every episode of {len(own)} steps earned {own.values[0]:g}", tuple(own.steps))


def mostly_flat(course: Course) -> Seen | None:
    """And not all: of steps with flat groups alone, each says so itself."""
    own = course["group/zero_variance"]
    better = course.late("episode/success") > 0.75 or course["reward/mean"].change() > 0
    if not own.long or not 0.8 <= own.late < 1 or better:
        return None
    return Seen(f"{own.late:.0%} of groups at the end", own.latest)


def reward_falls(course: Course) -> Seen | None:
    own = course["reward/mean"]
    if own.change(0.05 * (max(own.values, default=0) - min(own.values, default=0))) >= 0:
        return None
    if course["episode/success"].change() > 0:  # it is paid less for more
        return None
    return Seen(_moved("reward", own), own.latest)


def reward_hacked(course: Course) -> Seen | None:
    """Paid more and more for doing no better, or worse, by the environment's own word or on held-out tasks."""
    earned, done = course["reward/mean"], course["episode/success"]
    if earned.change() <= 0 or course.late("reward/std") == 0 == course.late("group/zero_variance"):
        return None
    if done.change() < 0:
        return Seen(f"{_moved('reward', earned)}, while {_moved('success', done)}", earned.latest)
    held = course["evaluation/success"]
    if len(held) >= 2 and _certainly_fell(course, "success"):
        told = f"success on held-out tasks went from {held.values[0]:.2f} to {held.values[-1]:.2f}"
        return Seen(f"{_moved('reward', earned)}, while {told}", earned.latest)
    return None


def evaluation_worse(course: Course) -> Seen | None:
    for measure in ("success", "reward"):
        own = course[f"evaluation/{measure}"]
        if len(own) >= 2 and _certainly_fell(course, measure):
            told = f"held-out {measure} went from {own.values[0]:.3g} to {own.values[-1]:.3g}"
            return Seen(f"{told}; the intervals do not touch", (own.steps[-1],))
    own = course["evaluation/loss"]
    if len(own) >= 2 and own.values[-1] > own.values[0] + 0.02 * abs(own.values[0]):
        told = f"held-out loss went from {own.values[0]:.3g} to {own.values[-1]:.3g}"
        return Seen(told, (own.steps[-1],))
    return None


def nothing_gained(course: Course) -> Seen | None:
    """Of a run that has been long: its last third earned no more than its first."""
    own, held = course["reward/mean"], course["evaluation/success"]
    third = len(own) // 3
    if len(own) < 30 or course.solved or fmean(own.values[-third:]) > fmean(own.values[:third]):
        return None
    if len(held) >= 2 and held.values[-1] > held.values[0]:
        return None
    return Seen(f"{_moved('reward', own)} in {len(own)} steps", own.latest)


# ------------------------------------------------------------------------------------------------ episodes and tools


def some_fail(course: Course) -> Seen | None:
    failed, played = _total(course["episode/failed"]), _total(course["episode/count"])
    if len(course["episode/count"]) < 3 or failed < max(0.05 * played, 3):
        return None
    parts = sorted(((_total(own), where) for where, own in course.named("failed/").items()), reverse=True)
    by = ", ".join(f"{where} {count:.0f}" for count, where in parts[:3])
    where = _where(course["episode/failed"], lambda count: count > 0)
    return Seen(f"{failed:.0f} of {played:.0f} episodes failed ({by})", where)


def hanging(course: Course) -> Seen | None:
    for name in ("rollout/threads_stuck", "rollout/tool_calls_stuck", "rewards/calls_stuck", "rollout/processes_hung"):
        own = course[name]
        if where := _where(own, lambda count: count > 0):
            return Seen(f"{name} is up to {max(own.values):.0f}", where)
    return None


LOST = (
    ("engine/lost", "engine/seconds_lost", "engine"),
    ("rollout/processes_replaced", "rollout/seconds_lost", "process of environments"),
    ("rewards/lost", "rewards/seconds_lost", "reward worker"),
    ("learner/lost", "learner/seconds_lost", "rank of the learner"),
)
"""How many, for how long, and what."""


def parts_lost(course: Course) -> Seen | None:
    """With the time that it cost: of engines and reward workers how long they were gone, of environments how long
    episodes waited."""
    found = [(_total(course[count]), _total(course[seconds]), what, course[count]) for count, seconds, what in LOST]
    found = [one for one in found if one[0]]
    if not found:
        return None
    told = [f"{count:.0f} × {what}, {seconds:.1f} s" for count, seconds, what, _ in found]
    where = sorted({step for *_, own in found for step in _where(own, lambda count: count > 0)})
    return Seen("; ".join(told), tuple(where))


def groups_missing(course: Course) -> Seen | None:
    lost, kept = _total(course["rollout/missing"]), _total(course["learner/groups"])
    if not course["rollout/missing"].long or lost < max(0.3 * (lost + kept), 1):
        return None
    where = _where(course["rollout/missing"], lambda count: count > 0)
    return Seen(f"{lost:.0f} groups are missing from the batches, {kept:.0f} were learned from", where)


def calls_unreadable(course: Course) -> Seen | None:
    return _failing_calls(course, ("malformed",), "cannot be read")


def tool_misused(course: Course) -> Seen | None:
    return _failing_calls(
        course, ("unknown_tool", "arguments"), "name a tool that is not there, or give it wrong arguments"
    )


def tool_dead(course: Course) -> Seen | None:
    return _failing_calls(course, ("exception", "timeout"), "end in an exception or a timeout of the tool")


def tools_unused(course: Course) -> Seen | None:
    offered, used = course["episode/tool/offered"], course["episode/tool/used"]
    if not offered.long or not offered.late:
        return None
    now = used.late if len(used) else 0.0
    if now > 0.02:
        return None
    before = f", {used.early:.0%} at the beginning" if len(used) and used.early > 0.02 else ""
    return Seen(f"{now:.0%} of episodes call one of {offered.late:.0f} tools{before}", offered.latest)


# ------------------------------------------------------------------------------------------------ what they share


def _share(own: Series, most: float, told: str) -> Seen | None:
    if not own.long or own.late <= most:
        return None
    return Seen(f"{own.late:.0%} {told}", own.latest)


def _failing_calls(course: Course, kinds: tuple[str, ...], told: str) -> Seen | None:
    calls = course["episode/tool/calls"]
    bad = sum(course.late(f"episode/tool/{kind}") for kind in kinds)
    if not calls.long or bad <= 0.5 * calls.late or not calls.late:
        return None
    return Seen(f"{bad / calls.late:.0%} of calls {told}", calls.latest)


def _certainly_fell(course: Course, measure: str) -> bool:
    """Whether the last evaluation's interval lies below the first's."""
    high, low = course[f"evaluation/{measure}_high"], course[f"evaluation/{measure}_low"]
    return len(high) >= 2 and len(low) >= 2 and high.values[-1] < low.values[0]


def _where(own: Series, holds: Callable[[float], bool]) -> tuple[int, ...]:
    return tuple(step for step, value in own if holds(value))


def _total(own: Series) -> float:
    return sum(own.values)


def _moved(what: str, own: Series, unit: str = "") -> str:
    return f"{what} went from {own.early:.3g} to {own.late:.3g}{f' {unit}' if unit else ''}"
