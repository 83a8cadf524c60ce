"""Runs with a private cluster, with a lost node, as a Ray job, and until they have learned."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arborl.config.load_config import load
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.training_run import train

pytestmark = pytest.mark.slow

PLACED = ["placement=ray", "placement.engines=2", "placement.env_workers=2", "threads=1", "model.device=cpu"]
SMALL = [
    "env.args.size=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "evaluation.tasks=4", "track.gifs=0",
    "track.tensorboard=false",
]  # fmt: skip


MARK = "ARBORL_TEST_RUN"
"""In the environment of a run and of all that it starts, and of nothing else on the machine: others may use Ray too."""


def begin(home: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "arborl", "train", f"output_dir={home}", *PLACED, *SMALL, *words]
    log = home.with_suffix(".txt").open("w")
    return subprocess.Popen(
        command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, MARK: str(home)}
    )


def processes_of(home: Path) -> list[str]:
    """What the run has started and is still there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
    return found


def wait_for_steps(home: Path, process: subprocess.Popen, steps: int, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        file = home / "metrics.jsonl"
        if file.exists() and sum("time/step" in row for row in read_metrics(file)) >= steps:
            return
        time.sleep(0.2)
    raise AssertionError(home.with_suffix(".txt").read_text())


def left_of(home: Path, seconds: float = 200) -> list[str]:
    """What does not end in a while: Ray's agents look for their node only now and then."""
    until = time.monotonic() + seconds
    while (left := processes_of(home)) and time.monotonic() < until:
        time.sleep(0.5)
    return left


def test_a_run_starts_a_private_cluster_and_leaves_no_process(tmp_path):
    process = begin(tmp_path / "run", "trainer.steps=2")
    assert process.wait(900) == 0, (tmp_path / "run.txt").read_text()
    assert left_of(tmp_path / "run") == []
    log = (tmp_path / "run.txt").read_text()
    assert "raylet" not in log  # what Ray says is in the run's log
    assert "a Ray cluster started by this run, 1 node(s): 2 engines, 2 environment workers" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_run_leaves_no_process(tmp_path, number):
    process = begin(tmp_path / "run", "trainer.steps=500")
    wait_for_steps(tmp_path / "run", process, 1)
    assert len(processes_of(tmp_path / "run")) > 4
    os.kill(process.pid, number)
    process.wait(300)
    assert left_of(tmp_path / "run") == []
    if number != signal.SIGKILL:
        assert "Stopped at step" in (tmp_path / "run.txt").read_text()
        assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def check_each_once(home: Path, steps: int) -> None:
    """That every step was learned from four groups of four episodes, and none of these is in two steps."""
    files = sorted((home / "episodes").glob("step-*.jsonl"))
    seen = [[episode.id for episode in EpisodeStore.read(file)] for file in files]
    assert [len(ids) for ids in seen] == [16] * steps
    assert len({one for ids in seen for one in ids}) == 16 * steps
    assert all(len({one.partition("#")[0] for one in ids}) == 4 for ids in seen)
    assert [row["learner/groups"] + row["group/zero_variance"] * 4 for row in steps_of(home)] == pytest.approx(
        [4] * steps
    )


def steps_of(home: Path) -> list[dict]:
    return [row for row in read_metrics(home / "metrics.jsonl") if "time/step" in row]


def test_a_run_goes_on_when_a_node_dies_and_nothing_is_trained_twice(two_nodes, tmp_path):
    home = tmp_path / "run"

    class Kill:
        """After the first step, from another thread: episodes are in play."""

        async def after(self, trainer, groups, metrics):
            if trainer.step == 1:
                threading.Timer(0.5, lambda: two_nodes.cluster.remove_node(two_nodes.second, False)).start()

    config = load(None, [f"output_dir={home}", *PLACED, *SMALL, "trainer.steps=8", "evaluation.tasks=0"])
    try:
        train(config, hooks=[Kill()])
    finally:
        two_nodes.second = two_nodes.add()
    rows = steps_of(home)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(row["engine/lost"] for row in rows) == 1
    assert sum(row["engine/seconds_lost"] for row in rows) > 0
    check_each_once(home, 8)
    assert sum(row["episode/failed"] for row in rows) == 0


def test_frozen_lake_is_learned_on_two_nodes_and_is_the_run_in_one_process(two_nodes, tmp_path):
    here = [*PLACED[3:], "deterministic=true", "track.gifs=0", "track.tensorboard=false"]
    here += ["rollout.episode_seconds=3600", "rollout.step_seconds=600"]  # what a clock decides differs when it is busy
    local = train(load(None, [f"output_dir={tmp_path / 'local'}", *here])).summary
    placed = train(load(None, [f"output_dir={tmp_path / 'ray'}", *here, *PLACED])).summary
    assert placed["after"]["success"] > 0.8 > placed["before"]["success"]
    assert (placed["before"], placed["after"]) == (local["before"], local["after"])
    curves = [[row["reward/mean"] for row in steps_of(tmp_path / name)] for name in ("local", "ray")]
    assert len(curves[0]) == local["steps"]
    assert curves[0] == curves[1]
    last = f"checkpoints/step-{local['steps']:06d}/model/model.safetensors"
    assert (tmp_path / "ray" / last).read_bytes() == (tmp_path / "local" / last).read_bytes()


def test_a_job_that_is_submitted_joins_the_cluster_it_is_submitted_to(tmp_path):
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    with socket.socket() as free:  # other clusters of this machine have the usual one
        free.bind(("", 0))
        port = free.getsockname()[1]
    about = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "dashboard_agent_listen_port": port}
    about |= {"include_dashboard": True, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=about)
    try:
        client = JobSubmissionClient(f"http://{cluster.head_node.webui_url}")
        words = [f"output_dir={tmp_path / 'run'}", *PLACED, *SMALL, "trainer.steps=1"]
        until = time.monotonic() + 600
        job = None
        while job is None:
            try:
                job = client.submit_job(entrypoint=" ".join([sys.executable, "-m", "arborl", "train", *words]))
            except RuntimeError as error:  # the dashboard answers before the node's agent is there
                if "No available agent" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(1)
        while time.monotonic() < until and not client.get_job_status(job).is_terminal():
            time.sleep(1)
        assert client.get_job_status(job) == JobStatus.SUCCEEDED, client.get_job_logs(job)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
        assert "a Ray cluster joined at" in (tmp_path / "run" / "run.log").read_text()
    finally:
        cluster.shutdown()
