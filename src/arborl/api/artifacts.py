"""What a run leaves for people: a curve, some episodes as moving pictures, a report."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from arborl.build import Parts
from arborl.types import Episode
from arborl.view import replay, save_gif, write_report

log = logging.getLogger(__name__)


async def keepsakes(parts: Parts, home: Path, episodes: Sequence[Episode], step: int = 0) -> dict[str, Path]:
    """Write them all; returns what is where. A picture that cannot be drawn is reported and does not cost the run.

    Args:
        episodes: of the last evaluation, to choose some from.
        step: the last.
    """
    shown: dict[str, tuple[str, int, str]] = {}
    written = {"run folder": home, "summary": home / "summary.json", "metrics": home / "metrics.jsonl"}
    try:
        for number, episode in enumerate(worth_seeing(episodes, parts.config.track.gifs), 1):
            frames = await replay(parts.cast.env(episode.task), episode)
            if frames:
                path = written[f"episode {number}"] = save_gif(frames, home / "frames" / f"episode-{number}.gif")
                shown[path.name] = ("evaluation", step, episode.id)
        if shown:
            (home / "frames" / "episodes.json").write_text(json.dumps(shown) + "\n", encoding="utf-8")
        report = write_report(home, parts.renderer.tokenizer.decode)  # draws the curve on its way
        written |= {"curve": home / "curve.png", "report": report}
    except Exception:
        log.exception("the run is complete, but not all of its pictures could be drawn")
    return written


def worth_seeing(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """The longest successes, and in the last place a failed attempt if there is one."""
    won = sorted((e for e in episodes if e.metrics.get("success", 0) >= 1), key=lambda e: -len(e.turns))
    lost = [e for e in episodes if e.metrics.get("success", 0) < 1]
    return (won[: max(count - len(lost[:1]), 0)] + lost)[:count]
