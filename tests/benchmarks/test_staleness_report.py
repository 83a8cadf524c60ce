"""Success at equal tokens and at equal time, and differences over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import staleness_report

    return staleness_report


RECORDED = {
    "batch/lag_mean": 0.5, "batch/lag_max": 1.0, "rollout/dropped_stale": 3.0, "sampled_per_trained": 1.1,
    "policy/clipped": 0.02, "policy/logprob_diff": 0.01, "policy/logprob_diff_max": 0.7, "cpu_share": 0.5,
    "without_gradient": 0,
}  # fmt: skip


def run(max_lag: int, seed: int, *points: tuple[float, float, float], correction: str = "ratio", final: float = 0.9):
    """A run with evaluations at (tokens, seconds, success)."""
    curve = [{"step": n, "tokens": t, "seconds": s, "success": y} for n, (t, s, y) in enumerate(points)]
    job = {"max_lag": max_lag, "correction": correction, "seed": seed}
    return {**job, "curve": curve, "final": final, "seconds": points[-1][1], **RECORDED}


SLOW = run(0, 0, (0, 0, 0.2), (100, 40, 0.6), (200, 80, 1.0))
FAST = run(1, 0, (0, 0, 0.2), (100, 10, 0.4), (240, 20, 0.8))


def test_curves_are_compared_within_the_smallest_total_of_all_runs(report):
    found = report.make_report([SLOW, FAST], target=0.8)
    assert found["budgets"] == {"tokens": 200, "seconds": 20}
    slow, fast = (one["measures"] for one in found["configurations"])
    assert slow["tokens_half"] == pytest.approx([0.6])
    assert slow["tokens_all"] == pytest.approx([1.0])
    assert fast["tokens_all"] == pytest.approx([0.4 + 0.4 * 100 / 140])
    assert slow["seconds_all"] == pytest.approx([0.4])
    assert fast["seconds_all"] == pytest.approx([0.8])


def test_the_mean_over_the_budget_is_the_area_under_the_curve(report):
    assert report.mean_success(SLOW, "tokens", 200) == pytest.approx(0.6)
    assert report.mean_success(SLOW, "seconds", 20) == pytest.approx(0.3)  # from 0.2 to 0.4
    assert report.mean_success(FAST, "seconds", 15) == pytest.approx((10 * 0.3 + 5 * 0.5) / 15)


def test_the_target_is_reached_between_two_evaluations_or_never(report):
    assert report.first_reached(SLOW, "tokens", 0.8) == pytest.approx(150)
    assert report.first_reached(FAST, "seconds", 0.8) == pytest.approx(20)
    assert report.first_reached(FAST, "seconds", 0.9) is None
    assert report.first_reached(FAST, "seconds", 0.1) == 0


def test_differences_are_paired_by_seed_over_common_seeds(report):
    finals = {0: (0.90, 0.95, 0.99, 0.80), 1: (0.88, 0.94, 0.96)}
    rows = [run(lag, seed, (0, 0, 0), (1, 1, 1), final=y) for lag, ys in finals.items() for seed, y in enumerate(ys)]
    (found,) = (one for one in report.make_report(rows, 0.8)["differences"] if one["measure"] == "final")
    assert (found["of"], found["minus"], found["seeds"]) == ([1, "ratio"], [0, "ratio"], [0, 1, 2])
    assert found["each"] == pytest.approx([-0.02, -0.01, -0.03])
    assert found["mean"] == pytest.approx(-0.02)
    reach = 4.303 * 0.01 / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((-0.02 - reach, -0.02 + reach), abs=1e-4)
    assert found["p"] == 0.25  # all of three seeds have one sign: 2 of 8 sign flips


def test_corrections_are_compared_with_none_at_the_same_lag(report):
    points = ((0, 0, 0), (1, 1, 1))
    rows = [run(lag, 0, *points, correction=name) for lag in (0, 8) for name in ("none", "tis")]
    pairs = {(*one["of"], *one["minus"]) for one in report.make_report(rows, 0.8)["differences"]}
    assert pairs == {
        (8, "none", 0, "none"), (8, "tis", 0, "tis"), (0, "tis", 0, "none"), (8, "tis", 8, "none"),
    }  # fmt: skip


def test_tables_have_a_row_for_every_configuration_and_pair(report, capsys):
    rows = [SLOW, FAST, run(1, 1, (0, 0, 0.1), (300, 30, 0.7))]
    report.print_tables(report.make_report(rows, 0.75), 0.75)
    text = capsys.readouterr().out
    assert text.count("| ratio | 0 |") == text.count("| ratio | 1 |") == 2
    assert "1 of 2 seeds" in text  # the others did not reach the target
    assert "| max_lag=1 ratio | max_lag=0 ratio | 1 |" in text


def test_the_figure_has_one_line_per_lag_over_tokens_and_over_seconds(report):
    other = run(0, 1, (0, 0, 0.4), (100, 40, 0.8), (150, 80, 1.0))
    tokens, seconds = report.draw_curves([SLOW, other, FAST], "ratio").axes
    for axes, end in ((tokens, (150, 90.0)), (seconds, (80, 100.0))):
        lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
        assert list(lines) == ["max_lag=0", "max_lag=1"]
        assert lines["max_lag=0"][0] == pytest.approx((0, 30.0))  # the mean over seeds, in percent
        assert lines["max_lag=0"][-1] == pytest.approx(end)
    with pytest.raises(SystemExit, match="tis"):
        report.draw_curves([SLOW, FAST], "tis")
