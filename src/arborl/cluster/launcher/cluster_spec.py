"""The cluster's file: hosts, ssh, environment, ports, resources."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from arborl.config.config_base import Config, validate
from arborl.config.load_config import load_yaml
from arborl.config.secrets import is_secret
from arborl.errors import ConfigError

HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?")
"""A name or an address; never an option of ssh."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SOCKET = len("/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Length of Ray's socket paths below its folder; a socket's path has at most 107 bytes."""
Port = Annotated[int, Field(ge=1, le=65535)]
RandomPort = Annotated[int, Field(ge=0, le=65535)]


def _as_strings(values: Any) -> Any:
    """YAML numbers and Booleans as strings of the environment."""
    if isinstance(values, Mapping):
        return {str(name): _word(value) for name, value in values.items()}
    return values


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


class SshConfig(Config):
    """Settings of the system's ssh, in addition to ~/.ssh/config."""

    user: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")
    """Login name; default: ssh's."""
    key: Path | None = None
    """Private key; default: ssh's. A key with a passphrase must be in an agent."""
    port: Port | None = None
    """Of sshd."""
    host_keys: Literal["known", "accept-new"] = "known"
    """`known`: a host must be in known_hosts. `accept-new`: the key of a new host is accepted and stored. A changed key
    is refused in both cases."""
    known_hosts: Path | None = None
    """Default: ~/.ssh/known_hosts."""
    seconds: float = Field(5.0, ge=1, le=600)
    """Connection timeout."""


class PortsConfig(Config):
    """Ray's ports. Hosts must reach each other at all of them except the dashboard's."""

    gcs: Port = 6379
    """The head's, which workers join."""
    dashboard: Port = 8265
    """On the head's loopback interface; `status` prints the ssh command to reach it."""
    client: Port = 10001
    """On the head, of Ray's own client."""
    agent: Port = 52365
    """Of each host's agent."""
    node_manager: RandomPort = 0
    """0: any."""
    object_manager: RandomPort = 0
    """0: any."""
    workers: tuple[Port, Port] | None = None
    """First and last port of Ray's worker processes, for firewalls; without it, any."""


class HostConfig(Config):
    """A host and its own settings."""

    shorthand: ClassVar[str] = "address"

    address: str
    """A name or an address that ssh reaches."""
    ip: str | None = None
    """Address for the other hosts, if it differs from ssh's."""
    user: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")
    port: Port | None = None
    """Of sshd."""
    python: str | None = None
    num_cpus: int | None = Field(None, ge=0)
    """Cores for Ray; default: all."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs for Ray; default: all."""

    @model_validator(mode="after")
    def _is_a_host(self) -> HostConfig:
        for name in (self.address, self.ip):
            if name is not None and not HOST.fullmatch(name):
                raise ValueError(f"{name!r} is not a host. Write a name or an address, and its port as `port`.")
        return self


class ClusterSpec(Config):
    """A cluster that `arborl cluster` starts over ssh."""

    name: str = Field("ray", pattern=r"^[A-Za-z0-9_-]{1,16}$")
    """Two clusters on the same hosts need different names, ports too."""
    head: HostConfig
    workers: tuple[HostConfig, ...] = ()
    ssh: SshConfig = SshConfig()
    python: str = sys.executable
    """Python on the hosts, with arborl[ray] installed; default: the path of this Python."""
    env: Annotated[dict[str, str], BeforeValidator(_as_strings)] = {}
    """Variables of Ray's processes and of every job: proxies, caches."""
    secrets: tuple[str, ...] = ()
    """Names of variables that are read from your environment and sent through ssh. They are never stored."""
    ports: PortsConfig = PortsConfig()
    temp: str = "/tmp"
    """Parent of the cluster's folder on each host; `cleanup` removes the folder."""
    logs: str | None = None
    """Folder on each host for logs of ended runs; default: logs are removed with the cluster's folder."""
    num_cpus: int | None = Field(None, ge=0)
    """Default of all hosts."""
    num_gpus: int | None = Field(None, ge=0)
    """Default of all hosts."""
    object_store_gib: float | None = Field(None, ge=0.08)
    """Of every host; default: Ray's (30 % of the memory)."""
    seconds: float = Field(120.0, gt=0)
    """Timeout of Ray's start on a host."""

    @model_validator(mode="after")
    def _can_be_started(self) -> ClusterSpec:
        names = [host.address for host in self.hosts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is named twice among head and workers. Name it once.")
        for name in (*self.env, *self.secrets):
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not a variable name. Write letters, digits and _.")
            if name.startswith("RAY_AUTH"):
                raise ValueError(f"{name}: setup makes the cluster's token. Leave it out.")
        for name, value in self.env.items():
            if is_secret(name):
                raise ValueError(
                    f"env.{name}: must not be in a file. Write secrets: [{name}]; its value is read from "
                    "your environment."
                )
            if "\0" in value:
                raise ValueError(f"env.{name}: holds a zero byte.")
        if both := [name for name in self.secrets if name in self.env]:
            raise ValueError(f"{both[0]} is in env and in secrets. Remove one.")
        for key in ("temp", "logs", "python"):
            path = getattr(self, key)
            if path is not None and not path.startswith(("/", "~/") if key == "logs" else "/"):
                raise ValueError(f"{key}={path} must be an absolute path on the hosts.")
        if (over := len(self.folder(self.head).encode()) + SOCKET - 107) > 0:
            raise ValueError(f"temp={self.temp}: too long for Ray's sockets, by {over} bytes. Write a shorter one.")
        fixed = [port for port in self.ports.model_dump().values() if isinstance(port, int) and port]
        if same := [port for port in fixed if fixed.count(port) > 1]:
            raise ValueError(f"ports: {same[0]} is given twice.")
        span = self.ports.workers
        if span is not None and span[0] >= span[1]:
            raise ValueError(f"ports.workers={list(span)}: the first must be below the last.")
        return self

    @property
    def hosts(self) -> tuple[HostConfig, ...]:
        """The head first."""
        return (self.head, *self.workers)

    def host(self, name: str) -> HostConfig:
        for host in self.hosts:
            if name == host.address:
                return host
        raise ConfigError(
            f"{name}: not a host of the cluster. Hosts: {', '.join(host.address for host in self.hosts)}."
        )

    def folder(self, host: HostConfig) -> str:
        """The cluster's folder on a host; unique per host, because hosts may share a disk."""
        short = hashlib.sha256(host.address.encode()).hexdigest()[:6]
        return os.path.join(self.temp, f"arborl-{self.name}-{short}")

    def python_of(self, host: HostConfig) -> str:
        return host.python or self.python

    def resource(self, host: HostConfig, name: str) -> int | None:
        """Its `num_cpus` or `num_gpus`."""
        value: int | None = getattr(host, name)
        default: int | None = getattr(self, name)
        return default if value is None else value

    def values(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        if missing := [name for name in self.secrets if not environ.get(name)]:
            raise ConfigError(
                f"secrets: {', '.join(missing)} not set in your environment. Set it (`export {missing[0]}=…`), or "
                "leave it out of the file."
            )
        return {name: environ[name] for name in self.secrets}

    def options(self, host: HostConfig) -> list[str]:
        """Options of `ray start` for ports and resources."""
        ports, words = self.ports, []
        if host is self.head:
            words += [f"--port={ports.gcs}", f"--dashboard-port={ports.dashboard}"]
            words += [f"--ray-client-server-port={ports.client}"]
        words += [f"--dashboard-agent-listen-port={ports.agent}"]
        words += [f"--node-manager-port={ports.node_manager}"] if ports.node_manager else []
        words += [f"--object-manager-port={ports.object_manager}"] if ports.object_manager else []
        if ports.workers:
            words += [f"--min-worker-port={ports.workers[0]}", f"--max-worker-port={ports.workers[1]}"]
        for name in ("num_cpus", "num_gpus"):
            if (count := self.resource(host, name)) is not None:
                words.append(f"--{name.replace('_', '-')}={count}")
        if self.object_store_gib is not None:
            words.append(f"--object-store-memory={int(self.object_store_gib * 2**30)}")
        return words

    def listens(self, host: HostConfig) -> dict[str, int]:
        """Ports that must be free on the host, by setting."""
        ports = self.ports
        found = {"agent": ports.agent, "node_manager": ports.node_manager, "object_manager": ports.object_manager}
        if host is self.head:
            found |= {"gcs": ports.gcs, "dashboard": ports.dashboard, "client": ports.client}
        return found


def read_cluster_spec(file: Path) -> ClusterSpec:
    """A cluster's file, or a `ConfigError` with one line for each mistake."""
    try:
        return validate(ClusterSpec, load_yaml(file))
    except ConfigError as error:
        lines = [line if line.startswith(str(file)) else f"{file}: {line}" for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from error
