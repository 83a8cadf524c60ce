"""The learning curve."""

import json

import pytest
from PIL import Image

from arborl.track import JsonlTracker
from arborl.view import learning_curve, plot_runs
from arborl.view.curve import smooth


def metrics(tmp_path, rows):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step, row in enumerate(rows):
        tracker.log(row, step)
    tracker.close()
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize(
    "rows",
    [
        [{"episode/success": 0.1, "reward/mean": 0.1}],
        [{"episode/success": i / 40, "reward/mean": i / 40} for i in range(40)],
        [{"reward/mean": -3.0}, {"reward/mean": float("nan")}, {"reward/mean": 2.0}],
    ],
)
def test_a_curve_is_drawn_from_whatever_was_recorded(tmp_path, rows):
    out = learning_curve(metrics(tmp_path, rows), tmp_path / "out" / "curve.png", "lake", before=0.1, after=0.9)
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000


@pytest.mark.parametrize(("row", "width"), [({}, 660), ({"sft/loss": 2.0}, 1320)])
def test_a_run_without_success_has_the_curve_of_its_reward(tmp_path, row, width):
    rows = [{"evaluation/reward": 0.2}, {"reward/mean": 0.3, "evaluation/reward": 0.5} | row]
    with Image.open(learning_curve(metrics(tmp_path, rows), tmp_path / "curve.png", "talk")) as picture:
        assert picture.width == width  # no empty panel of success


def test_a_run_without_steps_has_no_curve_and_says_so(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        learning_curve(metrics(tmp_path, []), tmp_path / "curve.png", "lake")


def test_smoothing_keeps_length_mean_level_and_short_curves():
    assert smooth([2.0]) == [2.0]
    assert smooth([0.0, 1.0]) == [0.0, 1.0]
    assert smooth([3.0] * 50) == [3.0] * 50
    assert len(smooth([float(i % 2) for i in range(100)])) == 100
    assert all(abs(value - 0.5) < 0.1 for value in smooth([float(i % 2) for i in range(100)])[5:-5])


def test_several_runs_are_drawn_in_one_picture(tmp_path):
    for name, after, metric in (("a", 0.9, "success"), ("b", None, "success"), ("c", None, "none")):
        (tmp_path / name).mkdir()
        rows = "".join(json.dumps({"step": i, f"episode/{metric}": i / 10}) + "\n" for i in range(9))
        (tmp_path / name / "metrics.jsonl").write_text(rows)
        held_out = {"before": {"success": 0.1}, "after": {"success": after}} if after else {"before": {}, "after": {}}
        (tmp_path / name / "summary.json").write_text(json.dumps(held_out))
    out = plot_runs([tmp_path / name for name in "abc"], tmp_path / "all.png", "three runs")
    with Image.open(out) as picture:
        assert picture.size == (960, 504)
