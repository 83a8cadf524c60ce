"""`arborl cluster` against hosts that are folders of this machine, with an ssh and a Ray that start in a moment."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.cluster.launcher import cluster_jobs
from arborl.cluster.launcher.cluster_spec import ClusterSpec, read_cluster_spec
from arborl.cluster.launcher.on_host.supervisor import VARIABLE
from arborl.cluster.launcher.ssh_cluster import SshCluster
from arborl.config.config_base import validate
from arborl.errors import ConfigError

HERE = Path(__file__).parent
HEAD, FIRST, SECOND = "127.0.0.11", "127.0.0.12", "127.0.0.13"
SECRET = "open-sesame-51"


def free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("0.0.0.0", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return found


class World:
    """Hosts, and the file that names them."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").symlink_to(HERE / "fake_ssh")
        gcs, dashboard, client, agent = free_ports(4)
        self.tree = {
            "name": "test", "head": HEAD, "workers": [{"address": FIRST, "ip": FIRST}], "temp": str(folder / "t"),
            "ports": {"gcs": gcs, "dashboard": dashboard, "client": client, "agent": agent}, "seconds": 20,
            "env": {"HTTP_PROXY": "http://proxy:3128", "THREADS": 1}, "secrets": ["MY_TOKEN"],
        }  # fmt: skip

    def fleet(self, **more) -> tuple[SshCluster, list[str]]:
        lines: list[str] = []
        return SshCluster(validate(ClusterSpec, self.tree | more), lines.append), lines

    def mode(self, host: str, what: str) -> None:
        (self.folder / host).mkdir(exist_ok=True)
        (self.folder / host / "mode").write_text(what)

    def package(self, host: str, name: str, version: str) -> None:
        about = self.folder / host / "packages" / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def file(self) -> str:
        path = self.folder / "cluster.yaml"
        path.write_text(json.dumps(self.tree))
        return str(path)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAKE") == str(self.folder) and VARIABLE in process.environ():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @property
    def left(self) -> list[str]:
        """What is still there of the cluster."""
        folder = self.folder / "t"
        return [str(process) for process in self.processes()] + ([*os.listdir(folder)] if folder.exists() else [])


@pytest.fixture
def world(monkeypatch, tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ab") as short:  # Ray's socket names limit the length of the path
        monkeypatch.setenv("PATH", f"{short}/bin{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE", short)
        monkeypatch.setenv("FAKE_RAY", str(HERE / "fake_ray"))
        monkeypatch.setenv("MY_TOKEN", SECRET)
        made = World(Path(short))
        yield made
        for process in made.processes():
            process.kill()


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"haed": "a"}, "haed: unknown key. Did you mean 'head'?"),
        ({"ssh": {"usr": "me"}}, "ssh.usr: unknown key. Did you mean 'ssh.user'?"),
        ({"workers": [{"address": "a", "num_gpu": 1}]}, "workers.0.num_gpu: unknown key. Did you mean"),
        ({"head": "-oProxyCommand=evil"}, "is not a host. Write a name or an address"),
        ({"workers": ["one", "h"]}, "h is named twice among head and workers"),
        ({"env": {"HF_TOKEN": "hf_1"}}, "env.HF_TOKEN: must not be in a file. Write secrets: [HF_TOKEN]"),
        ({"secrets": ["a b"]}, "'a b' is not a variable name"),
        ({"env": {"A": "1"}, "secrets": ["A"]}, "A is in env and in secrets"),
        ({"env": {"RAY_AUTH_TOKEN": "x"}}, "RAY_AUTH_TOKEN: setup makes the cluster's token"),
        ({"ports": {"gcs": 99999}}, "ports.gcs: must be a whole number >= 1 and <= 65535, given 99999"),
        ({"ports": {"gcs": 8265}}, "ports: 8265 is given twice"),
        ({"temp": "tmp"}, "temp=tmp must be an absolute path on the hosts"),
        ({"temp": "/" + "x" * 60}, "too long for Ray's sockets, by"),
        ({"head": None}, "head: must be a section"),
        ({"name": "a/../b"}, "name: "),
    ],
)
def test_an_error_in_the_file_is_one_line(written, message, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"head": "h"} | written))
    with pytest.raises(ConfigError) as refused:
        read_cluster_spec(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_no_yaml_or_no_file_is_refused_with_its_place(tmp_path):
    file = tmp_path / "cluster.yaml"
    with pytest.raises(ConfigError, match="no such file"):
        read_cluster_spec(file)
    file.write_text("head: [a\n")
    with pytest.raises(ConfigError, match="line 2, column 1: not valid YAML"):
        read_cluster_spec(file)


def test_a_missing_secret_is_reported_before_any_connection(world, monkeypatch):
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ConfigError, match=r"secrets: MY_TOKEN not set in your environment. Set it"):
        world.fleet()[0].setup()
    assert not (world.folder / "ssh.log").exists()


# ------------------------------------------------------------------------------------------------ setup to cleanup


def test_a_cluster_is_set_up_once_grows_runs_jobs_and_leaves_nothing(world):
    fleet, reported = world.fleet()
    fleet.setup()
    assert [host.state for host in fleet.status().hosts] == ["up", "up"]
    bystander = subprocess.Popen(["sleep", "1000"])

    again, reported = world.fleet(workers=[{"address": name, "ip": name} for name in (FIRST, SECOND)])
    again.setup()
    assert reported[:2] == [f"{HEAD}: is already up", f"{FIRST}: is already up"]
    assert f"{SECOND}: has joined, at {SECOND}" in reported

    lines: list[str] = []
    files = {"hello.txt": b"hello\n"}
    words = ["sh", "-c", 'cat hello.txt; printf %s "$MY_TOKEN" | sha256sum; echo $MY_TOKEN $THREADS; exit 7']
    job = cluster_jobs.submit_job(again, words, files, on_line=lines.append)
    assert (job.status, job.exit_code) == ("FAILED", 7)
    assert lines == ["hello", hashlib.sha256(SECRET.encode()).hexdigest() + "  -", "*** 1"]  # it is there, and veiled

    read: list[tuple[str, str, str]] = []
    assert cluster_jobs.read_logs(again, [again.spec.host(FIRST)], lambda *it: read.append(it), ["raylet.out"], 2) == []
    assert read == [(FIRST, "raylet.out", "two"), (FIRST, "raylet.out", "three")]

    seen = (world.folder / "ssh.log").read_text() + "".join(" ".join(one.cmdline()) for one in world.processes())
    assert SECRET not in seen
    assert "proxy" not in seen
    records = list((world.folder / "t").glob("*/record.json"))
    assert len(records) == 3
    assert all(file.stat().st_mode & 0o777 == 0o600 and SECRET not in file.read_text() for file in records)

    assert again.cleanup() == []
    assert world.left == []
    assert again.cleanup() == []
    assert reported[-1] == f"{HEAD}: nothing to remove"
    assert bystander.poll() is None
    bystander.kill()


def test_a_host_that_is_too_busy_for_ray_is_given_a_second_try(world):
    world.mode(HEAD, "busy")
    fleet, reported = world.fleet(workers=[])
    fleet.setup()
    assert reported[0].startswith(f"{HEAD}: the head is up")
    fleet.cleanup()
    assert world.left == []


def test_changed_settings_are_reported_and_applied_by_a_restart(world):
    world.fleet(workers=[])[0].setup()
    changed, reported = world.fleet(workers=[], env={"THREADS": 2})
    changed.setup()
    assert f"with other settings than in the file: `arborl cluster restart {HEAD}` applies them" in reported[0]
    changed.restart(HEAD)
    lines: list[str] = []
    assert cluster_jobs.submit_job(changed, ["sh", "-c", "echo $THREADS"], on_line=lines.append).exit_code == 0
    assert lines == ["2"]
    changed.cleanup()


def test_a_dead_host_is_reported_and_restarted_alone(world):
    fleet, reported = world.fleet()
    fleet.setup()
    record = next(file for file in (world.folder / "t").glob("*/record.json") if '"worker"' in file.read_text())
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    state = fleet.status()
    assert [(host.state, host.why) for host in state.hosts] == [
        ("up", ""),
        ("down", "Its processes were killed, or the host was."),
    ]
    assert not state.up
    assert fleet.restart() == []
    assert reported[-4:-1] == [f"{FIRST}: was down", f"{HEAD}: is already up", f"{FIRST}: has joined, at {FIRST}"]
    world.mode(FIRST, "unreachable")
    assert [host.state for host in fleet.status().hosts] == ["up", "unreachable"]
    assert [line.partition(":")[0] for line in fleet.restart()] == [FIRST]
    assert [line.partition(":")[0] for line in fleet.cleanup()] == [FIRST]
    world.mode(FIRST, "")
    assert fleet.cleanup() == []
    assert world.left == []


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("unreachable", f"{FIRST}: cannot be reached: ssh: connect to host {FIRST} port 22: Connection timed out."),
        ("denied", f"{FIRST}: the user is not accepted with the keys that ssh has tried"),
        ("stranger", f"{FIRST}: is not in known_hosts. Log in once by hand, or write ssh: {{host_keys: accept-new}}."),
        ("changed", f"{FIRST}: has another key than in known_hosts. Verify the new key with its administrator."),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named_and_nothing_is_started(world, mode, message):
    world.mode(FIRST, mode)
    with pytest.raises(ConfigError) as refused:
        world.fleet()[0].setup()
    assert str(refused.value).startswith(message)
    assert world.left == []


def test_hosts_that_are_not_installed_alike_or_have_too_little_are_refused_each_in_a_line(world):
    bare = world.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    world.package(FIRST, "arborl", "0.0.9")
    workers = [
        {"address": FIRST, "ip": FIRST},
        {"address": SECOND, "ip": SECOND, "python": str(bare)},
        {"address": "127.0.0.14", "num_gpus": 64},
    ]
    with pytest.raises(ConfigError) as refused:
        world.fleet(workers=workers)[0].setup()
    other, missing, small = str(refused.value).splitlines()
    assert other.startswith(f"{FIRST}: has arborl 0.0.9, and {HEAD} has arborl ")
    assert missing.startswith(f"{SECOND}: ray and arborl not installed for {bare}. There: {bare} -m pip install")
    assert small.startswith("127.0.0.14: num_gpus=64, and it has ")
    with pytest.raises(ConfigError, match=rf"{HEAD}: no Python at /no/python .* write `python: …`"):
        world.fleet(python="/no/python")[0].setup()
    assert world.left == []


def test_a_port_in_use_is_named_with_its_key(world):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"{HEAD}: port {port} cannot be used .* Write another as ports.dashboard"
        ):
            world.fleet(ports=world.tree["ports"] | {"dashboard": port})[0].setup()
    assert world.left == []


def test_what_was_started_is_stopped_where_a_later_host_fails(world):
    world.mode(FIRST, "fails")
    fleet, reported = world.fleet()
    with pytest.raises(ConfigError) as refused:
        fleet.setup()
    assert str(refused.value).startswith(
        f"{FIRST}: Ray ended at once. Its last line: boom: no room for the object store"
    )
    assert reported[-1] == f"{HEAD}: stopped again"
    assert world.left == []


@pytest.mark.parametrize(
    ("mode", "seconds", "message"),
    [
        ("slow", 1, "Ray was not ready after 1 s. Write more as `seconds`."),
        pytest.param(
            "unseen",
            3,
            f"Ray runs, but after 3 s the head has no node at {FIRST}. Open the ports",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ran_before_is_not_stopped_where_another_host_is_not_ready(world, mode, seconds, message):
    world.fleet(workers=[])[0].setup()
    world.mode(FIRST, mode)
    fleet, reported = world.fleet(seconds=seconds)
    with pytest.raises(ConfigError) as refused:
        fleet.setup()
    assert str(refused.value).startswith(f"{FIRST}: {message}")
    assert f"{HEAD}: stopped again" not in reported
    assert [host.state for host in fleet.status().hosts] == ["up", "none"]
    fleet.cleanup()
    assert world.left == []


def test_ctrl_c_in_the_middle_stops_what_was_started(world):
    def impatient(line: str) -> None:
        if "the head is up" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SshCluster(validate(ClusterSpec, world.tree), impatient).setup()
    assert world.left == []


def test_a_command_that_is_killed_while_a_host_starts_leaves_nothing_there(world):
    world.mode(HEAD, "slow")
    process = subprocess.Popen([sys.executable, "-m", "arborl", "cluster", "setup", "--config", world.file()])
    while not world.processes():
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while world.left and time.monotonic() < until:
        time.sleep(0.05)
    assert world.left == []


def test_a_foreign_folder_is_neither_used_nor_removed(world):
    fleet, _ = world.fleet(workers=[])
    folder = Path(fleet.spec.folder(fleet.spec.head))
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists and was not made by this command. Remove it, or write another"):
        fleet.setup()
    assert "was not made by this command" in fleet.cleanup()[0]
    assert (folder / "thesis.txt").read_text() == "mine"


# ------------------------------------------------------------------------------------------------ the command line


def test_the_command_line_says_what_is_up_in_a_table_and_as_json_and_runs_a_file(world, monkeypatch):
    def ask(*words: str):
        return CliRunner().invoke(app, ["cluster", words[0], "--config", world.file(), *words[1:]])

    result = ask("status")
    assert result.exit_code == 1
    assert "2 of 2 host(s) not up: arborl cluster setup" in result.stdout
    assert ask("setup").exit_code == 0
    result = ask("status", "--json")
    assert result.exit_code == 0, result.output
    assert [host["state"] for host in json.loads(result.stdout)["hosts"]] == ["up", "up"]
    assert f"ssh -N -L {world.tree['ports']['dashboard']}:127.0.0.1:" in ask("status").stdout
    result = ask("submit", "--", "sh", "-c", "echo out; exit 3")
    assert (result.exit_code, result.stdout) == (3, "out\n")
    monkeypatch.chdir(world.folder)
    Path("run.yaml").write_text("trainer: {steps: 1}\n")
    assert "trainer.stepz: unknown key" in ask("submit", "run.yaml", "trainer.stepz=1").output
    assert "output_dir=out: " in ask("submit", "run.yaml", "output_dir=out").output
    Path("run.yaml").write_text("defaults: [_self_]\n")
    assert "Write --working-dir ." in ask("submit", "run.yaml").output
    assert "not a host of the cluster. Hosts: 127.0.0.11" in ask("logs", "nowhere").output
    assert ask("cleanup").exit_code == 0
    assert world.left == []


def test_the_file_among_the_examples_is_one():
    spec = read_cluster_spec(HERE.parents[1] / "examples" / "cluster.yaml")
    assert spec.workers
    assert spec.secrets


def test_a_run_s_file_travels_with_its_name_and_writes_where_nothing_removes_it(tmp_path):
    from arborl.cli.cluster_commands import train_command

    file = tmp_path / "lake" / "run.yaml"
    file.parent.mkdir()
    file.write_text("trainer: {steps: 3}\n")
    (file.parent / "parts.py").write_text("")
    (file.parent / "runs").mkdir()
    (file.parent / "runs" / "old.txt").write_text("")
    fleet = SshCluster(validate(ClusterSpec, {"head": "h", "python": "/opt/python"}))
    words, files = train_command(fleet, [str(file), "trainer.steps=5"], None, None)
    assert words[:6] == ["/opt/python", "-m", "arborl", "train", "run.yaml", "trainer.steps=5"]
    assert words[6] == "name=lake"
    assert words[7].startswith("output_dir=~/runs/lake-")
    assert list(files) == ["run.yaml"]
    words, files = train_command(
        fleet, [str(file), "output_dir=/data/x"], tmp_path, cluster_jobs.collect_files(tmp_path)
    )
    assert words[4:] == ["lake/run.yaml", "output_dir=/data/x", "name=lake"]
    assert sorted(files) == ["lake/parts.py", "lake/run.yaml"]
    assert cluster_jobs.pack(files) == cluster_jobs.pack(dict(reversed(files.items())))
