"""After a step: which sampled tokens moved the weights, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arborl.rollout.term_store import NUMBERS, Columns, TermStore
from arborl.trainer.trainer import Credited, Trainer
from arborl.types import Group, Ints, Metrics


class KeepTerms:
    """Write what the update made of each sampled token of the step.

    Args:
        folder: the run's `terms`.
        most: tokens of a step that are kept.
    """

    def __init__(self, folder: Path, most: int):
        self.store, self.most = TermStore(folder), most

    async def after(self, trainer: Trainer, groups: Sequence[Group], metrics: Metrics) -> None:
        if trainer.credited is not None:
            self.store.write(trainer.step, columns(trainer.credited, groups), self.most)


def columns(credited: Credited, groups: Sequence[Group]) -> Columns:
    """The columns of a terms file: rows that were trained, of episodes that are in the step's file."""
    terms, log = credited.terms, credited.log
    place = terms.place
    assert place is not None
    episode, call, index = (column[place] for column in _places(credited.kept, groups))
    known = {name: getattr(log, name)[place] for name in ("logprob", "entropy", "ratio", "loss", "pull")}
    known |= {"advantage": terms.advantage, "weight": terms.weight}
    rows = (episode >= 0) & np.isfinite(known["logprob"])
    found: Columns = {"episode": episode[rows], "call": call[rows], "index": index[rows]}
    return found | {name: known[name][rows] for name in NUMBERS}


def _places(kept: Sequence[Group], groups: Sequence[Group]) -> tuple[Ints, Ints, Ints]:
    """Of each planted term its episode in the file (-1: in none), the call within that, the token within that."""
    written = [episode for group in groups for episode in group.episodes]
    line = {id(episode): number for number, episode in enumerate(written)}
    rows = [
        (line.get(id(episode), -1), number, len(call.completion.tokens))
        for group in kept
        for episode in group.valid_episodes
        for number, call in enumerate(episode.calls)
        if call.trained
    ]
    episodes, calls, counts = (np.asarray(column, dtype=np.int64) for column in zip(*rows, strict=True))
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(episodes, counts), np.repeat(calls, counts), np.arange(counts.sum()) - begins
