"""The run on Weights & Biases: numbers by step, the configuration, a table of episodes, pictures, the summary."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arborl.config.training_config import WandbConfig
from arborl.track.episode_rows import COLUMNS, rows
from arborl.track.jsonl import read_metrics
from arborl.track.run_ids import keep_id, known_id
from arborl.track.tracker import Begun
from arborl.types import Episode, Metrics

NAME = "wandb"


def mode_of(config: WandbConfig) -> Any:
    """`online`, or what else was asked for."""
    return config.mode or os.environ.get("WANDB_MODE") or "online"


class WandbTracker:
    """Follows a run with `wandb`. Its id there is kept in the run's folder, so that a resumed run goes on as the same.

    Steps that a killed run had sent after its last checkpoint stay as they were sent: a history there only grows.
    """

    def __init__(self, config: WandbConfig):
        self.config = config
        self.run: Any = None
        self.state = "failed"
        self.drawn = Counter[tuple[str, int]]()
        """Pictures of a kind at a step."""

    def begin(self, run: Begun) -> None:
        import wandb

        before = known_id(run.folder, NAME)
        own = before or secrets.token_hex(4)
        keep_id(run.folder, NAME, own)
        folder = self.config.dir or run.folder
        folder.mkdir(parents=True, exist_ok=True)
        mode = mode_of(self.config)
        self.run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self.config.name or run.name,
            id=own,
            resume="allow"
            if mode == "online" and before
            else None,  # offline, `wandb sync` puts both halves together by the id
            dir=str(folder),
            mode=mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        if run.step:
            self._send_again(run)

    def _send_again(self, run: Begun) -> None:
        """The step that the run goes on from: a step is sent when the next one begins, so a kill may have lost it."""
        for row in read_metrics(run.folder / "metrics.jsonl"):
            if row.pop("step") == run.step:
                self.log(row, run.step)

    def log(self, metrics: Metrics, step: int) -> None:
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self.run.log(finite, step=step)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=rows(episodes, step, kind))
        self.run.log({f"episodes/{kind}": table}, step=step)

    def picture(self, path: Path, step: int, kind: str) -> None:
        import wandb

        moving = path.suffix == ".gif"
        shown = wandb.Video(str(path), path.stem) if moving else wandb.Image(str(path), caption=path.stem)
        number = self.drawn[kind, step] = self.drawn[kind, step] + 1
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
