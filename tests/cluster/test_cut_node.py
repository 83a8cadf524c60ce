"""A node whose network is cut: a host made of a network namespace, at the other end of a cable that can be pulled."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from arborl.cluster.placement.ray_cluster import SETTINGS
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="hosts are made by root, with ip"),
]

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=3"]
STORE = f"--object-store-memory={100 * 2**20}"


def shell(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class TwoHosts:
    """This machine with the head, and one behind a cable."""

    def __init__(self, folder: Path):
        number = os.getpid()
        self.name, self.ours, self.theirs = f"arborl{number}", f"abl{number}", f"abr{number}"
        net = f"10.213.{number % 250}"
        self.started: list[subprocess.Popen] = []
        self.scratch = tempfile.mkdtemp(prefix="ab", dir="/tmp")  # names of sockets are short
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.address = f"{net}.1:{port}"
        self.env = {**os.environ, **SETTINGS, "RAY_AUTH_MODE": "disabled"}
        try:
            shell("ip", "netns", "add", self.name)
            shell("ip", "link", "add", self.ours, "type", "veth", "peer", "name", self.theirs)
            shell("ip", "link", "set", self.theirs, "netns", self.name)
            shell("ip", "addr", "add", f"{net}.1/24", "dev", self.ours)
            shell("ip", "link", "set", self.ours, "up")
            for words in (("addr", "add", f"{net}.2/24", "dev", self.theirs), ("link", "set", self.theirs, "up"),
                          ("link", "set", "lo", "up")):  # fmt: skip
                shell("ip", "-n", self.name, *words)
            here = ["--head", f"--node-ip-address={net}.1", f"--port={port}", f"--temp-dir={self.scratch}"]
            self._start(folder / "head.txt", [*RAY, STORE, *here, "--include-dashboard=false"])
            there = [f"--address={self.address}", f"--node-ip-address={net}.2"]
            self._start(folder / "node.txt", ["ip", "netns", "exec", self.name, *RAY, STORE, *there])
        except BaseException:
            self.close()
            raise

    def _start(self, log: Path, words: list[str]) -> None:
        with log.open("w") as out:
            self.started.append(subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, env=self.env))
        until = time.monotonic() + 180
        while "Ray runtime started" not in log.read_text():
            assert self.started[-1].poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)

    def pull(self) -> None:
        shell("ip", "link", "set", self.ours, "down")

    def close(self) -> None:
        for process in reversed(self.started):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for words in (("link", "del", self.ours), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], capture_output=True, check=False)
        shutil.rmtree(self.scratch, ignore_errors=True)


def test_a_run_goes_on_when_the_network_of_a_node_is_cut_and_says_what_it_cost(tmp_path):
    hosts, home, log = TwoHosts(tmp_path), tmp_path / "run", tmp_path / "run.txt"
    words = [
        f"output_dir={home}", "placement=ray", f"placement.address={hosts.address}", "placement.engines=2",
        "placement.env_workers=2", "threads=1", "model.device=cpu", "env.args.size=3", "rollout.tasks_per_step=4",
        "rollout.group_size=4", "evaluation.tasks=0", "track.gifs=0", "track.tensorboard=false", "trainer.steps=6",
    ]  # fmt: skip
    run = None
    try:
        with log.open("w") as out:
            command = [sys.executable, "-m", "arborl", "train", *words]
            run = subprocess.Popen(command, stdout=out, stderr=out, env=hosts.env)
        until = time.monotonic() + 300
        while not (home / "metrics.jsonl").exists() or '"step": 2' not in (home / "metrics.jsonl").read_text():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        hosts.pull()
        assert run.wait(400) == 0, log.read_text()
    finally:
        if run is not None and run.poll() is None:
            run.kill()
        hosts.close()
    rows = [row for row in read_metrics(home / "metrics.jsonl") if "time/step" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    seen = [e.id for file in sorted((home / "episodes").glob("step-*.jsonl")) for e in EpisodeStore.read(file)]
    assert len(seen) == len(set(seen)) == 6 * 16
    assert sum(row["episode/failed"] for row in rows) == 0
    assert sum(row["engine/lost"] for row in rows) == 1
    assert sum(row["rollout/processes_replaced"] for row in rows) == 1
    assert sum(row["engine/seconds_lost"] for row in rows) > 1
    assert sum(row["rollout/seconds_lost"] for row in rows) > 1
    assert "Processes were lost and replaced: 1 × engine, " in (home / "run.log").read_text()
