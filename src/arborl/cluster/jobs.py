"""Jobs of a cluster over ssh: a command that the head starts, its files, its output and its exit code; logs."""

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

from arborl.cluster.fleet import Fleet
from arborl.cluster.spec import HostConfig
from arborl.cluster.ssh import HostError
from arborl.errors import ConfigError

LARGEST = 50 * 2**20
"""Bytes of a folder that travels with a job; data belongs on a disk of the hosts."""
LEFT_AT_HOME = ("runs", "__pycache__", "node_modules")
"""Folders that do not travel; nor do hidden ones."""
SHOWN = ("ray.log", "raylet.out", "raylet.err", "gcs_server.out", "job-driver-*.log")
"""Files that are shown where none is named."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command that was submitted."""

    id: str
    status: str
    """Ray's: SUCCEEDED, FAILED, STOPPED; RUNNING where it was not waited for."""
    exit_code: int
    message: str = ""


def submit(
    fleet: Fleet,
    command: Sequence[str],
    files: dict[str, bytes] | None = None,
    wait: bool = True,
    heard: Callable[[str], None] = lambda line: None,
) -> Job:
    """Run a command on the head, as a job of the cluster, with the cluster's environment.

    A connection that is lost does not end the job; Ctrl-C does.

    Args:
        fleet: of which cluster.
        command: its words.
        files: what it finds in its folder, which is then a folder of Ray's.
        wait: until it ends.
        heard: is given each line that it prints.
    """
    job, asked = f"arborl-{secrets.token_hex(4)}", dict[str, Any](command=shlex.join(command), wait=wait)
    if files is not None:
        asked["files"] = base64.b64encode(pack(files)).decode()
    begun: list[bool] = []

    def told(what: dict[str, Any]) -> None:
        if "job" in what:
            begun.append(True)
            fleet.say(f"job {job}: {asked['command']}")
        else:
            heard(what["line"])

    head = fleet.spec.head
    try:
        ended = fleet.hosts.ask(head, "submit", told, None if wait else 180, job=job, **asked)
    except KeyboardInterrupt:
        if begun:
            fleet.hosts.ask(head, "stop_job", job=job)
            fleet.say(f"job {job}: stopped")
        raise
    except HostError as error:
        if not begun or not wait:
            raise
        raise HostError(
            error.host,
            f"{error.what} Unless the head is gone the job goes on: `arborl cluster logs --job {job} --follow`.",
        ) from error
    if not wait:
        return Job(job, "RUNNING", 0)
    code = ended["exit_code"]
    succeeded = ended["status"] == "SUCCEEDED"
    return Job(job, ended["status"], 0 if succeeded else code or 1, ended["message"])


def gather(folder: Path) -> dict[str, bytes]:
    """The files below a folder, as a job finds them."""
    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder}: no such folder.")
    found, size = {}, 0
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_AT_HOME and not name.startswith("."))
        for name in sorted(names):
            path = Path(above, name)
            if not path.is_file():
                continue
            size += path.stat().st_size
            if size > LARGEST:
                raise ConfigError(
                    f"--working-dir {folder}: more than {LARGEST // 2**20} MiB, at {path}. Put data on a disk that the "
                    "hosts have, and send a folder with code and settings."
                )
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def pack(files: dict[str, bytes]) -> bytes:
    """As one archive, the same for the same files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            about = zipfile.ZipInfo(name)
            about.external_attr = 0o644 << 16
            archive.writestr(about, content, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def logs(
    fleet: Fleet,
    hosts: Sequence[HostConfig],
    heard: Callable[[str, str, str], None],
    files: Sequence[str] = (),
    lines: int = 20,
    follow: bool = False,
) -> list[str]:
    """The last lines of each host's logs.

    Args:
        fleet: of which cluster.
        hosts: which of it.
        heard: is given host, file and line.
        files: names, `*` for any; those of `SHOWN` where there are none.
        lines: how many of each file.
        follow: and whatever is added, until Ctrl-C.

    Returns:
        Hosts that could not be asked, with the reason.
    """

    def one(host: HostConfig) -> dict[str, Any]:
        def told(what: dict[str, Any]) -> None:
            if "line" in what:
                heard(host.address, what["file"], what["line"])

        asked = {"files": list(files or SHOWN), "lines": lines, "follow": follow}
        answer = fleet.hosts.ask(host, "logs", told, None if follow else 60, **asked)
        if not answer["files"]:
            there = ", ".join(answer["there"][:20])
            raise HostError(host.address, f"has no log {', '.join(files)}. There: {there}.")
        return answer

    answers = fleet.hosts.each(hosts, one)
    return [str(answer) for answer in answers.values() if isinstance(answer, HostError)]
