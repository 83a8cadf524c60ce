"""Several runs on one page; one page of one run, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from web_runs import EVIL, add_metrics, made_run

from arborl.cli.main import app
from arborl.errors import ConfigError
from arborl.view.comparison import held_out_table, settings_of, write_comparison


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def measured(run: Path, after: float) -> Path:
    summary = {
        "before": {"success": 0.2},
        "after": {"success": after, "success_low": after - 0.1, "success_high": 0.99},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.fixture
def runs(tmp_path):
    made = [made_run(tmp_path / f"seed-{seed}", steps=2, seed=seed) for seed in (1, 2, 3)]
    other = made_run(tmp_path / "fast", steps=3, seed=1, lr=0.01)
    for run, after in zip((*made, other), (0.6, 0.7, 0.8, 0.5), strict=True):
        measured(run, after)
    return [*made, other]


def test_seeds_of_one_setting_stand_together_with_their_interval(runs, tmp_path):
    three, one = settings_of(runs)
    assert (len(three.runs), len(one.runs)) == (3, 1)
    assert (three.label, one.label) == ("learner.lr=0.001", "fast")
    add_metrics(runs[0], 9)  # the others are not so far yet
    assert [step for step, *_ in settings_of(runs)[0].band("reward/mean")] == [1, 2]
    page = write_comparison(settings_of(runs), tmp_path / "all.html").read_text()
    assert "0.700 (0.452–0.948)" in page  # Student's t over three seeds
    assert "0.500 (0.400–0.990)" in page  # of one seed, over its tasks
    assert "http" not in page.replace("http-equiv", "")
    assert "data:image/png;base64" in page


def test_runs_without_success_are_compared_by_reward(runs, tmp_path):
    assert "success before" in write_comparison(settings_of(runs), tmp_path / "all.html").read_text()
    for run in runs:
        (run / "summary.json").write_text(json.dumps({"before": {"reward": 0.25}, "after": {"reward": 0.75}}))
    page = write_comparison(settings_of(runs), tmp_path / "all.html").read_text()
    assert page.count("<td>0.750</td>") == len(runs) + 1  # of every run, and of the setting with one run
    assert "reward before" in page
    assert "success before" not in page


def test_the_interval_of_a_band_is_over_seeds(runs):
    rows = settings_of(runs)[0].band("reward/mean")
    assert all(low == pytest.approx(mean) == high for _, mean, low, high in rows)  # all seeds say the same here


def test_hostile_names_and_settings_are_text(runs, tmp_path):
    (runs[0] / "config.yaml").write_text(f'name: a\nseed: 1\nmodel: {{name: "{EVIL}"}}\n')
    assert "<script>" not in write_comparison(settings_of(runs), tmp_path / "all.html").read_text()


def test_a_stub_run_is_marked(runs):
    with (runs[3] / "config.yaml").open("a") as file:
        file.write("stub: true\n")
    assert [row[0] for row in held_out_table(settings_of(runs))[1]] == ["learner.lr=0.001, stub=null", "fast (stub)"]


def test_runs_that_cannot_be_compared_raise_an_error(runs, tmp_path):
    with pytest.raises(ConfigError, match="is no run folder"):
        settings_of([runs[0], tmp_path])
    with pytest.raises(ConfigError, match="twice"):
        settings_of([runs[0], runs[0]])
    assert "arborl report RUN" in call("compare", runs[0]).stderr


def test_the_command_line_writes_both_pages(runs, tmp_path):
    done = call("compare", *runs, "--out", tmp_path / "new" / "all.html")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["fast", "1", "0.200", "0.500", "(0.400–0.990)"] in lines  # the numbers are printed too
    before = set(runs[0].iterdir())
    done = call("report", runs[0], "--out", tmp_path / "one.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "one.html").read_text()
    assert set(runs[0].iterdir()) == before  # it is only read
    assert "Tokens with the largest gradient" in page
    assert "learner.lr" in page
    assert "<script>" not in page
    assert call("report", runs[0]).exit_code == 0
    assert (runs[0] / "report.html").exists()
    assert "contains no run" in call("report", tmp_path).stderr
    assert "no such folder" in call("view", tmp_path / "nowhere").stderr
