"""Tracker for MLflow: metrics, configuration as parameters, episodes and images as artifacts."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.track.tracker import EPISODE_COLUMNS, RunStart, episode_rows, load_run_id, store_run_id
from arborl.types import Episode, Metrics

NAME = "mlflow"
LONGEST = 500
"""Characters of a parameter's value; servers refuse longer ones."""
AT_ONCE = 100
"""Parameters that a server takes in one request."""
STATES = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowTracker:
    """MLflow, by its client, which has no global state.

    Args:
        uri: tracking server, database or folder: `http://…`, `sqlite:///mlflow.db`, `mlruns`.
        experiment: created if it does not exist.
        name: name of the run. Default: that of its folder.
    """

    def __init__(self, uri: str = "mlruns", experiment: str = "arborl", name: str | None = None):
        self.uri, self.experiment, self.name = uri, experiment, name
        self.client: Any = None
        self.run = ""
        self.state = "failed"

    def begin(self, run: RunStart) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if "://" not in self.uri or self.uri.startswith("file:"):  # MLflow requires this for a folder
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = MlflowClient(self.uri)
        before = load_run_id(run.folder, NAME)
        if before is not None:
            self.run = before
            self.client.update_run(self.run, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        self.run = self.client.create_run(experiment, run_name=self.name or run.name).info.run_id
        store_run_id(run.folder, NAME, self.run)
        parameters = [Param(_name(key), str(value)[:LONGEST]) for key, value in _flat(run.config)]
        for place in range(0, len(parameters), AT_ONCE):
            self.client.log_batch(self.run, params=parameters[place : place + AT_ONCE])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {_name(name): value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in finite.items()])

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        lines = [json.dumps(dict(zip(EPISODE_COLUMNS, row, strict=True))) for row in episode_rows(episodes, step, kind)]
        self.client.log_text(self.run, "\n".join(lines) + "\n", f"episodes/{kind}-step-{step:06}.jsonl")

    def picture(self, path: Path, step: int, kind: str) -> None:
        self.client.log_artifact(self.run, str(path), f"pictures/{kind}")

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self.state = state
        self.client.log_text(self.run, json.dumps(summary, indent=2, default=str), "summary.json")

    def close(self) -> None:
        if self.run:
            self.client.set_terminated(self.run, STATES.get(self.state, "FAILED"))


def _name(text: str) -> str:
    """A name that MLflow accepts. In a file store `a/b` is a file, so `a/b/c` becomes `a/b.c`."""
    section, slash, rest = re.sub(r"[^\w\-. /]", "_", text)[:250].partition("/")
    return section + slash + rest.replace("/", ".")


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, tree
