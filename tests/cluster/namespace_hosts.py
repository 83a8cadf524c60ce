"""Hosts on one machine: each has its own network, processes, /tmp, /run and /dev/shm, and an sshd."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_not() -> str | None:
    """What is missing to make hosts here."""
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    missing = [name for name in ("ip", "unshare", "setpriv", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += [] if os.path.exists(SSHD) else ["sshd"]
    if missing:
        return f"{', '.join(missing)} is not installed (openssh-server, iproute2)"
    tried = subprocess.run(["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True)
    return f"namespaces are refused: {tried.stderr.decode()[:200]}" if tried.returncode else None


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Network:
    """A switch in this machine and hosts at it; this machine is the first of its addresses."""

    def __init__(self, folder: Path):
        self.folder, self.hosts = folder, {}
        self.mark = secrets.token_hex(2)
        self.bridge, self.net = f"ab{self.mark}", f"10.213.{secrets.randbelow(254) + 1}"
        self.key = folder / "key"
        self.known = folder / "known_hosts"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")

    def add(self, name: str) -> Host:
        self.hosts[name] = Host(self, name, len(self.hosts) + 11)
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.kill()
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


class Host:
    """One of them, switched on."""

    def __init__(self, network: Network, name: str, number: int):
        self.network, self.name, self.process = network, name, None
        self.address = f"{network.net}.{number}"
        self.space, self.link = f"arb-{network.mark}-{name}", f"ab{network.mark}{number}"
        self.folder = network.folder / name
        for inner in ("tmp", "run/sshd"):
            (self.folder / inner).mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        keys = self.folder / "run" / "sshd"
        keys.chmod(0o755)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "host"))
        shutil.copy(network.key.with_suffix(".pub"), keys / "allowed")
        (keys / "conf").write_text(
            "HostKey /run/sshd/host\nAuthorizedKeysFile /run/sshd/allowed\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        )
        with network.known.open("a") as known:
            known.write(f"{self.address} {(keys / 'host.pub').read_text()}")
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {name}\n")
        run("ip", "netns", "add", self.space)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        run("ip", "link", "set", self.link, "master", network.bridge, "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                      ["link", "set", "lo", "up"]):  # fmt: skip
            run("ip", "-n", self.space, *words)
        self.start()

    def start(self) -> None:
        """Switch it on. What was in its memory is gone, what was on its disk is not."""
        folder = self.folder
        inside = (
            f"mount --bind {folder}/run /run && mount --bind {folder}/hosts /etc/hosts && "
            f"mount -t tmpfs none /dev/shm && mount --bind {folder}/tmp /tmp && "
            f"hostname {self.name} && exec {SSHD} -D -e -f /run/sshd/conf"
        )
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
        log = (self.folder / "sshd.log").open("a")
        clean = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        words = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.space, *alone]  # it ends with the tests
        self.process = subprocess.Popen(words, stdout=log, stderr=log, env=clean, start_new_session=True)
        for _ in range(100):
            try:
                return socket.create_connection((self.address, 22), 1).close()
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def kill(self) -> None:
        """As if its plug were pulled: every process of it ends."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def cut(self, off: bool = True) -> None:
        """Pull its network cable, or put it back."""
        run("ip", "link", "set", self.link, "down" if off else "up")

    def inside(self, command: str) -> str:
        """What a shell on it says."""
        words = ["ssh", "-o", f"UserKnownHostsFile={self.network.known}", "-i", str(self.network.key), self.address]
        return subprocess.run([*words, command], capture_output=True, text=True, timeout=60).stdout
