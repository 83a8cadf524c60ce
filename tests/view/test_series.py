"""Metrics as series for charts: axes, values that are not finite, means over seeds."""

from __future__ import annotations

import math

import pytest

from arborl.trainer.evaluation import student
from arborl.view.web.series import MAX_POINTS, bands, downsample, seed_groups, series


def rows(*values, **more):
    return [{"step": at, "m": value, "time/step": 2.0, **more} for at, value in enumerate(values, 1)]


def test_seconds_and_tokens_are_sums_up_to_the_step():
    found = series(rows(5, 6, 7, **{"episode/count": 4, "episode/sampled": 2.5}), ["m"])["m"]
    assert found == {"step": [1, 2, 3], "seconds": [2.0, 4.0, 6.0], "tokens": [10.0, 20.0, 30.0], "value": [5, 6, 7]}


def test_a_step_without_the_metric_counts_on_the_axes_and_is_no_point():
    metrics = rows(1, 2, 3, **{"learner/terms": 5})
    del metrics[1]["m"]
    found = series(metrics, ["m", "absent"])
    assert found == {"m": {"step": [1, 3], "seconds": [2.0, 6.0], "tokens": [5, 15], "value": [1, 3]}}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_point_without_a_value(value):
    assert series(rows(1.0, value, 3.0), ["m"])["m"]["value"] == [1.0, None, 3.0]


@pytest.mark.parametrize("value", ["text", True])
def test_what_is_no_number_is_no_point(value):
    assert series(rows(1.0, value, 3.0), ["m"])["m"]["step"] == [1, 3]


def test_a_long_series_keeps_its_peaks_and_its_gaps_and_says_how_long_it_was():
    values: list[float | None] = [0.0] * 5000
    values[1234], values[2345], values[3456] = 9.0, -9.0, None
    found = series(rows(*values), ["m"])["m"]
    assert len(found["value"]) <= MAX_POINTS
    assert found["of"] == [5000]
    assert {9.0, -9.0, None} <= set(found["value"])
    assert found["step"] == sorted(set(found["step"]))
    short = [(at, 0, 0, 1.0) for at in range(MAX_POINTS)]
    assert downsample(short) is short


@pytest.mark.parametrize(("axis", "scale"), [("step", 1), ("seconds", 2), ("tokens", 5)])
def test_a_range_of_a_long_series_is_complete_with_a_neighbour_on_both_sides(axis, scale):
    metrics = rows(*range(5000), **{"learner/terms": 5})
    found = series(metrics, ["m"], (axis, 1000 * scale, 1100 * scale))["m"]
    assert found["step"] == list(range(999, 1102))
    assert "of" not in found
    assert bands([metrics, metrics], ["m"], "range", (axis, 1000 * scale, 1100 * scale))["m"]["step"] == found["step"]
    assert len(series(metrics, ["m"], (axis, 1e9, 2e9))["m"]["step"]) > 100  # nothing is there: the whole


def test_a_band_is_the_range_or_the_interval_at_steps_that_all_runs_have():
    seeds = [rows(1.0, 2.0, 3.0), rows(3.0, None, 5.0), rows(5.0, 6.0, 7.0, 8.0)]
    found = bands(seeds, ["m"], "range")["m"]
    assert (found["step"], found["value"], found["low"], found["high"]) == ([1, 3], [3.0, 5.0], [1.0, 3.0], [5.0, 7.0])
    low, high = student([1.0, 3.0, 5.0])
    found = bands(seeds, ["m"], "interval")["m"]
    assert (found["low"][0], found["high"][0]) == pytest.approx((low, high))
    assert bands([rows(1.0), rows()], ["m"], "range") == {}


def test_runs_are_grouped_by_all_settings_but_seed_and_folders():
    def config(seed, lr, folder):
        return {"seed": seed, "output_dir": folder, "name": folder, "learner": {"lr": lr}, "trainer": {"steps": 9}}

    groups = seed_groups({
        "a": config(1, 0.1, "a"), "b": config(2, 0.1, "b"), "c": config(1, 0.2, "c"), "d": {}, "e": {},
    })  # fmt: skip
    assert sorted(groups.values()) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert any("learner.lr=0.1" in changes for changes, runs in groups.items() if runs == ["a", "b"])
    assert seed_groups({"a": config(1, 0.1, "a"), "b": config(2, 0.1, "b")}) == {"": ["a", "b"]}
