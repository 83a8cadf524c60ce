"""Replies to the caller; the cluster's folder on a host, and the record in it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import sys
import time

ENDED = "arborl:"
"""Prefix of the supervisor's lines in Ray's log."""
MARK = "\x1e"
"""First character of every reply."""


class RequestRefused(Exception):
    """The request cannot be fulfilled; the text is for the user."""


def send(**what):
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def pause(seconds):
    """Wait; exit if the caller is gone, which closes standard input."""
    ready, _, _ = select.select([0], [], [], seconds)
    if ready and not os.read(0, 1):
        sys.exit(0)


class ClusterFolder:
    def __init__(self, request):
        self.path, self.cluster = request["folder"], request["cluster"]
        self.record_file = os.path.join(self.path, "record.json")
        self.log = os.path.join(self.path, "ray.log")
        self.ray_logs = os.path.join(self.path, "r", "session_latest", "logs")

    def record(self):
        """The record; empty if the cluster has nothing on this host."""
        try:
            about = os.lstat(self.path)
        except FileNotFoundError:
            return {}
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            raise RequestRefused(f"{self.path} belongs to another user. Write another `temp` or another `name`.")
        try:
            with open(self.record_file) as file:
                found = json.load(file)
        except FileNotFoundError:
            if not os.listdir(self.path):
                return {}
            raise RequestRefused(
                f"{self.path} exists and was not made by this command. Remove it, or write another `temp`."
            ) from None
        if found.get("cluster") != self.cluster:
            raise RequestRefused(f"{self.path} is of the cluster {found.get('cluster')!r}. Write another `temp`.")
        return found

    def write(self, record):
        """Mode 0600: the record holds the cluster's token."""
        handle = os.open(self.record_file + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(self.record_file + ".new", self.record_file)

    def lock(self):
        """Create the folder if needed, and lock it until this process ends."""
        until = time.monotonic() + 60
        while True:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                self.record()  # checks the owner
            try:
                handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino == os.stat(self.path).st_ino:
                    return handle
            except FileNotFoundError:
                pass  # another command has removed it
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RequestRefused(f"another command is using {self.path}. Try again.") from None
            time.sleep(0.1)

    def ended(self):
        lines = [line for line in last_lines(self.log, 50) if line.startswith(ENDED)]
        return lines[-1][len(ENDED) + 1 :] if lines else "Its processes were killed, or the host was."

    def last_line(self):
        """Last line of `ray start`, without the frames of a traceback."""
        lines = [line for line in last_lines(self.log, 50) if line.strip() and not line.startswith((" ", ENDED))]
        return lines[-1] if lines else "nothing"


def last_lines(path, count):
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 200 * max(count, 1) - 20_000))
            return file.read().decode(errors="replace").splitlines()[-count:] if count else []
    except OSError:
        return []
