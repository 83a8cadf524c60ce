"""Runs under a scheduler: `--resume auto`, the best checkpoint, and a signal during an update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked import forked
from small_runs import LAKE, invoke, settled, weights

from arborl.checkpoint import complete_steps, find
from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.training_run import train
from arborl.training_run.run_folder import locate_model

SMALL = [*LAKE, "engine=scripted", "trainer.steps=3", "trainer.save_every=1", "evaluation.tasks=0"]


def damage(checkpoint: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"")


def test_auto_starts_resumes_skips_a_damaged_checkpoint_and_ends_when_finished(tmp_path, caplog):
    words = ["train", *SMALL, f"output_dir={tmp_path / 'run'}", "--resume", "auto"]
    assert (done := invoke(*words)).exit_code == 0, done.output  # a new run
    assert "Resumes" not in done.output
    assert "is finished" in (done := invoke(*words)).output
    assert done.exit_code == 0

    damage(tmp_path / "run" / "checkpoints" / "step-000003")
    assert (done := invoke(*words)).exit_code == 0, done.output
    assert "Resumes from step 2" in done.output
    assert any("skipping the checkpoint" in record.message for record in caplog.records)
    assert [row["step"] for row in settled(tmp_path / "run")] == [1, 2, 3]

    for step in complete_steps(tmp_path / "run" / "checkpoints"):
        damage(tmp_path / "run" / "checkpoints" / f"step-{step:06}")
    assert (done := invoke(*words)).exit_code == 0, done.output
    assert "Resumes" not in done.output
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2, 3]
    assert [row["step"] for row in settled(tmp_path / "run")] == [1, 2, 3]


def test_auto_needs_a_folder_and_refuses_one_with_other_files(tmp_path):
    done = invoke("train", *SMALL, "--resume", "auto")
    assert done.exit_code == 2
    assert "output_dir=FOLDER" in done.stderr
    (tmp_path / "mine.txt").write_text("")
    done = invoke("train", *SMALL, f"output_dir={tmp_path}", "--resume", "auto")
    assert done.exit_code == 2
    assert "not empty" in done.stderr


def test_auto_starts_a_run_again_that_was_killed_before_its_first_checkpoint(tmp_path):
    home = tmp_path / "run"
    (home / "episodes").mkdir(parents=True)
    (home / "config.yaml").write_text("name: torn")
    (home / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 9.0}\n{"st')
    (home / "episodes" / "step-000009.jsonl").write_text("")
    train(load(None, [*SMALL, f"output_dir={home}"]), resume="auto")
    assert [row["step"] for row in settled(home)] == [1, 2, 3]
    assert settled(home)[0]["reward/mean"] != 9.0
    assert not (home / "episodes" / "step-000009.jsonl").exists()


class Success:
    """Gives each step a metric."""

    def __init__(self, *values: float | None):
        self.values = values

    async def after(self, trainer, groups, metrics):
        value = self.values[trainer.step - 1]
        if value is not None:
            metrics["mine/success"] = value


def test_the_best_checkpoint_of_a_run_is_kept_found_and_survives_a_resume(tmp_path):
    home = tmp_path / "run"
    words = [*SMALL, "trainer.keep=1", "trainer.keep_best=mine/success", f"output_dir={home}", "trainer.save_every=2"]
    hook = Success(0.1, 0.2, 0.9, None, 0.5, 0.9, 0.95, 0.3)
    train(load(None, [*words, "trainer.steps=6"]), hooks=[hook])
    assert complete_steps(home / "checkpoints") == [3, 6]  # step 3 was not due, but better than all before
    train(load(None, [*words, "trainer.steps=6"]), hooks=[hook], resume="3")
    assert find(home / "checkpoints", "best").name == "step-000003"
    train(load(None, [*words, "trainer.steps=8"]), hooks=[hook], resume="latest")
    assert complete_steps(home / "checkpoints") == [7, 8]
    assert locate_model(str(home / "best")).step == 7
    assert json.loads((home / "checkpoints" / "scores.json").read_text())["metric"] == "mine/success"


def test_without_a_metric_there_is_no_best_checkpoint(tmp_path, caplog):
    words = [*SMALL, "trainer.keep_best=mine/succes", f"output_dir={tmp_path / 'run'}"]
    train(load(None, words))
    assert "no step has the metric mine/succes" in caplog.text
    with pytest.raises(ConfigError, match="no best checkpoint"):
        locate_model(str(tmp_path / "run" / "best"))


def test_the_evaluation_at_the_end_counts_for_the_last_checkpoint(tmp_path):
    words = [*SMALL, "evaluation.tasks=2", "evaluation.every=1", "evaluation.greedy=false", "evaluation.before=false"]
    train(load(None, [*words, "trainer.keep_best=evaluation/reward", f"output_dir={tmp_path / 'run'}"]))
    scores = json.loads((tmp_path / "run" / "checkpoints" / "scores.json").read_text())["values"]
    assert list(scores) == ["1", "2", "3"]


def test_held_out_metrics_must_be_measured_during_training():
    with pytest.raises(ConfigError, match=r"evaluation\.every=10"):
        load(None, ["trainer.keep_best=evaluation/success"])
    assert load(None, ["trainer.keep_best=-evaluation/loss", "evaluation.every=5"]).trainer.keep_best is not None


SCRIPT = """
import os, signal, sys
from arborl.config.load_config import load
from arborl.learner.core.learner import Learner
from arborl.training_run import train

compute = Learner._compute_gradients

def signalled(self, *args):
    if {is_stopped} and self.done == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.interrupt.wait(60)
        self._check_interrupt = lambda check=self._check_interrupt: (check(), print("went on"))
    return compute(self, *args)

Learner._compute_gradients = signalled
train(load(None, sys.argv[1:]), resume="auto")
"""


def test_sigterm_during_an_update_saves_the_state_before_it_and_resuming_is_exact(tmp_path):
    words = [*LAKE, "trainer.steps=4", "trainer.save_every=9", "evaluation.tasks=0", "deterministic=true"]
    for number, (is_stopped, home, expected) in enumerate(((0, "whole", 0), (1, "cut", 143), (0, "cut", 0))):
        script = tmp_path / f"{number}.py"
        script.write_text(SCRIPT.format(is_stopped=is_stopped))
        code, output = forked(str(script), *words, f"output_dir={home}", cwd=tmp_path)
        assert code == expected, output
        assert "went on" not in output
        if is_stopped:
            assert complete_steps(tmp_path / "cut" / "checkpoints") == [2], output
    assert settled(tmp_path / "cut") == settled(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
