"""The trackers that a configuration names, and the tracker for MLflow.

Errors of the configuration are raised before anything is written.
"""

from __future__ import annotations

import inspect
import json
import netrc
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arborl.config.part_config import PartConfig
from arborl.config.training_config import MlflowConfig, TrackConfig
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import Registry, short_name, unique_name
from arborl.track.tracker import EPISODE_COLUMNS, RunStart, Tracker, episode_rows
from arborl.track.wandb_run import WandbTracker, finite_metrics, load_run_ids, store_run_id, wandb_mode
from arborl.types import Episode, Metrics

TRACKERS = Registry("tracker", {})
Makers = dict[str, Callable[[], Tracker]]


def make_trackers(config: TrackConfig, objects: Mapping[str, Any]) -> Makers:
    """Functions that create the trackers, by name; `objects` are trackers passed from Python."""
    makers: Makers = {}
    if config.wandb.project is not None:
        _require("wandb")
        if wandb_mode(config.wandb) == "online":
            _require_login()
        makers["wandb"] = partial(WandbTracker, config.wandb)
    if config.mlflow.uri is not None:
        _require("mlflow")
        makers["mlflow"] = partial(MlflowTracker, config.mlflow)
    for number, part in enumerate(config.trackers):
        where = f"track.trackers.{number}"
        makers[unique_name(short_name(part.name), makers)] = _custom_tracker(part, objects, where)
    return makers


def _custom_tracker(part: PartConfig, objects: Mapping[str, Any], where: str) -> Callable[[], Tracker]:
    found = objects[part.name] if part.name in objects else TRACKERS[part.name]
    if not callable(getattr(found, "log", None)) or not callable(getattr(found, "close", None)):
        raise ConfigError(
            f"{where}={part.name}: a tracker must have log(metrics, step) and close(); see docs/tracking.md."
        )
    if not inspect.isclass(found):
        if part.args:
            raise ConfigError(f"{where}.args: {part.name!r} is an object and takes no arguments.")
        return lambda: found  # type: ignore[no-any-return]
    signature = inspect.signature(found)
    try:
        signature.bind(**part.args)
    except TypeError as error:
        near = "".join(did_you_mean(key, signature.parameters) for key in part.args if key not in signature.parameters)
        raise ConfigError(f"{where}.args: {error}.{near}") from error
    make: Any = found
    return partial(make, **part.args)


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"track.{package} needs a package that is not installed. Write pip install 'arborl[{package}]'."
        )


def _require_login() -> None:
    """Without a key, wandb would prompt at the keyboard or end the process."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    server = os.environ.get("WANDB_BASE_URL", "wandb").partition("://")[2].partition("/")[0].partition(":")[0]
    with suppress(OSError, netrc.NetrcParseError):
        if any((server or "wandb") in host for host in netrc.netrc(os.environ.get("NETRC")).hosts):
            return
    raise ConfigError(
        "track.wandb: there is no key of Weights & Biases. Run `wandb login` or set WANDB_API_KEY, or write "
        "track.wandb.mode=offline."
    )


# ------------------------------------------------------------------------------------------------ MLflow

MAX_PARAMETER = 500
"""Characters of a parameter's value; servers refuse longer ones."""
MAX_BATCH = 100
"""Parameters that a server takes in one request."""
MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowTracker:
    """Uses MLflow's client, which has no global state. Episodes and images are artifacts."""

    def __init__(self, config: MlflowConfig):
        self.config = config
        self.client: Any = None
        self.run = ""
        self.state = "failed"

    def begin(self, run: RunStart) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = self.config.uri or ""
        if "://" not in uri or uri.startswith("file:"):  # MLflow requires this for a folder
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = MlflowClient(uri)
        self.run = load_run_ids(run.folder).get("mlflow") or ""
        if self.run:
            self.client.update_run(self.run, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.config.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.config.experiment)
        self.run = self.client.create_run(experiment, run_name=self.config.name or run.name).info.run_id
        store_run_id(run.folder, "mlflow", self.run)
        parameters = [Param(_mlflow_name(key), str(value)[:MAX_PARAMETER]) for key, value in _flat(run.config)]
        for place in range(0, len(parameters), MAX_BATCH):
            self.client.log_batch(self.run, params=parameters[place : place + MAX_BATCH])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_mlflow_name(name), value, now, step) for name, value in finite_metrics(metrics).items()]
        self.client.log_batch(self.run, metrics=rows)

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
            self.client.set_terminated(self.run, MLFLOW_STATES.get(self.state, "FAILED"))


def _mlflow_name(text: str) -> str:
    """A name that MLflow accepts. In a file store `a/b` is a file, so `a/b/c` becomes `a/b.c`."""
    section, slash, rest = re.sub(r"[^\w\-. /]", "_", text)[:250].partition("/")
    return section + slash + rest.replace("/", ".")


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, tree
