"""Tracker: a destination of metrics. Trackers: several as one. TensorBoard, and helpers for hosted trackers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from arborl.errors import DiskWriteError
from arborl.types import Episode, Message, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunStart:
    """The run that a tracker records."""

    name: str
    """Name of its folder."""
    folder: Path
    config: Mapping[str, Any]
    """The whole configuration as plain values, with secrets masked."""
    step: int = 0
    """Number of finished steps: above 0 for a resumed run."""


class Tracker(Protocol):
    """Records the metrics of each step. Step N is the N-th update; step 0 is before the first.

    A tracker may also have these methods, which are called in this order:

        begin(run: Begun)                   once, before anything else
        episodes(episodes, step, kind)      at most 16 episodes of a step; `kind` is `train` or `evaluation`
        picture(path, step, kind)           an image: of an episode (also `final`), or `curve`
        finish(summary, state)              once, at the end: `finished`, `stopped` or `failed`; before `close`
    """

    def log(self, metrics: Metrics, step: int) -> None:
        """Record metrics of a step. The latest step may get more: its evaluation."""
        ...

    def close(self) -> None:
        """Finish writing. Called once, also after a failure."""
        ...


class Trackers:
    """Several trackers as one. A tracker that raises is logged once and dropped.

    Example:
        trackers = Trackers([JsonlTracker(folder / "metrics.jsonl"), TensorBoardTracker(folder / "tensorboard")])
        trackers.log({"reward/mean": 0.4}, step=1)
    """

    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = list(trackers)

    def log(self, metrics: Metrics, step: int) -> None:
        self._call_all("log", f" at step {step}", metrics, step)

    def begin(self, run: RunStart) -> None:
        self._call_all("begin", "", run)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        self._call_all("episodes", f" at step {step}", episodes, step, kind)

    def picture(self, path: Path, step: int, kind: str) -> None:
        self._call_all("picture", f" at step {step}", path, step, kind)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self._call_all("finish", "", summary, state)

    def _call_all(self, method: str, when: str, *args: Any) -> None:
        for tracker in list(self.trackers):
            try:
                if (function := getattr(tracker, method, None)) is not None:
                    function(*args)
            except DiskWriteError:  # the run's own metrics file: without it, the run ends
                raise
            except Exception:
                log.warning(
                    "%s failed%s and is dropped; the run continues", type(tracker).__name__, when, exc_info=True
                )
                self.trackers.remove(tracker)
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception:
                log.warning("%s failed while closing", type(tracker).__name__, exc_info=True)
        self.trackers.clear()


class TensorBoardTracker:
    """Writes event files for `tensorboard --logdir runs`.

    Args:
        done: the step of the checkpoint of a resumed run; TensorBoard hides later ones.
    """

    def __init__(self, folder: Path, done: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # lazy: the import takes seconds

        self.writer = SummaryWriter(str(folder), purge_step=0 if done is None else done + 1)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


RUN_IDS_FILE = "trackers.json"


def load_run_id(folder: Path, tracker: str) -> str | None:
    """The run's id at a tracker, stored in the run folder, so that a resumed run continues it."""
    try:
        run_id = json.loads((folder / RUN_IDS_FILE).read_text(encoding="utf-8")).get(tracker)
    except (OSError, ValueError, AttributeError):
        return None
    return run_id if isinstance(run_id, str) else None


def store_run_id(folder: Path, tracker: str, run_id: str) -> None:
    path = folder / RUN_IDS_FILE
    try:
        run_ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run_ids = {}
    temporary = path.with_name(f".{path.name}.{tracker}.tmp")
    temporary.write_text(json.dumps({**run_ids, tracker: run_id}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


EPISODE_COLUMNS = (
    "step", "kind", "episode", "source", "reward", "success", "stop", "turns", "sampled", "failure", "transcript",
)  # fmt: skip
MAX_EPISODES = 16
"""Episodes of a step that a tracker gets."""
MAX_TRANSCRIPT = 4000
"""Characters of a transcript; a longer one is cut in the middle."""


def select_episodes(episodes: Sequence[Episode]) -> list[Episode]:
    """At most `MAX_EPISODES`, evenly spaced."""
    if len(episodes) <= MAX_EPISODES:
        return list(episodes)
    return [episodes[len(episodes) * place // MAX_EPISODES] for place in range(MAX_EPISODES)]


def episode_rows(episodes: Sequence[Episode], step: int, kind: str) -> list[list[str | int | float | None]]:
    """One row per episode, in the order of `EPISODE_COLUMNS`."""
    return [
        [
            step,
            kind,
            episode.id,
            episode.task.source,
            episode.reward if episode.failure is None else None,
            episode.metrics.get("success"),
            episode.stop.value,
            len(episode.turns),
            episode.sampled,
            str(episode.failure) if episode.failure is not None else "",
            transcript_text(episode),
        ]
        for episode in episodes
    ]


def transcript_text(episode: Episode) -> str:
    messages: list[Message] = [*episode.opening]
    for turn in episode.turns:
        messages += [turn.message, *turn.observation]
    text = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
    half = MAX_TRANSCRIPT // 2
    return text if len(text) <= MAX_TRANSCRIPT else f"{text[:half]}\n…\n{text[-half:]}"
