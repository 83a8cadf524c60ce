"""A run folder, as the rules ask for it. Whatever is missing, torn or still being written is no reason to stop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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

FIRST, LAST = 2, 3
"""Steps at the beginning and at the end whose episodes are read."""
MOST = 256
"""Episodes of a step that are read."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode and the step it is of."""

    step: int
    episode: Episode


@dataclass
class RunFiles:
    """What a run has left so far.

    Example:
        files = RunFiles(Path("runs/frozen-lake-001"))
        files.rows[-1]["reward/mean"], files.late[0].episode.reward
    """

    folder: Path
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        known = ("config.yaml", "metrics.jsonl", "summary.json")
        if not any(is_regular(self.folder / name) for name in known):
            raise ConfigError(f"{str(self.folder)!r} is no run folder: there is neither {', '.join(known)} in it.")
        self.store = EpisodeStore(self.folder / "episodes")
        self._read: dict[Path, list[Played]] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """As it is written: nothing that it names is imported."""
        return self._mapping("config.yaml", read_yaml)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Of a run that has ended."""
        return self._mapping("summary.json", read_json)

    @cached_property
    def execution(self) -> dict[str, Any]:
        """Device, precision and execution paths."""
        return self._mapping("execution.json", read_json)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return list(read_metrics(path)) if is_regular(path) else []

    def _mapping(self, name: str, read: Any) -> dict[str, Any]:
        path = self.folder / name
        if not os.path.lexists(path):
            return {}
        try:
            found = read(path)
        except (OSError, ConfigError) as error:
            self.problems.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
            return {}
        return found if isinstance(found, dict) else {}

    def setting(self, key: str, otherwise: Any = None) -> Any:
        """Of the configuration.

        Example:
            files.setting("agent.name")
        """
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return otherwise if found is None else found

    # -------------------------------------------------------------------------------------------- episodes

    @cached_property
    def steps(self) -> dict[int, Path]:
        """The episode files by step."""
        return {int(path.stem.removeprefix("step-")): path for path in self.store.paths()}

    @cached_property
    def early(self) -> list[Played]:
        return self.of(list(self.steps)[:FIRST])

    @cached_property
    def late(self) -> list[Played]:
        """Of the last steps; of a short run these may be the first, too."""
        return self.of(list(self.steps)[-LAST:])

    @cached_property
    def held_out(self) -> list[Played]:
        """Of the last evaluation."""
        paths = EpisodeStore(self.folder / "episodes" / "evaluation").paths()
        return self._episodes(int(paths[-1].stem.removeprefix("step-")), paths[-1]) if paths else []

    def of(self, steps: Iterable[int]) -> list[Played]:
        """The episodes of these steps, where they were kept."""
        return [one for step in steps if step in self.steps for one in self._episodes(step, self.steps[step])]

    def _episodes(self, step: int, path: Path) -> list[Played]:
        if path not in self._read:
            kept: list[Played] = []
            try:
                kept.extend(Played(step, episode) for episode in islice(self.store.read(path), MOST))
            except (ConfigError, OSError) as error:
                self.problems.append(str(error))
            self._read[path] = kept
        return self._read[path]


def alive(played: Sequence[Played]) -> list[Played]:
    """Those that did not fail."""
    return [one for one in played if one.episode.failure is None]
