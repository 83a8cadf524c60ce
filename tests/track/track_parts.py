"""Parts of a user's: trackers, and a tool that breaks."""

from __future__ import annotations

from pathlib import Path

import arborl


class NoTracker:
    def log(self, metrics, step):
        """And no close."""


class Mine:
    """Writes one line per call."""

    def __init__(self, path: str = "mine.txt"):
        self.path = Path(path)

    def _write(self, *words):
        with self.path.open("a") as file:
            print(*words, file=file)

    def begin(self, run):
        self._write("begin", run.step, run.config["agent"]["args"].get("api_key"))

    def log(self, metrics, step):
        self._write("log", step)

    def episodes(self, episodes, step, kind):
        self._write("episodes", step, kind, len(episodes))

    def picture(self, path, step, kind):
        self._write("picture", step, kind, path.name)

    def finish(self, summary, state):
        self._write("finish", summary["steps"], state)

    def close(self):
        self._write("close")


class Grumpy(Mine):
    def log(self, metrics, step):
        raise RuntimeError("not today")


@arborl.tool
def broken(expression: str) -> str:
    """Never works.

    Args:
        expression: anything.
    """
    raise ValueError("out of order")
