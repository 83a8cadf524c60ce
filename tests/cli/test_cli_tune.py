"""`arborl tune`: wrong input is one line, exit code 2, and writes no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.cli.train_commands import study_result, trial_line, trial_table
from arborl.tune import HPOSummary, Trial

pytest.importorskip("optuna")
LR = ["--param", "learner.lr=log:1e-5:1e-2"]

BAD: dict[str, tuple[list[str], str]] = {
    "nothing to search": ([], "the search space is empty. Write --param NAME=log:LOW:HIGH"),
    "unknown key": (["--param", "learner.lrr=log:1e-5:1"], "learner.lrr: unknown key. Did you mean 'learner.lr'?"),
    "low above high": (["--param", "learner.lr=log:1e-2:1e-5"], "learner.lr: low=0.01 must be below high=1e-05."),
    "log of 0": (["--param", "learner.lr=log:0:1"], "learner.lr: low=0 of a loguniform must be above 0"),
    "no choices": (["--param", "learner.lr="], "learner.lr: choices is empty"),
    "no trials": ([*LR, "--trials", "0"], "trials=0 must be a whole number >= 1"),
    "no jobs": ([*LR, "--jobs", "0"], "jobs=0 must be a whole number >= 1"),
    "unknown metric": (
        [*LR, "--metric", "eval/sucess"],
        "metric=eval/sucess: the run does not measure it. Did you mean",
    ),
    "unknown backend": ([*LR, "--backend", "optua"], "no backend is called 'optua'. Did you mean 'optuna'?"),
    "unknown direction": ([*LR, "--direction", "up"], "direction='up' must be maximize or minimize."),
    "unknown space": (["--space", "gpro"], "--space gpro: no such file or search space. Did you mean 'grpo'?"),
    "unknown budget": ([*LR, "--budget", "step"], "--budget step: must be one of episodes, free."),
    "unknown option": ([*LR, "--trails", "3"], "--trails: unknown option. Did you mean '--trials'?"),
    "unknown setting": ([*LR, "trainer.stepz=3"], "trainer.stepz: unknown key. Did you mean 'trainer.steps'?"),
    "a folder of its own": ([*LR, "output_dir=x"], "output_dir=x: all trials would write there."),
    "no such part": ([*LR, "env=frozen_lakes"], "Did you mean 'frozen_lake'?"),
    "no such model": ([*LR, "model=seedlin"], "seedlin"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_wrong_input_is_one_line(words: list[str], message: str, here: Path) -> None:
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert list(here.iterdir()) == []


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
