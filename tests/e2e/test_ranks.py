"""Whole runs whose learner lies in several processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

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
        if parent == pid and b"arborl.learner.rank" in words:
            found.append(int(place.name))
    return found


@pytest.mark.slow
def test_a_run_whose_rank_dies_says_so_and_goes_on_from_its_checkpoint(tmp_path):
    code, said = forked("-m", "arborl", "train", *SMALL, *SHARDED, "output_dir=whole", cwd=tmp_path)
    assert code == 0, said
    assert all(row["learner/ranks"] == 2.0 for row in settled(tmp_path / "whole") if "learner/ranks" in row)
    victim = Forked(["-m", "arborl", "train", *SMALL, *SHARDED, "output_dir=cut"], cwd=tmp_path)
    metrics, deadline = tmp_path / "cut" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.01)
    (rank,) = ranks_of(victim.pid)
    os.kill(rank, signal.SIGKILL)
    said, _ = victim.communicate(timeout=60)
    if victim.returncode != 0:  # else the rank had nothing left to do
        assert victim.returncode == 1
        assert "learner rank 1 of 2 was killed by signal 9" in said
        assert "Traceback" not in said
        code, said = forked("-m", "arborl", "train", "--resume", "latest", "output_dir=cut", cwd=tmp_path)
        assert code == 0, said
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    done = invoke("export", str(tmp_path / "whole/checkpoints/step-000004"), "--out", str(tmp_path / "model"))
    assert done.exit_code == 0, done.output
    more = ["learner.strategy=single", "learner.ranks=1", "trainer.steps=5"]
    code, said = forked("-m", "arborl", "train", "--resume", "latest", "output_dir=whole", *more, cwd=tmp_path)
    assert code == 0, said


@pytest.mark.slow
def test_torchrun_starts_the_ranks_too(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    around = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = ["-m", "arborl", "train", *SMALL, "trainer.steps=2", "learner.strategy=ddp", "output_dir=both"]
    both = [Forked(words, cwd=tmp_path, env=around | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    said = [one.communicate(timeout=300)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert [row["learner/ranks"] for row in settled(tmp_path / "both") if "learner/ranks" in row] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["learner.ranks=2"], "strategy=single"),
        (["learner.strategy=tensor", "learner.offload=all"], "strategy=fsdp2, or offload=none"),
        (["learner.zero_stage=3"], "strategy=deepspeed"),
        (["learner.strategy=fsdp2", "algorithm=trpo"], "learner.strategy=ddp"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_is_written(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("train", *words)
    assert done.exit_code == 2
    assert complaint in done.output
    assert not list(tmp_path.iterdir())
