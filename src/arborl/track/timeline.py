"""Timeline of a run in Chrome's trace format, for https://ui.perfetto.dev.

Each kind of work is a process there: steps, learner, engine, rollout, model calls, tools. Concurrent work of one kind
is shown on separate lines.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from arborl import spans
from arborl.errors import disk_errors

ALWAYS = ("steps", "learner")
"""Kinds of work that are recorded for all steps."""
BUFFER_SIZE = 512
"""Slices in memory before a write."""
BEGIN, END = b'[\n{"name":"run","ph":"M","pid":0}', b"\n]\n"


class Timeline:
    """Records the spans of `arborl.spans` inside `with`: `steps` steps completely, later ones only for `ALWAYS`."""

    def __init__(self, path: Path, steps: int):
        self.path, self.steps = path, steps
        self.done = 0
        self.slices: list[dict[str, Any]] = []
        self.kinds: dict[str, int] = {}
        self.free: dict[str, list[int]] = {}
        self.lines: dict[str, int] = {}
        """Number of lines by kind."""
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self._open()
        spans.set_timeline(self)
        return self

    def __exit__(self, *_: object) -> None:
        spans.set_timeline(None)
        with disk_errors(self.path), self.path.open("ab") as file:
            self._write()
            file.write(END)

    def wanted(self, kind: str) -> bool:
        return self.done < self.steps or kind in ALWAYS

    def take(self, kind: str) -> int:
        """A free line of this kind."""
        with self.lock:
            free = self.free.setdefault(kind, [])
            if free:
                return heapq.heappop(free)
            self.lines[kind] = self.lines.get(kind, 0) + 1
            return self.lines[kind]

    def add(self, kind: str, name: str, began: float, ended: float, args: Mapping[str, Any], line: int = 0) -> None:
        """Add a slice between two times of `time.time()` and free its line."""
        with self.lock:
            if line:
                heapq.heappush(self.free.setdefault(kind, []), line)
            number = self._number(kind)
            self.slices.append(
                {"name": name, "ph": "X", "ts": round(began * 1e6), "dur": max(round((ended - began) * 1e6), 1),
                 "pid": number, "tid": line or 1, "args": dict(args)}
            )  # fmt: skip
            self.done += name == "arborl.step"
            if len(self.slices) >= BUFFER_SIZE or name == "arborl.step":
                self._write()

    def _number(self, kind: str) -> int:
        if kind not in self.kinds:
            self.kinds[kind] = len(self.kinds) + 1
            about = {"ph": "M", "pid": self.kinds[kind], "tid": 0}
            self.slices.append(about | {"name": "process_name", "args": {"name": kind}})
            self.slices.append(about | {"name": "process_sort_index", "args": {"sort_index": self.kinds[kind]}})
        return self.kinds[kind]

    def _open(self) -> None:
        """Start the file, or continue one without its end mark."""
        if not self.path.is_file() or self.path.stat().st_size < len(END):
            self.path.write_bytes(BEGIN)
            return
        with self.path.open("r+b") as file:
            file.seek(-len(END), os.SEEK_END)
            if file.read() == END:
                file.seek(-len(END), os.SEEK_END)
                file.truncate()
            else:  # the run was killed, perhaps within a line
                file.truncate(max(self.path.read_bytes().rfind(b",\n"), len(BEGIN)))

    def _write(self) -> None:
        slices, self.slices = self.slices, []
        with self.path.open("ab") as file:
            file.write("".join(f",\n{json.dumps(one, separators=(',', ':'), default=str)}" for one in slices).encode())
