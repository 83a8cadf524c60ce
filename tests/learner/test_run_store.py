"""The store of the ranks serves holders of the run's secret, and nothing else reaches it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from arborl.errors import ConfigError
from arborl.learner.distributed import rendezvous, run_store
from arborl.learner.distributed.rendezvous import SECRET_VARIABLE, Rendezvous, join_launched
from arborl.learner.distributed.run_store import UNIX, JoinInfo, RunStore, StoreServer, connect


@pytest.fixture
def serve():
    """Starts stores that are closed with the test."""
    started = []

    def start(*given: str) -> StoreServer:
        started.append(StoreServer(*given))
        return started[-1]

    yield start
    for server in started:
        server.connections.clear()
        server.close()


def listening() -> list[str]:
    """Addresses that this process accepts connections at."""
    return [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_rank_uses_the_store_as_torchs_own(serve, host):
    server = serve(host)
    here, there = RunStore(server.info, server), RunStore(server.info)
    here.set("a", "text")
    assert there.get("a") == b"text"
    there.set("b", bytes(range(256)))
    assert here.get("b") == bytes(range(256))
    assert [there.add("n", 2), here.add("n", 3)] == [2, 5]
    assert there.check(["a", "b"])
    assert not there.check(["a", "c"])
    assert there.compare_set("a", "text", "other") == b"other"
    assert there.compare_set("a", "text", "third") == b"other"
    assert there.delete_key("a")
    assert not there.delete_key("a")
    assert there.num_keys() == 2
    with pytest.raises(TimeoutError, match="has no late"):
        there.wait(["late"], timedelta(seconds=0.05))
    threading.Timer(0.1, here.set, ("late", "x")).start()
    there.wait(["late"])
    assert there.get("late") == b"x"


def test_one_thread_that_waits_does_not_hold_up_others(serve):
    server = serve()
    there, counted = RunStore(server.info), []
    waiting = threading.Thread(target=lambda: counted.append(there.get("key")))
    waiting.start()
    many = [threading.Thread(target=there.add, args=("n", 1)) for _ in range(64)]
    for one in many:
        one.start()
    for one in many:
        one.join()
    assert there.add("n", 0) == 64
    there.set("key", "now")
    waiting.join(60)
    assert counted == [b"now"]


def test_ranks_of_one_host_open_no_port():
    before = listening()
    meeting, info = Rendezvous.create(2)
    try:
        folder = Path(info.address.removeprefix(UNIX)).parent
        assert listening() == before
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert info.secret not in repr(info)
    finally:
        meeting.close()
    assert not folder.exists()


def test_with_a_host_given_the_store_listens_there_and_nowhere_else():
    before = listening()
    meeting, _ = Rendezvous.create(2, "127.0.0.1")
    try:
        assert listening() == [*before, "127.0.0.1"]
    finally:
        meeting.close()


def test_a_client_without_the_secret_gets_no_data(serve, monkeypatch):
    monkeypatch.setattr(run_store, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(run_store, "CONNECT_SECONDS", 2.0)
    server = serve("127.0.0.1")
    with pytest.raises((EOFError, OSError)):
        connect(JoinInfo(server.info.address, "another secret"))
    with pytest.raises(ConnectionError, match="unreachable"):
        RunStore(JoinInfo(server.info.address, "")).set("hello/1", "x")
    assert server.data.num_keys() == 0


def test_a_server_without_the_secret_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            line, _ = fake.accept()
            with Connection(line.detach()) as open_line:
                open_line.send_bytes(bytes(32))
                open_line.recv_bytes()
                open_line.send_bytes(bytes(32))

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not hold the secret"):
            connect(JoinInfo(f"127.0.0.1:{fake.getsockname()[1]}", "secret"))


@pytest.mark.parametrize("data", [b"", b"x" * 64, b"x" * 65, b"\xff" * 4096, b"\x00\x00\x00\x40" + b"y" * 64])
def test_clients_that_send_garbage_or_nothing_do_not_block_ranks(serve, monkeypatch, data):
    monkeypatch.setattr(run_store, "HANDSHAKE_SECONDS", 1.0)
    server = serve("127.0.0.1")
    host, _, port = server.info.address.rpartition(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(300)]
    for one in connections:
        with suppress(OSError):  # turned away
            one.sendall(data)
    assert RunStore(server.info).add("n", 1) == 1
    for one in connections:
        one.settimeout(60)
        with suppress(OSError):  # reset, since the server did not read all
            while one.recv(4096):
                pass
        one.close()
    assert (server.data.num_keys(), server.data.check(["n"])) == (1, True)


CONNECT_SCRIPT = """
import socket, sys
try:
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    print("connected", line.recv(100))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can be another user")
def test_another_user_of_the_host_cannot_connect(serve):
    server = serve()
    path = server.info.address.removeprefix(UNIX)
    as_other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    words = ["/usr/bin/env", "-i", shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable]
    data = subprocess.run([*as_other, *words, "-I", "-S", "-c", CONNECT_SCRIPT, path], capture_output=True, text=True)
    assert data.stdout.strip() == "PermissionError", data.stderr
    assert RunStore(server.info).num_keys() == 0


class Launcher:
    """The store of torchrun."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]


@pytest.fixture
def launched(serve, monkeypatch):
    """Joins as a rank."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def host(address: str, secret: str):
        server = serve(address, secret)
        return server, server.info

    store = Launcher()
    join = lambda rank: join_launched(store, rank, host)  # noqa: E731
    join.store = store
    return join


def test_launched_ranks_of_one_host_share_a_secret_that_the_launchers_store_never_held(launched):
    server = launched(0)
    info = launched(1)
    assert info == server.info
    assert info.secret.encode() not in b"".join(launched.store.entries.values())
    assert RunStore(info).add("n", 1) == 1
    file = rendezvous.secret_file(info.address)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("opened", ["folder", "file", "link", "missing"])
def test_a_folder_with_wrong_permissions_or_links_is_refused(launched, tmp_path, opened):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755 if opened == "folder" else 0o700)
    file = folder / "secret"
    if opened == "link":
        (tmp_path / "known").write_text("known")
        file.symlink_to(tmp_path / "known")
    elif opened != "missing":
        file.write_text("known")
        file.chmod(0o644 if opened == "file" else 0o600)
    launched.store.set("where", json.dumps([f"{UNIX}{folder}/store", ""]))
    with pytest.raises(ConfigError, match=r"several hosts, or by several users. Set ARBORL_RANKS_SECRET"):
        launched(1)


def test_launched_ranks_of_several_hosts_take_the_secret_of_their_environment(launched, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 64)
    server = launched(0)
    assert server.info.address.startswith("127.0.0.1:")
    assert launched(1) == server.info
    launched.store.set("where", json.dumps(["192.0.2.1:1", "0" * 64]))  # an address of another process
    with pytest.raises(ConfigError, match="differs from that of rank 0"):
        launched(1)
    monkeypatch.delenv(SECRET_VARIABLE)
    launched(0).data.set("x", b"")
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        launched(1)


def test_an_address_that_other_hosts_cannot_reach_is_refused(launched, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=127.0.0.1 resolves to 127.0.0.1"):
        launched(0)


def test_a_store_that_is_closed_is_gone_for_its_clients_at_once(serve, monkeypatch):
    monkeypatch.setattr(run_store, "CLOSE_GRACE_SECONDS", 0.0)
    server = serve()
    there, found = RunStore(server.info), []

    def wait() -> None:
        try:
            there.get("never")
        except ConnectionError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until = time.monotonic() + 60
    while not server.connections and time.monotonic() < until:
        time.sleep(0.01)
    server.close()
    waiting.join(60)
    assert "unreachable" in str(found[0])
