"""Alarms are rules of the diagnosis, with the same conditions and numbers."""

from __future__ import annotations

import math
import random

import pytest

from arborl.diagnosis.alarms import ALARMS, find_alarm
from arborl.diagnosis.folder_diagnosis import match_rules
from arborl.diagnosis.metric_history import PATIENCE, MetricHistory
from arborl.diagnosis.run_monitor import ALARM_HINT, DiagnosisMonitor

STEP = {"episode/count": 8.0, "reward/mean": 0.5, "policy/loss": 0.1, "learner/grad_norm": 0.3}


def rows(*changes: dict) -> list[dict]:
    return [{"step": number, **STEP, **one} for number, one in enumerate(changes, start=1)]


def series(name: str, values) -> list[dict]:
    return rows(*({name: value} for value in values))


def wavy(values, size: float = 0.02) -> list[float]:
    generator = random.Random(0)
    return [value + generator.uniform(-size, size) for value in values]


CASES = {
    "not_finite_repeated": (rows({}, {}, *[{"policy/loss": math.nan}] * PATIENCE), 3),
    "lr_too_high": (rows({"episode/valid": 1.0}, {"episode/valid": 0.9}, {"episode/valid": 0.0, "reward/mean": -9.0},
                         {"episode/valid": 0.0, "reward/mean": -9.0}), 3),
    "reward_falls": (series("reward/mean", wavy([1 - 0.05 * step for step in range(12)])), 9),
    "reward_collapsed": (
        series("reward/mean", wavy([0.1 + 0.04 * step for step in range(20)] + [0.2] * 6)), 21),
    "far_from_reference": (series("policy/kl", [0.1, 0.2, 0.3, 0.4, 0.8, 0.9, 1.0, 1.1, 1.2]), 7),
    "entropy_collapsed": (
        rows(*({"policy/entropy": 1.0 if step < 4 else 0.001, "group/zero_variance": 0.9} for step in range(12))), 9),
    "length_explodes": (series("episode/sampled", wavy([20 + 10 * step for step in range(12)])), 9),
    "logprob_diff_high": (series("policy/logprob_diff", [0.2, 0.2]), 1),
    "logprob_diff_grows": (series("policy/logprob_diff", [0.001, 0.001, 0.001, 0.01, 0.02, 0.02, 0.03]), 6),
    "engine_stale": (series("engine/probe_gap", [0.0, 0.0, 0.5]), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ALARMS))
def test_an_alarm_is_what_the_doctor_finds_in_the_same_rows(name):
    given, first_step = CASES[name]
    alarm = find_alarm(MetricHistory(given))
    assert alarm is not None
    assert (alarm.rule.name, alarm.step, alarm.first_step) == (name, len(given), first_step)
    found = next(match for match in match_rules(given) if match.rule.name == name)
    assert (found.rule, found.detail) == (alarm.rule, alarm.detail)
    assert alarm.last_healthy_step == max(first_step - 2, 0)


def test_one_or_two_skipped_updates_are_no_alarm():
    skipped = {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0}
    for changes in ([skipped], [{}, skipped, skipped], [*[skipped] * PATIENCE, {}]):
        assert find_alarm(MetricHistory(rows(*changes))) is None
    assert find_alarm(MetricHistory(rows({}, *[skipped] * PATIENCE))) is not None


def test_steps_without_terms_are_no_alarm():
    nothing = {"learner/skipped": 1.0, "learner/skipped/no_terms": 1.0, "learner/skipped/gradient": 0.0}
    given = rows(*[nothing] * 9)
    for row in given:
        del row["policy/loss"], row["learner/grad_norm"]
    assert find_alarm(MetricHistory(given)) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_reward_that_rises_are_no_alarm(seed):
    generator, noise, rising = random.Random(seed), MetricHistory(), MetricHistory()
    for step in range(1, 301):
        for history, level in ((noise, 0.5), (rising, min(0.1 + 0.005 * step, 0.8))):
            history.add({"step": step, **STEP, "reward/mean": level + generator.gauss(0, 0.1)})
            assert find_alarm(history) is None


def test_a_jump_long_before_the_reward_fell_is_not_its_cause():
    entropy = [0.1, 1.0, *[1.0] * 40, 3.0]
    reward = [*wavy([0.2 + 0.02 * step for step in range(42)]), *[-5.0] * 4]
    given = [{"step": step, **STEP, "policy/entropy": e, "reward/mean": r}
             for step, (e, r) in enumerate(zip([*entropy, 3.0, 3.0, 3.0], reward, strict=True), start=1)]  # fmt: skip
    jump = next(match for match in match_rules(given) if match.rule.name == "lr_too_high")
    assert jump.steps == (43,)


@pytest.mark.parametrize(("late_success", "is_found"), [(0.8, True), (1.2, False)])
def test_episodes_that_grow_after_the_best_success_are_found_and_growth_with_success_is_not(late_success, is_found):
    success = wavy([*(0.1 + 0.04 * step for step in range(20)), *[0.9] * 10, *[late_success] * 8])
    length = wavy([*[20.0] * 30, *[90.0] * 8], size=2)
    given = rows(*({"episode/success": s, "episode/sampled": n} for s, n in zip(success, length, strict=True)))
    found = [match.detail for match in match_rules(given) if match.rule.name == "length_explodes"]
    assert bool(found) == is_found
    assert all("where success was highest" in detail for detail in found)


def test_a_warning_about_an_alarm_names_the_setting():
    monitor = DiagnosisMonitor()
    given, _ = CASES["lr_too_high"]
    warnings = [text for row in given for text in monitor.add(row)]
    assert [text.endswith(ALARM_HINT) for text in warnings if text.startswith("The policy jumps")] == [True]


def test_a_monitor_that_is_restored_from_rows_continues_like_the_former():
    given, _ = CASES["reward_collapsed"]
    whole = DiagnosisMonitor()
    for row in given:
        whole.add(row)
    for cut in (3, 20, len(given)):
        monitor = DiagnosisMonitor()
        monitor.restore([{"step": 0, "evaluation/success": 0.1}, *given[:cut]])
        for row in given[cut:]:
            monitor.add(row)
        assert monitor.alarm() == whole.alarm() is not None
        assert monitor.history.last_step == len(given)
