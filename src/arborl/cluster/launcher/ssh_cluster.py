"""A Ray cluster over ssh: setup, status, restart, cleanup. All state is on the hosts.

Each host has a record with the id of its last start (`mark`); a worker's record also has the id of its head (`joined`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arborl.cluster.launcher.cluster_spec import ClusterSpec, HostConfig
from arborl.cluster.launcher.ssh_hosts import HostError, SshHosts
from arborl.cluster.placement.ray_cluster import SETTINGS
from arborl.errors import ConfigError

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostState:
    address: str
    role: str
    state: str
    """`up`; `down`: Ray has ended; `lost`: Ray runs, but is not a node of the head; `none`: not started; `unreachable`;
    `refused`: the host answers with an error."""
    ip: str = ""
    why: str = ""
    total: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterState:
    name: str
    hosts: tuple[HostState, ...]
    jobs: tuple[Answer, ...]
    dashboard: str | None
    """URL on the head."""
    tunnel: str | None
    """ssh command that forwards the dashboard's port."""

    @property
    def up(self) -> bool:
        return all(host.state == "up" for host in self.hosts)


class SshCluster:
    """A cluster on hosts that ssh reaches."""

    def __init__(self, spec: ClusterSpec, report: Callable[[str], None] = lambda line: None):
        self.spec, self.report = spec, report
        self.secrets = {name: os.environ[name] for name in spec.secrets if os.environ.get(name)}
        self.hosts = SshHosts(spec, self.secrets)

    def require_secrets(self) -> None:
        """Read the secrets from the environment; ConfigError if one is missing."""
        self.secrets = self.spec.values()

    # ------------------------------------------------------------------------------------------ setup

    def setup(self) -> None:
        """Start Ray where it does not run. On failure, stop what this call has started."""
        self.require_secrets()
        seen = _all(self._inspect(self.spec.hosts))
        self._check(seen)
        self._start_hosts(seen, [host for host in self.spec.hosts if not self._is_member(host, seen)])

    def restart(self, name: str | None = None) -> list[str]:
        """Start hosts that are down, or restart one host.

        Returns:
            Errors of hosts that could not be restarted.
        """
        self.require_secrets()
        chosen = None if name is None else self.spec.host(name)
        answers_by_host = self._inspect(self.spec.hosts)
        for host in (self.spec.head, chosen or self.spec.head):
            if isinstance(error := answers_by_host[host.address], HostError):
                raise ConfigError(str(error))
        seen = {address: answer for address, answer in answers_by_host.items() if not isinstance(answer, HostError)}
        reached = [host for host in self.spec.hosts if host.address in seen]
        self._check(seen)
        if chosen is self.spec.head:
            targets = reached
        elif chosen is not None:
            targets = [chosen, *([] if seen[self.spec.head.address]["state"] == "up" else [self.spec.head])]
        else:
            lost = {host.address for host in self._host_states(answers_by_host)[0] if host.state != "up"}
            targets = [host for host in reached if host.address in lost or not self._is_member(host, seen)]
        if self.spec.head in targets:
            targets = reached  # a new head has no state: its workers join again
        _all(self.hosts.each(targets, self._stop))
        for host in targets:
            if seen[host.address]["state"] != "none":
                self.report(f"{host.address}: {'stopped' if seen[host.address]['state'] == 'up' else 'was down'}")
            seen[host.address] = {**seen[host.address], "state": "none"}
        self._start_hosts(seen, targets)
        return [str(error) for error in answers_by_host.values() if isinstance(error, HostError)]

    def _stop(self, host: HostConfig, **more: Any) -> Answer:
        def on_message(message: Answer) -> None:
            self.report(f"{host.address}: {message['note']}")

        return self.hosts.ask(host, "stop", on_message, **more)

    def _inspect(self, hosts: Iterable[HostConfig]) -> dict[str, Answer | HostError]:
        head = self.spec.head
        return self.hosts.each(hosts, lambda host: self.hosts.ask(host, "look", seconds=20, with_key=host is head))

    def _is_member(self, host: HostConfig, seen: Mapping[str, Answer]) -> bool:
        """Whether it is up and has joined the running head."""
        this, head = seen[host.address], seen[self.spec.head.address]
        return this["state"] == "up" and head["state"] == "up" and (this is head or this["joined"] == head["mark"])

    def _check(self, seen: Mapping[str, Answer]) -> None:
        """ConfigError if a host lacks Ray or Arbor, has other versions, or has too few GPUs."""
        wrong = []
        first_name, first = next(iter(seen.items()))
        for host in self.spec.hosts:
            if (about := seen.get(host.address)) is None:
                continue
            where, python, versions = host.address, self.spec.python_of(host), about["versions"]
            missing = [name for name in ("ray", "arborl") if not versions[name]]
            if missing or (host is self.spec.head and not about["dashboard"]):
                what, advice = " and ".join(missing) or "Ray's dashboard", f"{python} -m pip install 'arborl[ray]'"
                wrong.append(f"{where}: {what} not installed for {python}. There: {advice}.")
                continue
            differ = [name for name in versions if versions[name] != first["versions"][name]]
            if differ:
                here, there = (
                    ", ".join(f"{name} {some[name] or 'none'}" for name in differ)
                    for some in (versions, first["versions"])
                )
                wrong.append(
                    f"{where}: has {here}, and {first_name} has {there}. Install the same versions on all hosts, or "
                    "write `python: …` of one that has them."
                )
            num_gpus = self.spec.resource(host, "num_gpus")
            if num_gpus is not None and num_gpus > about["gpus"]:
                wrong.append(f"{where}: num_gpus={num_gpus}, and it has {about['gpus']}. Write at most that many.")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def _start_hosts(self, seen: dict[str, Answer], targets: list[HostConfig]) -> None:
        head, started = self.spec.head, dict[str, str]()
        self._report_running(seen, targets)
        about = seen[head.address]
        try:
            if head in targets:
                about = {"mark": secrets.token_hex(8), "key": secrets.token_hex(32)}
                started[head.address] = about["mark"]
                answer = self._start(head, about["mark"], about["key"])
                about["ip"] = answer["ip"]
                if answer["already"]:  # another command has started the head meanwhile
                    about = self.hosts.ask(head, "look", with_key=True)
                self.report(f"{head.address}: the head is up at {about['ip']}:{self.spec.ports.gcs}")
            workers = [host for host in targets if host is not head]
            for host in workers:
                started[host.address] = secrets.token_hex(8)
            joining = f"{_bracketed(about['ip'])}:{self.spec.ports.gcs}"

            def one(host: HostConfig) -> Answer:
                mark = started[host.address]
                return self._start(host, mark, about["key"], head=joining, joined=about["mark"])

            answers = _all(self.hosts.each(workers, one))
            if workers:
                self._wait_for_nodes(workers, [answer["ip"] for answer in answers.values()])
        except ConfigError as error:
            trouble = self._head_failure(head) if head.address in started and len(started) > 1 else ""
            self._roll_back(started)
            raise ConfigError(f"{error}{trouble}") from error
        except BaseException:
            self._roll_back(started)
            raise
        self.report(f"{self.spec.name}: {len(self.spec.hosts)} host(s), `arborl cluster status` shows them")

    def _head_failure(self, head: HostConfig) -> str:
        """Error of the head, which may be the cause of a worker's failure."""
        try:
            about = self.hosts.ask(head, "look")
            if about["state"] == "up":
                self.hosts.ask(head, "nodes")
                return ""
            return f"\n{head.address}: Ray has ended there. Its last line: {about['last_line']}"
        except HostError as error:
            return f"\n{error}"

    def _report_running(self, seen: Mapping[str, Answer], targets: list[HostConfig]) -> None:
        for host in self.spec.hosts:
            if host in targets or host.address not in seen:
                continue
            other = seen[host.address]["settings"] != self._settings(host)
            advice = f", with other settings than in the file: `arborl cluster restart {host.address}` applies them"
            self.report(f"{host.address}: is already up{advice if other else ''}")

    def _start(self, host: HostConfig, mark: str, key: str, **more: Any) -> Answer:
        return self.hosts.ask(
            host, "start", seconds=self.spec.seconds + 60, mark=mark, key=key, ip=host.ip,
            role="head" if host is self.spec.head else "worker", ports=self.spec.listens(host),
            options=self.spec.options(host), env=self._environment(), settings=self._settings(host),
            **{"seconds_to_start": self.spec.seconds, **more},
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {**SETTINGS, **self.spec.env, **self.secrets}

    def _settings(self, host: HostConfig) -> str:
        """Hash of the settings of a start."""
        settings = [self.spec.options(host), self._environment(), self.spec.python_of(host), host.ip]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _wait_for_nodes(self, workers: list[HostConfig], addresses: list[str]) -> None:
        request: dict[str, Any] = {"await": addresses, "seconds_to_start": self.spec.seconds}
        found = self.hosts.ask(self.spec.head, "nodes", seconds=self.spec.seconds + 60, **request)
        by_ip = dict(zip(addresses, workers, strict=True))
        if found["missing"]:
            raise ConfigError(
                "\n".join(
                    f"{by_ip[ip].address}: Ray runs, but after {self.spec.seconds:g} s the head has no node at "
                    f"{ip}. Open the ports between the hosts, or write its `ip`."
                    for ip in found["missing"]
                )
            )
        for ip, host in by_ip.items():
            self.report(f"{host.address}: has joined, at {ip}")

    def _roll_back(self, started: Mapping[str, str]) -> None:
        """Stop what this command has started, unless it was started again since."""
        hosts = [host for host in self.spec.hosts if host.address in started]
        answers = self.hosts.each(reversed(hosts), lambda host: self._stop(host, mark=started[host.address]))
        for address, answer in answers.items():
            if isinstance(answer, HostError):
                self.report(f"{answer} Ray may still run there: `arborl cluster cleanup`.")
            elif answer["was"] not in ("none", "another"):
                self.report(f"{address}: stopped again")

    # ------------------------------------------------------------------------------------------ status, cleanup

    def status(self) -> ClusterState:
        """State of all hosts; an unreachable host costs at most `ssh.seconds`."""
        answers_by_host = self._inspect(self.spec.hosts)
        hosts, found = self._host_states(answers_by_host)
        port = found["port"] if found else None
        user = f"{self.spec.head.user or self.spec.ssh.user}@" if self.spec.head.user or self.spec.ssh.user else ""
        return ClusterState(
            self.spec.name,
            tuple(hosts),
            tuple(sorted(found["jobs"], key=lambda job: job["started"]) if found else ()),
            f"http://127.0.0.1:{port}" if port else None,
            f"ssh -N -L {port}:127.0.0.1:{port} {user}{self.spec.head.address}" if port else None,
        )

    def _host_states(self, answers_by_host: Mapping[str, Answer | HostError]) -> tuple[list[HostState], Answer | None]:
        """States by the hosts' records and by the head's list of nodes."""
        found, trouble = None, ""
        head = answers_by_host[self.spec.head.address]
        if not isinstance(head, HostError) and head["state"] == "up":
            try:
                found = self.hosts.ask(self.spec.head, "nodes", seconds=20)
            except HostError as error:
                trouble = error.what
        nodes = {node["ip"]: node for node in found["nodes"]} if found else {}
        nodes |= {node["ip"]: node for node in found["nodes"] if node["alive"]} if found else {}
        hosts = [self._state(host, answers_by_host[host.address], nodes, trouble) for host in self.spec.hosts]
        named = {host.ip for host in hosts}
        hosts += [
            HostState("", "worker", "up", ip, "not in the file", node["total"], node["used"])
            for ip, node in nodes.items()
            if ip not in named and node["alive"] and not any(host.state == "unreachable" for host in hosts)
        ]
        return hosts, found

    def _state(
        self, host: HostConfig, answer: Answer | HostError, nodes: Mapping[str, Answer], trouble: str
    ) -> HostState:
        role = "head" if host is self.spec.head else "worker"
        if isinstance(answer, HostError):
            return HostState(host.address, role, "refused" if answer.reachable else "unreachable", why=answer.what)
        state, why, ip = answer["state"], answer["why"], answer["ip"] or ""
        node = nodes.get(ip, {}) if state == "up" else {}
        if state == "up" and not node.get("alive"):
            state, why, node = "lost", trouble or node.get("why") or "It is not a node of the head.", {}
        return HostState(host.address, role, state, ip, why, node.get("total", {}), node.get("used", {}))

    def cleanup(self) -> list[str]:
        """Stop Ray and remove the cluster's folders, workers first.

        Returns:
            Errors of hosts where this failed.
        """
        answers = self.hosts.each(self.spec.workers, self._stop)
        answers |= self.hosts.each([self.spec.head], self._stop)
        for address, answer in answers.items():
            if not isinstance(answer, HostError):
                self.report(f"{address}: {'nothing to remove' if answer['was'] == 'none' else 'stopped and removed'}")
        return [str(answer) for answer in answers.values() if isinstance(answer, HostError)]


def _all(answers: Mapping[str, Answer | HostError]) -> dict[str, Answer]:
    """Answers by host; ConfigError with one line per HostError."""
    if wrong := [str(answer) for answer in answers.values() if isinstance(answer, HostError)]:
        raise ConfigError("\n".join(wrong))
    return {address: answer for address, answer in answers.items() if not isinstance(answer, HostError)}


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
