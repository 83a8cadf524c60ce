"""The metrics file `metrics.jsonl`: one JSON object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arborl.errors import disk_errors
from arborl.track.folder_files import read_lines
from arborl.types import Metrics


class JsonlTracker:
    """Appends `{"step": n, **metrics}`, one flushed line per step; a number that is not finite is written as null.

    Later metrics of the latest step (its evaluation) are added to its line. A run resumed at step `done` drops torn
    lines and later steps, so that the file has each step once; a new run (None) drops all lines.
    """

    def __init__(self, path: Path, done: int | None = None):
        self.path, self.latest = path, dict[str, Any]()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                rows = [row for row in read_metrics(path) if done is not None and row["step"] <= done]
                _rewrite(path, rows)
                self.latest = rows[-1] if rows else {}
            self.file = path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, step: int) -> None:
        with disk_errors(self.path):
            if self.latest.get("step") == step:
                self.latest |= metrics
                earlier = [row for row in read_metrics(self.path) if row["step"] != step]
                self.file.close()
                _rewrite(self.path, [*earlier, self.latest])
                self.file = self.path.open("a", encoding="utf-8")
                return
            self.latest = {"step": step, **metrics}
            self.file.write(_line(self.latest))
            self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file in order, without torn lines and values of other types."""
    for _, line in read_lines(path):
        try:
            row = DECODER.decode(line.decode("utf-8", "replace").strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            if not set(map(type, row.values())) <= PLAIN:
                row = {name: value for name, value in row.items() if type(value) in PLAIN}
            yield row


def _small_int(text: str) -> int | None:
    return int(text) if len(text) < 19 else None


DECODER = json.JSONDecoder(parse_int=_small_int)
PLAIN = {int, float, str, bool, type(None)}


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text("".join(_line(row) for row in rows), encoding="utf-8")
    os.replace(fresh, path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    return float(value) if math.isfinite(value) else None
