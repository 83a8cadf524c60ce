"""The same numbers for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from arborl.types import Metrics


class TensorBoardTracker:
    """Writes event files; `tensorboard --logdir runs` shows them.

    Args:
        folder: where the event files go.
        done: the step a resumed run goes on from; TensorBoard then hides what a killed run wrote after it.
    """

    def __init__(self, folder: Path, done: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # here: it costs seconds, and not every run wants it

        self.writer = SummaryWriter(str(folder), purge_step=0 if done is None else done + 1)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
