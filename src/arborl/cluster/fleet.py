"""A cluster over ssh: set up, looked at, brought back and removed. What is known of it is on its hosts, not here.

Each host has a record of what was started there; two marks say what belongs together: a host's own, made at each start,
and in a worker's record the head's, without which its Ray has nobody to talk to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arborl.cluster.connection import SETTINGS
from arborl.cluster.spec import ClusterSpec, HostConfig
from arborl.cluster.ssh import HostError, Hosts
from arborl.errors import ConfigError

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostState:
    """What is known of a host."""

    address: str
    role: str
    state: str
    """`up`; `down`: Ray has ended there; `lost`: it runs, and the head does not count it; `none`: nothing was started;
    `unreachable`; `refused`: it answers, and cannot be asked."""
    ip: str = ""
    why: str = ""
    total: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is known of a cluster."""

    name: str
    hosts: tuple[HostState, ...]
    jobs: tuple[Answer, ...]
    dashboard: str | None
    """On the head."""
    tunnel: str | None
    """The command that brings it here."""

    @property
    def up(self) -> bool:
        return all(host.state == "up" for host in self.hosts)


class Fleet:
    """The commands.

    Args:
        spec: the cluster's file.
        say: is told what was done, a line each.

    Example:
        Fleet(read_spec(Path("cluster.yaml")), print).setup()
    """

    def __init__(self, spec: ClusterSpec, say: Callable[[str], None] = lambda line: None):
        self.spec, self.say = spec, say
        self.secrets = {name: os.environ[name] for name in spec.secrets if os.environ.get(name)}
        self.hosts = Hosts(spec, self.secrets)

    def require_secrets(self) -> None:
        """That the caller's environment has all that the file names: what is started needs them."""
        self.secrets = self.spec.values()

    # ------------------------------------------------------------------------------------------ setup

    def setup(self) -> None:
        """Start what does not run. Whatever fails, what was started here is stopped."""
        self.require_secrets()
        seen = _all(self._look(self.spec.hosts))
        self._check(seen)
        self._bring_up(seen, [host for host in self.spec.hosts if not self._belongs(host, seen)])

    def restart(self, name: str | None = None) -> list[str]:
        """Bring back what is down; or stop one host, and start it again.

        Returns:
            Hosts that could not be brought back, with the reason.
        """
        self.require_secrets()
        chosen = None if name is None else self.spec.host(name)
        looked = self._look(self.spec.hosts)
        if isinstance(head := looked[self.spec.head.address], HostError):
            raise ConfigError(str(head))
        if chosen is not None and isinstance(error := looked[chosen.address], HostError):
            raise ConfigError(str(error))
        seen = {address: answer for address, answer in looked.items() if not isinstance(answer, HostError)}
        reached = [host for host in self.spec.hosts if host.address in seen]
        self._check(seen)
        if chosen is self.spec.head:
            targets = reached
        elif chosen is not None:
            targets = [chosen, *([] if head["state"] == "up" else [self.spec.head])]
        else:
            lost = {host.address for host in self._judge(looked)[0] if host.state != "up"}
            targets = [host for host in reached if host.address in lost or not self._belongs(host, seen)]
        if self.spec.head in targets:
            targets = reached  # what a head knew is gone with it: its workers join the new one
        stopped = self.hosts.each(targets, self._stop)
        _all(stopped)
        for host in targets:
            if seen[host.address]["state"] != "none":
                self.say(f"{host.address}: {'stopped' if seen[host.address]['state'] == 'up' else 'was down'}")
            seen[host.address] = {**seen[host.address], "state": "none"}
        self._bring_up(seen, targets)
        return [str(error) for error in looked.values() if isinstance(error, HostError)]

    def _stop(self, host: HostConfig, **more: Any) -> Answer:
        def told(what: Answer) -> None:
            self.say(f"{host.address}: {what['note']}")

        return self.hosts.ask(host, "stop", told, **more)

    def _look(self, hosts: Iterable[HostConfig]) -> dict[str, Answer | HostError]:
        head = self.spec.head
        return self.hosts.each(hosts, lambda host: self.hosts.ask(host, "look", seconds=20, with_key=host is head))

    def _belongs(self, host: HostConfig, seen: Mapping[str, Answer]) -> bool:
        """Whether it is up, and of the head that is."""
        own, head = seen[host.address], seen[self.spec.head.address]
        return own["state"] == "up" and head["state"] == "up" and (own is head or own["joined"] == head["mark"])

    def _check(self, seen: Mapping[str, Answer]) -> None:
        """That Ray can be started everywhere, and that what passes between hosts will be understood."""
        wrong = []
        first_name, first = next(iter(seen.items()))
        for host in self.spec.hosts:
            if (about := seen.get(host.address)) is None:
                continue
            where, python, versions = host.address, self.spec.python_of(host), about["versions"]
            missing = [name for name in ("ray", "arborl") if not versions[name]]
            if missing or (host is self.spec.head and not about["dashboard"]):
                what = " and ".join(missing) or "Ray's dashboard"
                wrong.append(
                    f"{where}: {what} not installed for {python}. There: {python} -m pip install 'arborl[ray]'."
                )
                continue
            others = [
                f"{name} {versions[name] or 'none'}" for name in versions if versions[name] != first["versions"][name]
            ]
            if others:
                theirs = ", ".join(f"{name} {first['versions'][name] or 'none'}" for name in versions
                                   if versions[name] != first["versions"][name])  # fmt: skip
                wrong.append(
                    f"{where}: has {', '.join(others)}, and {first_name} has {theirs}. Install the same versions on "
                    "all hosts, or write `python: …` of one that has them."
                )
            asked = self.spec.asks(host, "num_gpus")
            if asked is not None and asked > about["gpus"]:
                wrong.append(f"{where}: num_gpus={asked}, and it has {about['gpus']}. Write at most that many.")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def _bring_up(self, seen: dict[str, Answer], targets: list[HostConfig]) -> None:
        head, started = self.spec.head, dict[str, str]()
        self._say_of_running(seen, targets)
        about = seen[head.address]
        try:
            if head in targets:
                about = {"mark": secrets.token_hex(8), "key": secrets.token_hex(32)}
                started[head.address] = about["mark"]
                answer = self._start(head, about["mark"], about["key"])
                about["ip"] = answer["ip"]
                if answer["already"]:  # another command was quicker: its head is the head
                    about = self.hosts.ask(head, "look", with_key=True)
                self.say(f"{head.address}: the head is up at {about['ip']}:{self.spec.ports.gcs}")
            workers = [host for host in targets if host is not head]
            for host in workers:
                started[host.address] = secrets.token_hex(8)
            joining = f"{_bracketed(about['ip'])}:{self.spec.ports.gcs}"

            def one(host: HostConfig) -> Answer:
                mark = started[host.address]
                return self._start(host, mark, about["key"], head=joining, joined=about["mark"])

            answers = _all(self.hosts.each(workers, one))
            if workers:
                self._await(workers, [answer["ip"] for answer in answers.values()])
        except ConfigError as error:
            trouble = self._trouble(head) if head.address in started and len(started) > 1 else ""
            self._undo(started)
            raise ConfigError(f"{error}{trouble}") from error
        except BaseException:
            self._undo(started)
            raise
        self.say(f"{self.spec.name}: {len(self.spec.hosts)} host(s), `arborl cluster status` shows them")

    def _trouble(self, head: HostConfig) -> str:
        """What has become of a head that was up, where its workers fail: it may be why."""
        try:
            about = self.hosts.ask(head, "look")
            if about["state"] == "up":
                self.hosts.ask(head, "nodes")
                return ""
            return f"\n{head.address}: Ray has ended there since. It said: {about['said']}"
        except HostError as error:
            return f"\n{error}"

    def _say_of_running(self, seen: Mapping[str, Answer], targets: list[HostConfig]) -> None:
        for host in self.spec.hosts:
            if host in targets or host.address not in seen:
                continue
            other = seen[host.address]["settings"] != self._settings(host)
            advice = f", with other settings than the file's: `arborl cluster restart {host.address}` takes them on"
            self.say(f"{host.address}: is already up{advice if other else ''}")

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
        """What it was started with, as a number to compare."""
        what = [self.spec.options(host), self._environment(), self.spec.python_of(host), host.ip]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def _await(self, workers: list[HostConfig], addresses: list[str]) -> None:
        """Until the head counts them."""
        asked: dict[str, Any] = {"await": addresses, "seconds_to_start": self.spec.seconds}
        found = self.hosts.ask(self.spec.head, "nodes", seconds=self.spec.seconds + 60, **asked)
        by_ip = dict(zip(addresses, workers, strict=True))
        if found["missing"]:
            raise ConfigError(
                "\n".join(
                    f"{by_ip[ip].address}: Ray runs there, and after {self.spec.seconds:g} s the head does not count "
                    f"it at {ip}. Open the ports between the hosts, or write its `ip`."
                    for ip in found["missing"]
                )
            )
        for ip, host in by_ip.items():
            self.say(f"{host.address}: has joined, at {ip}")

    def _undo(self, started: Mapping[str, str]) -> None:
        """Stop what this command has started, and nothing that somebody else has since."""
        hosts = [host for host in self.spec.hosts if host.address in started]
        answers = self.hosts.each(reversed(hosts), lambda host: self._stop(host, mark=started[host.address]))
        for address, answer in answers.items():
            if isinstance(answer, HostError):
                self.say(f"{answer} What was started there may still run: `arborl cluster cleanup`.")
            elif answer["was"] not in ("none", "another"):
                self.say(f"{address}: stopped again")

    # ------------------------------------------------------------------------------------------ status, cleanup

    def status(self) -> ClusterState:
        """Of all hosts at once: one that does not answer is waited for as long as for a connection, and no longer."""
        looked = self._look(self.spec.hosts)
        hosts, found = self._judge(looked)
        port = found["port"] if found else None
        user = f"{self.spec.head.user or self.spec.ssh.user}@" if self.spec.head.user or self.spec.ssh.user else ""
        return ClusterState(
            self.spec.name,
            tuple(hosts),
            tuple(sorted(found["jobs"], key=lambda job: job["started"]) if found else ()),
            f"http://127.0.0.1:{port}" if port else None,
            f"ssh -N -L {port}:127.0.0.1:{port} {user}{self.spec.head.address}" if port else None,
        )

    def _judge(self, looked: Mapping[str, Answer | HostError]) -> tuple[list[HostState], Answer | None]:
        """Each host's own word beside the head's."""
        found, trouble = None, ""
        head = looked[self.spec.head.address]
        if not isinstance(head, HostError) and head["state"] == "up":
            try:
                found = self.hosts.ask(self.spec.head, "nodes", seconds=20)
            except HostError as error:
                trouble = error.what
        nodes = {node["ip"]: node for node in found["nodes"]} if found else {}
        nodes |= {node["ip"]: node for node in found["nodes"] if node["alive"]} if found else {}
        hosts = [self._state(host, looked[host.address], nodes, trouble) for host in self.spec.hosts]
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
            state, why, node = "lost", trouble or node.get("why") or "The head does not count it.", {}
        return HostState(host.address, role, state, ip, why, node.get("total", {}), node.get("used", {}))

    def cleanup(self) -> list[str]:
        """Stop and remove what was started, workers first.

        Returns:
            Hosts where that was not possible, with the reason.
        """
        answers = self.hosts.each(self.spec.workers, self._stop)
        answers |= self.hosts.each([self.spec.head], self._stop)
        for address, answer in answers.items():
            if not isinstance(answer, HostError):
                self.say(f"{address}: {'nothing was there' if answer['was'] == 'none' else 'stopped and removed'}")
        return [str(answer) for answer in answers.values() if isinstance(answer, HostError)]


def _all(answers: Mapping[str, Answer | HostError]) -> dict[str, Answer]:
    """Every host's answer; where some have none, ConfigError with a line each."""
    if wrong := [str(answer) for answer in answers.values() if isinstance(answer, HostError)]:
        raise ConfigError("\n".join(wrong))
    return {address: answer for address, answer in answers.items() if not isinstance(answer, HostError)}


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
