"""What the tasks of some sources sample, and may take, otherwise than the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from arborl.config.data import SourceConfig
from arborl.rollout.recorder import Limits
from arborl.types import Sampling, Task


def differences(
    sources: Mapping[str, SourceConfig],
) -> tuple[Callable[[Task, Sampling], Sampling], Callable[[Task, Limits], Limits]]:
    """What sources sample, and allow, otherwise than the run."""

    def sampling(task: Task, run: Sampling) -> Sampling:
        asked = sources[task.source].sampling if task.source in sources else None
        if asked is None:
            return run
        return replace(run, max_tokens=asked.max_tokens or run.max_tokens, stop_texts=(*run.stop_texts, *asked.stop))

    def limits(task: Task, run: Limits) -> Limits:
        asked = sources[task.source].limits.model_dump(exclude_none=True) if task.source in sources else {}
        return replace(run, **asked)

    return sampling, limits
