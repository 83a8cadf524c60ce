"""Whole runs whose disk is slow or full: what is being written when they end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from forked import Forked, forked
from small_runs import LAKE, weights

import arborl
from arborl.checkpoint import complete_checkpoints, find
from arborl.errors import DiskWriteError

SMALL = [*LAKE, "trainer.steps=6", "trainer.save_every=1", "evaluation.tasks=0", "deterministic=true"]

SLOW = """
import sys, time
import torch
from arborl.cli.main import main

save = torch.save
def slowly(*args):
    time.sleep(0.7)
    save(*args)
    time.sleep(0.7)
torch.save = slowly
sys.argv = ["arborl", *sys.argv[1:]]
main()
"""


def start(folder: Path, *words: str) -> Forked:
    script = folder.parent / "slow_disk.py"
    script.write_text(SLOW)
    return Forked([str(script), "train", *SMALL, *words, f"output_dir={folder}"])


def wait_until(true, process: Forked) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def half_written(folder: Path, after: int):
    """Whether a checkpoint is being written, and so many are there."""
    root = folder / "checkpoints"
    return lambda: len(complete_checkpoints(root)) >= after and any(root.glob(".tmp-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, output = forked("-m", "arborl", "train", *SMALL, f"output_dir={folder}")
    assert code == 0, output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("later", [0.0, 0.4, 0.9])
def test_a_run_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before_and_ends_as_if_it_were_not(
    whole, tmp_path, later
):
    victim = start(tmp_path / "cut")
    wait_until(half_written(tmp_path / "cut", after=1), victim)
    time.sleep(later)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    there = complete_checkpoints(tmp_path / "cut" / "checkpoints")
    assert there
    code, output = forked("-m", "arborl", "train", "--resume", "latest", f"output_dir={tmp_path / 'cut'}")
    assert code == 0, output
    ours, theirs = weights(tmp_path / "cut"), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))


def test_ctrl_c_while_a_checkpoint_is_written_waits_and_leaves_nothing_half(tmp_path):
    victim = start(tmp_path / "run", "trainer.steps=500")
    wait_until(half_written(tmp_path / "run", after=1), victim)
    victim.send_signal(signal.SIGINT)
    output, _ = victim.communicate(timeout=60)
    assert victim.returncode == 130, output
    assert "Stopped at step" in output
    assert "Traceback" not in output
    root = tmp_path / "run" / "checkpoints"
    assert not list(root.glob(".*"))
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert find(root, "latest").name == f"step-{steps:06}"


def settings(folder: Path) -> dict[str, object]:
    words = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in SMALL)}
    return {"output_dir": folder, "engine": "scripted"} | words


def full_disk(*steps: int) -> dict[str, object]:
    rule = {"part": "disk", "kind": "full", "name": "checkpoint", "at": {"step": list(steps)}}
    return {"faults": {"rules": [rule]}}


def test_a_full_disk_at_one_checkpoint_is_a_warning_and_the_next_step_is_saved(tmp_path):
    home = tmp_path / "run"
    done = arborl.run(**settings(home) | {"trainer.save_every": 4, "trainer.keep": 9} | full_disk(4))
    assert done.summary["steps"] == 6
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-000005", "step-000006"]
    log = (home / "run.log").read_text()
    assert "step-000004: cannot be written: No space left on device." in log
    assert "The next step is saved instead (failure 1 of 3)." in log


def test_a_disk_that_stays_full_ends_the_run_with_one_sentence(tmp_path):
    with pytest.raises(DiskWriteError, match=r"step-000004: cannot be written: No space left on device\."):
        arborl.run(**settings(tmp_path / "run") | full_disk(2, 3, 4, 5))
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-000001"]
    assert "No space left" in (tmp_path / "run" / "run.log").read_text()
    assert arborl.run(**settings(tmp_path / "run"), resume="latest").summary["steps"] == 6


def test_a_full_disk_at_the_last_checkpoint_is_reported_and_the_run_is_not_finished(tmp_path):
    with pytest.raises(DiskWriteError, match="step-000006: cannot be written"):
        arborl.run(**settings(tmp_path / "run") | {"trainer.save_every": 6} | full_disk(6))
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_error_elsewhere_does_not_hide_behind_a_checkpoint_nor_the_checkpoint_behind_it(tmp_path, monkeypatch):
    """The run breaks while a checkpoint is written: its own error comes out, and the checkpoint is there."""
    from arborl.trainer.trainer import Trainer

    step = Trainer.train_step

    async def breaks(self):
        if self.step == 2:
            raise RuntimeError("broken")
        await step(self)

    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (time.sleep(0.5), save(*args)))
    monkeypatch.setattr(Trainer, "train_step", breaks)
    with pytest.raises(RuntimeError, match="broken"):
        arborl.run(**settings(tmp_path / "run"))
    assert find(tmp_path / "run" / "checkpoints", "latest").name == "step-000002"
