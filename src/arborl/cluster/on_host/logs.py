"""Files that grow: their last lines, and what is added."""

from __future__ import annotations

import glob
import os

from .answers import Refused, pause, tell
from .folder import Folder, last_lines


class Follower:
    """A file that grows: its last lines first, None for all of it, then whatever is added."""

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


def logs(asked):
    """The last lines of files, and with `follow` what is added to them."""
    folder = Folder(asked)
    if not folder.record():
        raise Refused("nothing of the cluster is here, so there are no logs.")
    there = os.path.join(folder.path, "r", "session_latest", "logs")
    followed = {}
    while True:
        wanted = [folder.log] if any(pattern in ("*", "ray.log") for pattern in asked["files"]) else []
        for pattern in asked["files"]:
            wanted += sorted(glob.glob(os.path.join(glob.escape(there), pattern)))
        for path in wanted:
            if path not in followed and os.path.isfile(path):
                followed[path] = Follower(path, asked["lines"])
        for path, file in followed.items():
            for line in file.more(final=not asked["follow"]):
                tell(file=os.path.basename(path), line=line)
        if not asked["follow"]:
            return {"files": sorted(map(os.path.basename, followed)), "there": sorted(os.listdir(there))}
        pause(0.5)
