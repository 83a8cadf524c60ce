"""Whole runs whose learner lies in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from forked import Forked, forked
from test_runs import SMALL, invoke, settled, weights

SHARDED = ["learner.strategy=fsdp2", "learner.ranks=2"]


def ranks_of(pid: int) -> list[int]:
    """The processes that a run has started for its learner."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid and b"arborl.learner.distributed.rank_process" in words:
            found.append(int(place.name))
    return found


@pytest.mark.slow
def test_a_run_whose_rank_dies_says_so_and_goes_on_from_its_checkpoint(tmp_path):
    code, output = forked("-m", "arborl", "train", *SMALL, *SHARDED, "output_dir=whole", cwd=tmp_path)
    assert code == 0, output
    assert all(row["learner/ranks"] == 2.0 for row in settled(tmp_path / "whole") if "learner/ranks" in row)
    by_hand = ["learner.restarts=0", "output_dir=cut"]
    victim = Forked(["-m", "arborl", "train", *SMALL, *SHARDED, *by_hand], cwd=tmp_path)
    metrics, deadline = tmp_path / "cut" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.01)
    (rank,) = ranks_of(victim.pid)
    os.kill(rank, signal.SIGKILL)
    output, _ = victim.communicate(timeout=60)
    if victim.returncode != 0:  # else the rank had nothing left to do
        assert victim.returncode == 1
        assert "learner rank 1 of 2 was killed by signal 9" in output
        assert "Traceback" not in output
        code, output = forked("-m", "arborl", "train", "--resume", "latest", "output_dir=cut", cwd=tmp_path)
        assert code == 0, output
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    done = invoke("export", str(tmp_path / "whole/checkpoints/step-000004"), "--out", str(tmp_path / "model"))
    assert done.exit_code == 0, done.output
    more = ["learner.strategy=single", "learner.ranks=1", "trainer.steps=5"]
    code, output = forked("-m", "arborl", "train", "--resume", "latest", "output_dir=whole", *more, cwd=tmp_path)
    assert code == 0, output


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate": ["accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"],
}


@pytest.mark.slow
def test_torchrun_and_accelerate_start_the_ranks_too(tmp_path):
    """The same run as where it starts them itself."""
    words = ["-m", "arborl", "train", *SMALL, "evaluation.tasks=0", "track.gifs=0", "learner.strategy=fsdp2"]
    code, output = forked(*words, "learner.ranks=2", "output_dir=own", cwd=tmp_path)
    assert code == 0, output
    theirs = weights(tmp_path / "own")
    for name, launcher in LAUNCHERS.items():
        if name == "accelerate":
            pytest.importorskip("accelerate")
        requested = [sys.executable, "-m", *launcher, *words, f"output_dir={name}"]
        done = subprocess.run(requested, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        ours = weights(tmp_path / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert settled(tmp_path / name) == settled(tmp_path / "own")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_run_that_torchrun_started_saves_when_it_is_stopped(tmp_path, number, to_group):
    """torchrun passes the signal to all ranks; a terminal's Ctrl-C reaches them twice."""
    words = ["-m", "arborl", "train", *SMALL, "trainer.steps=500", "evaluation.tasks=0", "learner.strategy=fsdp2"]
    requested = [sys.executable, "-m", *LAUNCHERS["torchrun"], *words, "output_dir=run"]
    run = subprocess.Popen(
        requested, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    (os.killpg if to_group else os.kill)(run.pid, number)
    output, _ = run.communicate(timeout=120)
    assert "saved run/checkpoints/step-0000" in output
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


@pytest.mark.slow
def test_a_rank_that_torchrun_started_ends_the_run_with_its_name(tmp_path):
    """It is not ours to start anew."""
    words = ["-m", "arborl", "train", *SMALL, "trainer.steps=500", "evaluation.tasks=0", "learner.strategy=ddp"]
    requested = [sys.executable, "-m", *LAUNCHERS["torchrun"], *words, "output_dir=run"]
    run = subprocess.Popen(requested, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    for child in psutil.Process(run.pid).children():
        if child.environ().get("RANK") == "1":
            child.kill()
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "exitcode  : -9" in output
    assert not psutil.pid_exists(run.pid)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["learner.ranks=2"], "strategy=single"),
        (["learner.strategy=tensor", "learner.offload=all"], "strategy=fsdp2, or offload=none"),
        (["learner.strategy=fsdp2", "algorithm=trpo"], "learner.strategy=ddp"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_is_written(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("train", *words)
    assert done.exit_code == 2
    assert complaint in done.output
    assert not list(tmp_path.iterdir())
