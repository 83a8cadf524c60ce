"""Tracker for Weights & Biases: metrics, configuration, episodes, images, summary."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from arborl.track.jsonl import read_metrics
from arborl.track.tracker import EPISODE_COLUMNS, RunStart, episode_rows, load_run_id, store_run_id
from arborl.types import Episode, Metrics

NAME = "wandb"


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

        before = load_run_id(run.folder, NAME)
        run_id = before or secrets.token_hex(4)
        store_run_id(run.folder, NAME, run_id)
        folder = Path(self.dir or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            id=run_id,
            resume="allow" if self.mode == "online" and before else None,  # offline, `wandb sync` joins both by the id
            dir=str(folder),
            mode=self.mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        if run.step:
            self._resend_last_step(run)

    def _resend_last_step(self, run: RunStart) -> None:
        """wandb sends a step when the next one begins, so a kill may have lost the last."""
        for row in read_metrics(run.folder / "metrics.jsonl"):
            if row.pop("step") == run.step:
                self.log(row, run.step)

    def log(self, metrics: Metrics, step: int) -> None:
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self.run.log(finite, step=step)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        import wandb

        table = wandb.Table(columns=list(EPISODE_COLUMNS), data=episode_rows(episodes, step, kind))
        self.run.log({f"episodes/{kind}": table}, step=step)

    def picture(self, path: Path, step: int, kind: str) -> None:
        import wandb

        moving = path.suffix == ".gif"
        shown = wandb.Video(str(path), path.stem) if moving else wandb.Image(str(path), caption=path.stem)
        number = self.num_images[kind, step] = self.num_images[kind, step] + 1
        self.run.log({f"pictures/{kind}/{number}": shown}, step=step)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self.state = state
        for when in ("before", "after"):
            for name, value in (summary.get(when) or {}).items():
                self.run.summary[f"{when}/{name}"] = value
        self.run.summary["state"] = state

    def close(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if self.state == "finished" else 1)
