"""`arborl tune`: lines and table of trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborl.cli.train_commands import study_result, trial_line, trial_table
from arborl.tune import HPOSummary, Trial

pytest.importorskip("optuna")
TRIALS = [
    Trial(0, {"learner.lr": None}, "done", 0.5, seconds=3.0, default=True),
    Trial(1, {"learner.lr": 1e-3}, "done", 0.75, seconds=4.0),
    Trial(2, {"learner.lr": 1e-1}, "failed", None, "its value is nan", 1.0),
    Trial(3, {"learner.lr": 1e-5}, "pruned", 0.25, seconds=2.0),
]


def test_a_trial_is_one_line() -> None:
    assert trial_line(TRIALS[0], "reward").endswith("unchanged settings")
    assert trial_line(TRIALS[1], "reward") == "trial   1  reward    0.75     4.0 s  learner.lr=0.001"
    assert trial_line(TRIALS[2], "reward").endswith("learner.lr=0.1  failed: its value is nan")
    assert trial_line(TRIALS[3], "reward").endswith("learner.lr=1e-05  stopped early")


def test_the_best_trial_is_compared_with_the_unchanged_settings() -> None:
    found = HPOSummary({"learner.lr": 1e-3}, 0.75, 0.5, TRIALS, Path("s"))
    assert study_result(found, "reward").endswith("unchanged settings: 0.5, a gain of +0.25 at the same budget")
    assert list(trial_table(found, "reward").columns[0].cells) == ["1", "0", "3", "2"]
    alone = HPOSummary({}, 0.5, 0.5, TRIALS[:1], Path("s"))
    assert "no trial was better than the unchanged settings" in study_result(alone, "reward")
