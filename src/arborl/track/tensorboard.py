"""The same numbers for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from arborl.types import Metrics


class TensorBoardTracker:
    """Writes event files; `tensorboard --logdir runs` shows them.

    Args:
        folder: where the event files go.
        resume_at: the first step this run will log; TensorBoard then hides what a killed run wrote from there on.
    """

    def __init__(self, folder: Path, resume_at: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # here: it costs seconds, and not every run wants it

        self.writer = SummaryWriter(str(folder), purge_step=resume_at)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
