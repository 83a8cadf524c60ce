"""Artifacts of a run: learning curve, GIFs of episodes during the run and at its end, HTML report."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from arborl.rollout.runner import EpisodeFactories
from arborl.track.folder_files import Unreadable, read_json, replace_file
from arborl.trainer.trainer import Trainer
from arborl.training_run.build import RunParts
from arborl.types import Episode, Group, Metrics
from arborl.view import replay, save_gif, write_report
from arborl.view.gif import Decode

log = logging.getLogger(__name__)


async def write_artifacts(parts: RunParts, home: Path, episodes: Sequence[Episode], step: int = 0) -> dict[str, Path]:
    """Write all artifacts; returns their paths by name. A rendering error is logged and does not fail the run."""
    rendered: dict[str, tuple[str, int, str]] = {}
    written = {"run folder": home, "summary": home / "summary.json", "metrics": home / "metrics.jsonl"}
    try:
        for episode in select_episodes(episodes, parts.config.track.gifs):
            frames = await replay(parts.episode_factories.env(episode.task), episode)
            if frames:
                path = save_gif(frames, home / "frames" / gif_name(step, episode))
                written[path.name] = path
                rendered[path.name] = ("evaluation", step, episode.id)
        list_gifs(home / "frames", rendered)
        report = write_report(home, parts.renderer.tokenizer.decode)  # also draws the curve
        written |= {"curve": home / "curve.png", "report": report}
    except Exception:
        log.exception("the run is complete, but some of its artifacts could not be written")
    return written


def gif_name(step: int, episode: Episode) -> str:
    """The file of an episode's GIF: step and id, `step-000040-lake-7#0.gif`."""
    name = re.sub(r"[^\w.#+-]+", "-", episode.id)
    return f"step-{step:06}-{name}.gif"


def list_gifs(folder: Path, rendered: Mapping[str, tuple[str, int, str]]) -> None:
    """Add GIFs to `episodes.json`: kind, step and id of the episode by file."""
    path = folder / "episodes.json"
    try:
        known = dict(read_json(path))
    except (OSError, Unreadable, TypeError, ValueError):
        known = {}
    if rendered:
        replace_file(path, (json.dumps(known | dict(rendered)) + "\n").encode("utf-8"))


def select_episodes(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """The longest successful episodes, and last a failed attempt if there is one."""
    won = sorted((e for e in episodes if e.metrics.get("success", 0) >= 1), key=lambda e: -len(e.turns))
    lost = [e for e in episodes if e.metrics.get("success", 0) < 1]
    return (won[: max(count - len(lost[:1]), 0)] + lost)[:count]


class EpisodeRenderer:
    """Hook that renders episodes of training steps and of every evaluation as GIFs, in `train/` and `validation/`.
    Episodes are replayed from their records in a fresh environment; the model is not called. A rendering error is
    logged and does not fail the run."""

    def __init__(
        self,
        episode_factories: EpisodeFactories,
        decode: Decode,
        folder: Path,
        every: int,
        count: int,
        drawn: Callable[[Path, int, str], None] = lambda path, step, kind: None,
    ):
        self.episode_factories, self.decode, self.drawn = episode_factories, decode, drawn
        self.folder, self.every, self.count = folder, every, count

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if (trainer.step - 1) % self.every == 0:
            await self.draw("train", trainer.step, groups)

    async def draw(self, kind: str, step: int, groups: Sequence[Group]) -> list[Path]:
        written = []
        for episode in extremes([episode for group in groups for episode in group.valid_episodes], self.count):
            path = self.folder / kind / gif_name(step, episode)
            try:
                frames = await replay(self.episode_factories.env(episode.task), episode, self.decode)
                if frames:
                    written.append(await asyncio.to_thread(save_gif, frames, path))
                    stored = "train" if kind == "train" else "evaluation"
                    list_gifs(self.folder, {f"{kind}/{path.name}": (stored, step, episode.id)})
                    self.drawn(path, step, kind)
            except Exception:
                log.exception("episode %s could not be rendered", episode.id)
        return written


def extremes(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """The best, the worst, the second best, and so on; of equal rewards the longer episode."""
    ranked = sorted(episodes, key=lambda episode: (-episode.reward, -len(episode.turns)))
    picked: list[Episode] = []
    while ranked and len(picked) < count:
        picked.append(ranked.pop(0 if len(picked) % 2 == 0 else -1))
    return picked
