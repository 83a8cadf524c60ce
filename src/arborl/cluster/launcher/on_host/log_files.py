"""Log files and their new lines."""

from __future__ import annotations

import glob
import os

from .cluster_folder import ClusterFolder, last_lines
from .replies import RequestRefused, pause, send


class LogFollower:
    """Reads the last lines of a file (None: all), then new ones."""

    def __init__(self, path, lines):
        self.path, self.rest, self.at = path, b"", 0
        self.first = [] if lines is None else last_lines(path, lines)
        if lines is not None and os.path.exists(path):
            self.at = os.path.getsize(path)

    def more(self, final=False):
        first, self.first = self.first, []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                added = file.read()
                self.at += len(added)
        except FileNotFoundError:
            added = b""
        *whole, self.rest = (self.rest + added).split(b"\n")
        if final and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        return first + [line.decode(errors="replace") for line in whole]


def logs(request):
    """The last lines of files; with `follow`, new lines too."""
    folder = ClusterFolder(request)
    if not folder.record():
        raise RequestRefused("the cluster has no files on this host.")
    there = os.path.join(folder.path, "r", "session_latest", "logs")
    followed = {}
    while True:
        wanted = [folder.log] if any(pattern in ("*", "ray.log") for pattern in request["files"]) else []
        for pattern in request["files"]:
            wanted += sorted(glob.glob(os.path.join(glob.escape(there), pattern)))
        for path in wanted:
            if path not in followed and os.path.isfile(path):
                followed[path] = LogFollower(path, request["lines"])
        for path, file in followed.items():
            for line in file.more(final=not request["follow"]):
                send(file=os.path.basename(path), line=line)
        if not request["follow"]:
            return {"files": sorted(map(os.path.basename, followed)), "there": sorted(os.listdir(there))}
        pause(0.5)
