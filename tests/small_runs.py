"""Settings of small runs, the command line without a new process, and what runs leave behind."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.track.jsonl import read_metrics

LAKE = [
    "rollout.tasks_per_step=2", "rollout.group_size=3", "track.gifs=0", "track.tensorboard=false", "threads=1",
    "env.args.size=3", "env.args.max_steps=4",  # of a few short episodes some succeed, so there is a gradient
    "model.device=cpu", "algorithm.skip_zero_variance=false",
]  # fmt: skip


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def settled(folder: Path) -> list[dict]:
    """A run's metrics without the ones that are about time and the machine."""
    return [
        {k: v for k, v in row.items() if not (k.startswith(("time/", "system/")) or "second" in k)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def weights(folder: Path) -> dict:
    """Of a run's last checkpoint."""
    return load_file(sorted((folder / "checkpoints").glob("step-*/model/model.safetensors"))[-1])
