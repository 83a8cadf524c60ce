"""Tracker: a destination of metrics. Trackers: several as one. TensorBoard, and episodes as rows of a table."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
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

        begin(run: RunStart)                once, before anything else
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


class TrackerCalls(ABC):
    """A tracker that passes every call on by `_call(method, *args)`."""

    @abstractmethod
    def _call(self, method: str, *args: Any) -> None: ...

    def begin(self, run: RunStart) -> None:
        self._call("begin", run)

    def log(self, metrics: Metrics, step: int) -> None:
        self._call("log", dict(metrics), step)

    def episodes(self, episodes: Sequence[Episode], step: int, kind: str) -> None:
        self._call("episodes", select_episodes(episodes), step, kind)

    def picture(self, path: Path, step: int, kind: str) -> None:
        self._call("picture", path, step, kind)

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        self._call("finish", dict(summary), state)


class Trackers(TrackerCalls):
    """Several trackers as one. A tracker that raises is logged once and dropped."""

    def __init__(self, trackers: Sequence[Tracker]):
        self.trackers = list(trackers)

    def _call(self, method: str, *args: Any) -> None:
        for tracker in list(self.trackers):
            try:
                if (function := getattr(tracker, method, None)) is not None:
                    function(*args)
            except DiskWriteError:  # the run's own metrics file: without it, the run ends
                raise
            except Exception:
                what = f"{type(tracker).__name__} failed in {method}()"
                log.warning("%s and is dropped; the run continues", what, exc_info=True)
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
    """Writes event files for `tensorboard --logdir runs`. TensorBoard hides steps after `done` of a resumed run."""

    def __init__(self, folder: Path, done: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # lazy: the import takes seconds

        self.writer = SummaryWriter(str(folder), purge_step=0 if done is None else done + 1)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


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
    rows: list[list[str | int | float | None]] = []
    for episode in episodes:
        is_valid = episode.failure is None
        reward, failure = (episode.reward, "") if is_valid else (None, str(episode.failure))
        success, stop = episode.metrics.get("success"), episode.stop.value
        numbers = (len(episode.turns), episode.sampled)
        rows.append([step, kind, episode.id, episode.task.source, reward, success, stop, *numbers, failure,
                     transcript_text(episode)])  # fmt: skip
    return rows


def transcript_text(episode: Episode) -> str:
    messages: list[Message] = [*episode.opening]
    for turn in episode.turns:
        messages += [turn.message, *turn.observation]
    text = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
    half = MAX_TRANSCRIPT // 2
    return text if len(text) <= MAX_TRANSCRIPT else f"{text[:half]}\n…\n{text[-half:]}"
