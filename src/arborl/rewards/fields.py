"""Fields of a task, for rewards that are told their names."""

from __future__ import annotations

from typing import Any

from arborl.types import Episode


def field_of(episode: Episode, name: str, who: str) -> Any:
    """A field; LookupError with what there is where it is missing.

    Example:
        field_of(episode, "answer", "reward 'equal'")
    """
    fields = episode.task.fields
    if name not in fields:
        raise LookupError(
            f"{who} wants the field {name!r}; task {episode.task.id!r} has: {', '.join(fields) or 'none'}"
        )
    return fields[name]
