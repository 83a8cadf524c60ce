"""Some episodes of a step as rows of a table, for trackers that show tables."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.types import Episode, Message

COLUMNS = (
    "step", "kind", "episode", "source", "reward", "success", "stop", "turns", "sampled", "failure", "transcript",
)  # fmt: skip
MOST = 16
"""Episodes of a step that trackers are shown."""
LONGEST = 4000
"""Characters of a transcript; of a longer one the beginning and the end."""


def chosen(episodes: Sequence[Episode]) -> list[Episode]:
    """At most so many, evenly spread: the same for the same episodes."""
    if len(episodes) <= MOST:
        return list(episodes)
    return [episodes[len(episodes) * place // MOST] for place in range(MOST)]


def rows(episodes: Sequence[Episode], step: int, kind: str) -> list[list[str | int | float | None]]:
    """One row an episode, in the order of `COLUMNS`."""
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
            transcript(episode),
        ]
        for episode in episodes
    ]


def transcript(episode: Episode) -> str:
    """What was said, by whom."""
    said: list[Message] = [*episode.opening]
    for turn in episode.turns:
        said += [turn.message, *turn.observation]
    text = "\n\n".join(f"{message.role}: {message.content}" for message in said)
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n…\n{text[-half:]}"
