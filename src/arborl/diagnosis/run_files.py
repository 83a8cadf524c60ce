"""The files of a run folder. Missing, damaged or unfinished files are recorded as problems, never raised."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.folder_files import is_regular, read_json, read_yaml
from arborl.track.jsonl import read_metrics
from arborl.types import Episode

NUM_FIRST_STEPS, NUM_LAST_STEPS = 2, 3
"""Steps whose episodes are read."""
MAX_EPISODES = 256
"""Episodes of a step that are read."""
ALARMS_FILE = "alarms.json"
"""The rollbacks of a run."""
RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json")


@dataclass(frozen=True, slots=True)
class StepEpisode:
    """An episode with its step."""

    step: int
    episode: Episode


@dataclass
class RunFiles:
    """Configuration, metrics, summary and episodes of a run folder."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        if not any(is_regular(self.folder / name) for name in RUN_FILES):
            raise ConfigError(f"{str(self.folder)!r} is no run folder: it has none of {', '.join(RUN_FILES)}.")
        self.store = EpisodeStore(self.folder / "episodes")
        self._episodes_by_path: dict[Path, list[StepEpisode]] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The plain values; nothing that they name is imported."""
        return self._mapping("config.yaml", read_yaml)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Empty until the run has ended."""
        return self._mapping("summary.json", read_json)

    @cached_property
    def rollbacks(self) -> list[dict[str, Any]]:
        """Returns to an earlier checkpoint after an alarm, oldest first."""
        rows = self._mapping(ALARMS_FILE, read_json).get("rollbacks")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @cached_property
    def execution(self) -> dict[str, Any]:
        """Device, precision and execution paths."""
        return self._mapping("execution.json", read_json)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return list(read_metrics(path)) if is_regular(path) else []

    @cached_property
    def step_rows(self) -> list[dict[str, Any]]:
        """The rows of training steps, without those that hold an evaluation only."""
        return [row for row in self.rows if "episode/count" in row]

    def _mapping(self, name: str, read: Callable[[Path], Any]) -> dict[str, Any]:
        path = self.folder / name
        if not os.path.lexists(path):
            return {}
        try:
            value = read(path)
        except (OSError, ConfigError) as error:
            self.problems.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
            return {}
        return value if isinstance(value, dict) else {}

    def setting(self, key: str) -> Any:
        """The value of a key such as `agent.name`, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @cached_property
    def episode_paths(self) -> dict[int, Path]:
        return {int(path.stem.removeprefix("step-")): path for path in self.store.paths()}

    @cached_property
    def first_episodes(self) -> list[StepEpisode]:
        return self.episodes(list(self.episode_paths)[:NUM_FIRST_STEPS])

    @cached_property
    def last_episodes(self) -> list[StepEpisode]:
        """Episodes of the last steps; in a short run these include the first."""
        return self.episodes(list(self.episode_paths)[-NUM_LAST_STEPS:])

    @cached_property
    def held_out(self) -> list[StepEpisode]:
        """Episodes of the last evaluation."""
        paths = EpisodeStore(self.folder / "episodes" / "evaluation").paths()
        return self._read(int(paths[-1].stem.removeprefix("step-")), paths[-1]) if paths else []

    def episodes(self, steps: Iterable[int]) -> list[StepEpisode]:
        paths = self.episode_paths
        return [episode for step in steps if step in paths for episode in self._read(step, paths[step])]

    def _read(self, step: int, path: Path) -> list[StepEpisode]:
        if path not in self._episodes_by_path:
            episodes: list[StepEpisode] = []
            try:
                episodes.extend(StepEpisode(step, one) for one in islice(self.store.read(path), MAX_EPISODES))
            except (ConfigError, OSError) as error:
                self.problems.append(str(error))
            self._episodes_by_path[path] = episodes
        return self._episodes_by_path[path]


def without_failures(episodes: Sequence[StepEpisode]) -> list[StepEpisode]:
    return [one for one in episodes if one.episode.failure is None]
