"""Jobs of a cluster over ssh: submission, files, output, exit code; logs of the hosts."""

from __future__ import annotations

import base64
import io
import os
import secrets
import shlex
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborl.cluster.launcher.cluster_spec import HostConfig
from arborl.cluster.launcher.ssh_cluster import SshCluster
from arborl.cluster.launcher.ssh_hosts import HostError
from arborl.errors import ConfigError

MAX_UPLOAD = 50 * 2**20
"""Bytes of a job's working directory."""
SKIPPED_FOLDERS = ("runs", "__pycache__", "node_modules")
"""Folders that are not sent, besides hidden ones."""
DEFAULT_LOGS = ("ray.log", "raylet.out", "raylet.err", "gcs_server.out", "job-driver-*.log")
"""Log files that are shown by default."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    id: str
    status: str
    """Ray's: SUCCEEDED, FAILED, STOPPED; RUNNING if it was not waited for."""
    exit_code: int
    message: str = ""


def submit_job(
    cluster: SshCluster,
    command: Sequence[str],
    files: dict[str, bytes] | None = None,
    wait: bool = True,
    on_line: Callable[[str], None] = lambda line: None,
) -> ClusterJob:
    """Run a command on the head, as a job of the cluster, with the cluster's environment.

    A connection that is lost does not end the job; Ctrl-C does.
    """
    job, request = f"arborl-{secrets.token_hex(4)}", dict[str, Any](command=shlex.join(command), wait=wait)
    if files is not None:
        request["files"] = base64.b64encode(pack(files)).decode()
    begun: list[bool] = []

    def on_message(message: dict[str, Any]) -> None:
        if "job" in message:
            begun.append(True)
            cluster.report(f"job {job}: {request['command']}")
        else:
            on_line(message["line"])

    head = cluster.spec.head
    try:
        ended = cluster.hosts.ask(head, "submit", on_message, None if wait else 180, job=job, **request)
    except KeyboardInterrupt:
        if begun:
            cluster.hosts.ask(head, "stop_job", job=job)
            cluster.report(f"job {job}: stopped")
        raise
    except HostError as error:
        if not begun or not wait:
            raise
        raise HostError(
            error.host,
            f"{error.what} The job continues unless the head is gone: `arborl cluster logs --job {job} --follow`.",
        ) from error
    if not wait:
        return ClusterJob(job, "RUNNING", 0)
    code = ended["exit_code"]
    succeeded = ended["status"] == "SUCCEEDED"
    return ClusterJob(job, ended["status"], 0 if succeeded else code or 1, ended["message"])


def collect_files(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder}: no such folder.")
    found, size = {}, 0
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(names):
            path = Path(above, name)
            if not path.is_file():
                continue
            size += path.stat().st_size
            if size > MAX_UPLOAD:
                raise ConfigError(
                    f"--working-dir {folder}: more than {MAX_UPLOAD // 2**20} MiB, at {path}. Put data on a "
                    "disk of the hosts, and send a folder with code and settings."
                )
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def pack(files: dict[str, bytes]) -> bytes:
    """A reproducible zip archive."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            about = zipfile.ZipInfo(name)
            about.external_attr = 0o644 << 16
            archive.writestr(about, content, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def read_logs(
    cluster: SshCluster,
    hosts: Sequence[HostConfig],
    on_line: Callable[[str, str, str], None],
    files: Sequence[str] = (),
    lines: int = 20,
    follow: bool = False,
) -> list[str]:
    """The last lines of each host's logs.

    Args:
        cluster: the cluster.
        hosts: of it.
        on_line: called with host, file and line.
        files: names, with `*` as wildcard; default: those of `DEFAULT_LOGS`.
        lines: number of lines per file.
        follow: also print new lines, until Ctrl-C.

    Returns:
        Errors of hosts that did not answer.
    """

    def one(host: HostConfig) -> dict[str, Any]:
        def on_message(message: dict[str, Any]) -> None:
            if "line" in message:
                on_line(host.address, message["file"], message["line"])

        request = {"files": list(files or DEFAULT_LOGS), "lines": lines, "follow": follow}
        answer = cluster.hosts.ask(host, "logs", on_message, None if follow else 60, **request)
        if not answer["files"]:
            there = ", ".join(answer["there"][:20])
            raise HostError(host.address, f"has no log {', '.join(files)}. There: {there}.")
        return answer

    answers = cluster.hosts.each(hosts, one)
    return [str(answer) for answer in answers.values() if isinstance(answer, HostError)]
