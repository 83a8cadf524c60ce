"""Episodes as moving pictures while a run goes on, with the model's words beside the frames."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from arborl.rollout.runner import EpisodeFactories
from arborl.trainer.trainer import Trainer
from arborl.types import Episode, Group, Metrics
from arborl.view import replay, save_gif
from arborl.view.gif import Decode

log = logging.getLogger(__name__)


class Render:
    """Draws some episodes of a step, and of every evaluation, into a folder: `train/` and `validation/`.

    Episodes are played again in a fresh environment from what was recorded, so no model is asked and nothing changes.
    One that cannot be drawn is reported and does not cost the run.

    Args:
        cast: makes environments.
        decode: token ids to text.
        folder: where the files go.
        every: steps between training episodes that are drawn.
        count: episodes each time: the best and the worst, and from there inwards.
        drawn: told of every picture, with its step and `train` or `validation`.
    """

    def __init__(
        self,
        cast: EpisodeFactories,
        decode: Decode,
        folder: Path,
        every: int,
        count: int,
        drawn: Callable[[Path, int, str], None] = lambda path, step, kind: None,
    ):
        self.cast, self.decode, self.drawn = cast, decode, drawn
        self.folder, self.every, self.count = folder, every, count

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if (trainer.step - 1) % self.every == 0:
            await self.draw("train", trainer.step, groups)

    async def draw(self, kind: str, step: int, groups: Sequence[Group]) -> list[Path]:
        """Draw episodes of these groups; returns what was written."""
        written = []
        for episode in extremes([episode for group in groups for episode in group.survivors], self.count):
            name = re.sub(r"[^\w.-]+", "-", episode.id)
            path = self.folder / kind / f"step-{step:06}-{name}.gif"
            try:
                frames = await replay(self.cast.env(episode.task), episode, self.decode)
                if frames:
                    written.append(await asyncio.to_thread(save_gif, frames, path))
                    self.drawn(path, step, kind)
            except Exception:
                log.exception("episode %s could not be drawn", episode.id)
        return written


def extremes(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """The best, the worst, the second best, and so on; of equals the longer, which shows more."""
    ranked = sorted(episodes, key=lambda episode: (-episode.reward, -len(episode.turns)))
    picked: list[Episode] = []
    while ranked and len(picked) < count:
        picked.append(ranked.pop(0 if len(picked) % 2 == 0 else -1))
    return picked
