"""`arborl cluster` against two hosts with real Ray and real ssh: namespaces of this machine, each with its own network,
processes and temporary files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespace_hosts import Host, Network, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no hosts can be made on this machine: {why_not()}"),
]

SECRET = "open-sesame-51"
RUN = [
    "placement=ray", "placement.engines=2", "placement.env_workers=2", "threads=1", "model.device=cpu",
    "env.args.size=3", "rollout.tasks_per_step=4", "rollout.group_size=4", "evaluation.tasks=4", "track.gifs=0",
    "track.tensorboard=false", "trainer.steps=2", "placement.seconds=300",
]  # fmt: skip


class Lab:
    """Two hosts, and a file that names them."""

    def __init__(self, folder: Path):
        self.folder, self.network = folder, Network(folder)
        self.head, self.worker = self.network.add("alpha"), self.network.add("beta")
        self.tree = {
            "name": "lab", "head": self.head.address, "workers": [self.worker.address], "seconds": 300,
            "ssh": {"user": "root", "key": str(self.network.key), "known_hosts": str(self.network.known)},
            "env": {"HTTP_PROXY": "http://proxy.invalid:3128", "NO_PROXY": "*", "OMP_NUM_THREADS": 1},
            "secrets": ["MY_TOKEN"], "num_cpus": 2, "object_store_gib": 0.1, "logs": "/run/logs",
        }  # fmt: skip

    def ask(self, *words: str, **more) -> subprocess.CompletedProcess:
        file = self.folder / "cluster.yaml"
        file.write_text(json.dumps(self.tree | more))
        request = [sys.executable, "-m", "arborl", "cluster", words[0], "--config", str(file), *words[1:]]
        env = os.environ | {"MY_TOKEN": SECRET}
        return subprocess.run(request, capture_output=True, text=True, env=env, timeout=900, check=False)

    def states(self) -> list[str]:
        return [host["state"] for host in json.loads(self.ask("status", "--json").stdout)["hosts"]]

    def processes(self, host: Host) -> str:
        return host.inside(
            "ps axww -o args | grep -v -e sshd -e '^ps ' -e '^grep ' -e COMMAND -e '^bash -c ps'"
        ).strip()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield made
    finally:
        made.network.close()


def test_a_wrong_key_an_unknown_host_a_used_port_and_a_lost_connection_each_give_one_line_and_leave_nothing(lab):
    other = lab.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    result = lab.ask("setup", ssh=lab.tree["ssh"] | {"key": str(other)})
    assert result.returncode == 2
    assert f"{lab.head.address}: root is not accepted with the key {other}" in result.stderr
    result = lab.ask("setup", ssh=lab.tree["ssh"] | {"known_hosts": str(lab.folder / "none")})
    assert f"{lab.head.address}: is not in known_hosts" in result.stderr

    listen = "import socket,time;s=socket.create_server(('0.0.0.0',6379));time.sleep(1000)"
    listener = lab.head.inside(f'nohup {sys.executable} -c "{listen}" >/dev/null 2>&1 </dev/null & echo $!; sleep 2')
    result = lab.ask("setup")
    assert result.returncode == 2
    assert f"{lab.head.address}: port 6379 cannot be used (Address already in use). Write another as" in result.stderr
    lab.head.inside(f"kill {listener}")

    result = lab.ask("setup", num_gpus=64)
    assert f"{lab.worker.address}: num_gpus=64, and it has " in result.stderr

    lab.worker.cut()
    result = lab.ask("setup")
    lab.worker.cut(False)
    assert result.returncode == 2
    assert f"{lab.worker.address}: cannot be reached" in result.stderr
    for host in (lab.head, lab.worker):
        assert lab.processes(host) == ""
        assert os.listdir(host.folder / "tmp") == []


def test_a_cluster_trains_across_two_hosts_loses_one_gets_it_back_and_leaves_nothing(lab):
    result = lab.ask("setup")
    assert result.returncode == 0, result.stderr
    assert lab.states() == ["up", "up"]
    assert "is already up" in lab.ask("setup").stderr

    result = lab.ask("submit", "--", "arborl", "train", *RUN, "output_dir=/run/out")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on a Ray cluster joined at" in result.stdout
    assert ", 2 node(s): 2 engines, 2 environment workers" in result.stdout
    assert json.loads((lab.head.folder / "run" / "out" / "summary.json").read_text())
    for host in (lab.head, lab.worker):  # both have had an engine
        written = list(host.folder.glob("tmp/arborl-lab-*/r/session_2*/logs/worker-*.out"))
        assert any(":actor_name:EngineActor" in file.read_text() for file in written), written
        assert SECRET not in host.inside("ps axww -o args")
        files = [file for file in (host.folder / "tmp").rglob("*") if file.is_file()]
        assert not any(SECRET.encode() in file.read_bytes() for file in files)

    lab.worker.kill()
    assert lab.states() == ["up", "unreachable"]
    result = lab.ask("restart")
    assert result.returncode == 1
    assert f"{lab.worker.address}: cannot be reached" in result.stderr
    lab.worker.start()
    assert lab.states() == ["up", "down"]
    assert lab.ask("restart").returncode == 0
    assert lab.states() == ["up", "up"]

    result = lab.ask("cleanup")
    assert result.returncode == 0, result.stderr
    assert lab.states() == ["none", "none"]
    for host in (lab.head, lab.worker):
        assert lab.processes(host) == ""
        assert os.listdir(host.folder / "tmp") == []
        assert host.inside("ls /dev/shm") == ""
