"""WandbTracker: tracker for Weights & Biases; and the ids of a run at hosted trackers.

Run ids are stored in the run folder, so that a resumed run continues the same run there.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arborl.config.training_config import WandbConfig
from arborl.track.jsonl import read_metrics
from arborl.track.tracker import EPISODE_COLUMNS, RunStart, episode_rows
from arborl.types import Episode, Metrics


def load_run_ids(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        run_ids = json.loads((folder / "trackers.json").read_text(encoding="utf-8"))
        return run_ids if isinstance(run_ids, dict) else {}
    return {}


def store_run_id(folder: Path, tracker: str, run_id: str) -> None:
    temporary = folder / f".trackers.json.{tracker}.tmp"
    temporary.write_text(json.dumps({**load_run_ids(folder), tracker: run_id}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "trackers.json")


def finite_metrics(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def wandb_mode(config: WandbConfig) -> Any:
    return config.mode or os.environ.get("WANDB_MODE") or "online"


class WandbTracker:
    """Steps that a killed run sent after its last checkpoint cannot be removed from wandb."""

    def __init__(self, config: WandbConfig):
        self.config = config
        self.run: Any = None
        self.state = "failed"
        self.num_images = Counter[tuple[str, int]]()
        """Number of images by kind and step."""

    def begin(self, run: RunStart) -> None:
        import wandb

        before = load_run_ids(run.folder).get("wandb")
        run_id = before or secrets.token_hex(4)
        store_run_id(run.folder, "wandb", run_id)
        folder, mode = self.config.dir or run.folder, wandb_mode(self.config)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.name or run.name,
            id=run_id,
            resume="allow" if mode == "online" and before else None,  # offline, `wandb sync` joins both parts by the id
            dir=str(folder),
            mode=mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        if run.step:  # wandb sends a step when the next one begins, so a kill may have lost the last
            for row in read_metrics(run.folder / "metrics.jsonl"):
                if row.pop("step") == run.step:
                    self.log(row, run.step)

    def log(self, metrics: Metrics, step: int) -> None:
        self.run.log(finite_metrics(metrics), step=step)

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
