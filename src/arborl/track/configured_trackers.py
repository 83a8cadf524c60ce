"""The trackers that a configuration names: Weights & Biases, MLflow, and the user's own classes.

Errors of the configuration are raised before anything is written. Run ids of hosted trackers are stored in the run
folder, so that a resumed run continues the same run there.
"""

from __future__ import annotations

import inspect
import json
import math
import netrc
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from arborl.config.part_config import PartConfig
from arborl.config.training_config import TrackConfig
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import Registry, short_name, unique_name
from arborl.track.jsonl import read_metrics
from arborl.track.tracker import EPISODE_COLUMNS, RunStart, Tracker, episode_rows
from arborl.types import Episode, Metrics

TRACKERS = Registry("tracker", {"wandb": f"{__name__}:WandbTracker", "mlflow": f"{__name__}:MlflowTracker"})
Makers = dict[str, Callable[[], Tracker]]


def make_trackers(config: TrackConfig, objects: Mapping[str, Any]) -> Makers:
    """Functions that create the trackers, by name; `objects` are trackers passed from Python."""
    makers: Makers = {}
    for number, part in enumerate(config.trackers):
        where = f"track.trackers.{number}"
        makers[unique_name(short_name(part.name), makers)] = _tracker(part, objects, where)
        if part.name in ("wandb", "mlflow") and find_spec(part.name) is None:
            raise ConfigError(
                f"{where}={part.name} needs a package that is not installed. Write pip install 'arborl[{part.name}]'."
            )
        if part.name == "wandb" and (part.args.get("mode") or os.environ.get("WANDB_MODE", "online")) == "online":
            _require_login(where)
    return makers


def _tracker(part: PartConfig, objects: Mapping[str, Any], where: str) -> Callable[[], Tracker]:
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


def _require_login(where: str) -> None:
    """Without a key, wandb would prompt at the keyboard or end the process."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    server = os.environ.get("WANDB_BASE_URL", "wandb").partition("://")[2].partition("/")[0].partition(":")[0]
    with suppress(OSError, netrc.NetrcParseError):
        if any((server or "wandb") in host for host in netrc.netrc(os.environ.get("NETRC")).hosts):
            return
    raise ConfigError(
        f"{where}=wandb: there is no key of Weights & Biases. Run `wandb login` or set WANDB_API_KEY, or write "
        "{name: wandb, args: {mode: offline}}."
    )


def _load_run_ids(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        run_ids = json.loads((folder / "trackers.json").read_text(encoding="utf-8"))
        return run_ids if isinstance(run_ids, dict) else {}
    return {}


def _store_run_id(folder: Path, tracker: str, run_id: str) -> None:
    temporary = folder / f".trackers.json.{tracker}.tmp"
    temporary.write_text(json.dumps({**_load_run_ids(folder), tracker: run_id}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "trackers.json")


def _finite(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


# ------------------------------------------------------------------------------------------------ Weights & Biases


class WandbTracker:
    """Weights & Biases. Its run id is stored in the run folder, so that a resumed run continues the same wandb run.
    Steps that a killed run sent after its last checkpoint cannot be removed there.

    Args:
        project: the project.
        name: name of the run. Default: that of its folder.
        entity: user or team. Default: your own.
        dir: folder of its files. Default: the run folder.
        mode: `offline` stores data for `wandb sync FOLDER`. Default: `WANDB_MODE`, else `online`.
    """

    def __init__(
        self,
        project: str = "arborl",
        name: str | None = None,
        entity: str | None = None,
        dir: str | Path | None = None,
        mode: Literal["online", "offline"] | None = None,
    ):
        if mode not in (None, "online", "offline"):
            raise ValueError(f"mode={mode!r}: must be online or offline")
        self.project, self.name, self.entity, self.dir = project, name, entity, dir
        self.mode: Any = mode or os.environ.get("WANDB_MODE") or "online"
        self.run: Any = None
        self.state = "failed"
        self.num_images = Counter[tuple[str, int]]()
        """Number of images by kind and step."""

    def begin(self, run: RunStart) -> None:
        import wandb

        before = _load_run_ids(run.folder).get("wandb")
        run_id = before or secrets.token_hex(4)
        _store_run_id(run.folder, "wandb", run_id)
        folder = Path(self.dir or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            id=run_id,
            # offline, `wandb sync` joins both parts by the id
            resume="allow" if self.mode == "online" and before else None,
            dir=str(folder),
            mode=self.mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        if run.step:  # wandb sends a step when the next one begins, so a kill may have lost the last
            for row in read_metrics(run.folder / "metrics.jsonl"):
                if row.pop("step") == run.step:
                    self.log(row, run.step)

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(_finite(metrics), step=step)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        import wandb

        table = wandb.Table(columns=list(EPISODE_COLUMNS), data=episode_rows(episodes, step, kind))
        self.run.log({f"episodes/{kind}": table}, step=step)

    def picture(self, path: Path, step: int, kind: str) -> None:
        import wandb

        is_gif = path.suffix == ".gif"
        shown = wandb.Video(str(path), path.stem) if is_gif else wandb.Image(str(path), caption=path.stem)
        self.num_images[kind, step] += 1
        self.run.log({f"pictures/{kind}/{self.num_images[kind, step]}": shown}, step=step)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self.state = state
        for when in ("before", "after"):
            for name, value in (summary.get(when) or {}).items():
                self.run.summary[f"{when}/{name}"] = value
        self.run.summary["state"] = state

    def close(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if self.state == "finished" else 1)


# ------------------------------------------------------------------------------------------------ MLflow

MAX_PARAMETER = 500
"""Characters of a parameter's value; servers refuse longer ones."""
MAX_BATCH = 100
"""Parameters that a server takes in one request."""
MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED"}


class MlflowTracker:
    """MLflow, by its client, which has no global state. Episodes and images are artifacts.

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
        self.run = _load_run_ids(run.folder).get("mlflow") or ""
        if self.run:
            self.client.update_run(self.run, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        self.run = self.client.create_run(experiment, run_name=self.name or run.name).info.run_id
        _store_run_id(run.folder, "mlflow", self.run)
        parameters = [Param(_mlflow_name(key), str(value)[:MAX_PARAMETER]) for key, value in _flat(run.config)]
        for place in range(0, len(parameters), MAX_BATCH):
            self.client.log_batch(self.run, params=parameters[place : place + MAX_BATCH])

    def log(self, metrics: Metrics, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_mlflow_name(name), value, now, step) for name, value in _finite(metrics).items()]
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
