"""A cluster that a run starts is closed to other users of the host and to other hosts."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from other_user import as_other_user, reached, second_address, why_not

from arborl.cluster.placement.ray_cluster import PrivateCluster

CLUSTER = """
import json, os, sys
import ray
from arborl.cluster.placement.ray_cluster import RayCluster
from arborl.config.engine_config import PlacementConfig

cluster = RayCluster(PlacementConfig(name="ray", engines=1, seconds=600))
ray.get(ray.remote(lambda: 1).remote())
print(json.dumps(ray.get_runtime_context().gcs_address), flush=True)
sys.stdin.read()
cluster.close()
"""
ATTACK = """
import sys, urllib.error, urllib.request
import grpc

for port in sys.argv[1:]:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    for method in ("InternalKVGcsService/InternalKVGet", "NodeManagerService/RequestWorkerLease",
                   "CoreWorkerService/PushTask", "ObjectManagerService/Push"):
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=20)
            print(port, method, "ANSWERED")
        except grpc.RpcError as error:
            print(port, method, error.code().name)
    body = b'{"entrypoint": "touch /tmp/other-users-job"}'
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/job_agent/jobs/", body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            print(port, "job", answer.status)
    except urllib.error.HTTPError as error:
        print(port, "job", error.code)
    except Exception:  # it does not speak HTTP
        pass
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of a process's own: the process, its folder, and the ports that it and all below it listen at."""
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": "/tmp"}
    pipe = subprocess.PIPE
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
        )
    try:
        address = process.stdout.readline()
        assert address, (home / "log").read_text()
        process.gcs = json.loads(address)
        process.home = home
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.listening = [
            one.laddr for each in tree for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        ]
        process.words = [" ".join(each.cmdline()) for each in tree]
        raylet = next(each for each in tree if each.name() == "raylet")
        process.token = raylet.environ().get("RAY_AUTH_TOKEN_PATH") or str(home / ".ray" / "auth_token")
        yield process
    finally:
        process.stdin.close()
        process.wait(120)


@pytest.mark.slow
def test_it_listens_on_the_loopback_interface_alone(cluster):
    assert {address.ip.removeprefix("::ffff:") for address in cluster.listening} == {"127.0.0.1"}
    assert cluster.gcs.startswith("127.0.0.1:")


@pytest.mark.slow
def test_its_token_is_in_a_file_of_its_own_that_its_user_alone_reads(cluster):
    assert stat.S_IMODE(os.stat(cluster.token).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(cluster.token)).st_mode) == 0o700
    assert not (cluster.home / ".ray").exists()
    token = Path(cluster.token).read_text()
    assert not any(token in words for words in cluster.words)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_another_address_reaches_nothing_of_it(cluster):
    ports = sorted({address.port for address in cluster.listening})
    with second_address() as (here, there), socket.create_server((here, 0)) as control:
        assert reached(here, [control.getsockname()[1], *ports], there) == [control.getsockname()[1]]


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_another_user_reads_no_token_finds_no_socket_and_runs_nothing(cluster):
    pytest.importorskip("grpc")
    if as_other_user("-c", "import grpc").returncode:
        pytest.skip("another user cannot run this Python")
    for what in (f"open({cluster.token!r})", f"__import__('os').listdir({os.path.dirname(cluster.token)!r})"):
        assert "PermissionError" in as_other_user("-I", "-S", "-c", what).stderr
    ports = sorted({address.port for address in cluster.listening})
    answers = [line.split() for line in as_other_user("-c", ATTACK, *map(str, ports)).stdout.splitlines()]
    methods = [code for _, what, code in answers if what != "job"]
    assert methods.count("UNAUTHENTICATED") >= 4  # the control store, the node, the object store, workers
    assert "ANSWERED" not in methods
    jobs = [code for _, what, code in answers if what == "job"]
    assert "401" in jobs
    assert not any(code.startswith("2") for code in jobs)
    assert not os.path.exists("/tmp/other-users-job")


def test_a_cluster_of_ones_own_has_a_new_token_and_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    before, tokens = dict(os.environ), []
    for _ in range(2):
        own = PrivateCluster()
        tokens.append(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in os.environ
        own.close()
        assert not os.path.exists(own.folder)
    assert tokens[0] != tokens[1]
    assert dict(os.environ) == before
