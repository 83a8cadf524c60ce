"""What an update made of each term: how likely its token was, what it cost, and how hard the loss pulled at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from arborl.types import Ints


@dataclass(frozen=True, slots=True)
class Note:
    """One micro-batch of one optimiser step."""

    place: Ints
    """Rows of the planted terms."""
    logprob_M: Tensor
    entropy_M: Tensor
    ratio_M: Tensor
    loss_M: Tensor
    """Weight applied: together they are the loss of the step."""
    pull_M: Tensor
    """Derivative of that loss by the log-probability."""


class TermLog:
    """Columns over the planted terms of a batch; NaN where a term was not trained.

    `logprob` and `entropy` are the policy's before its weights moved. `ratio` and `loss` are of the last optimiser step
    that saw the term. `pull` is the derivative of the loss by the token's log-probability, added up over the optimiser
    steps: below 0 the token was made likelier, and a clipped one has 0.

    Args:
        size: how many terms were planted.
    """

    def __init__(self, size: int):
        self.logprob, self.entropy, self.ratio, self.loss, self.pull = (
            np.full(size, np.nan, dtype=np.float32) for _ in range(5)
        )

    def add(self, notes: Sequence[Note]) -> None:
        """One optimiser step."""
        for note in notes:
            at = note.place
            first = np.isnan(self.logprob[at])
            self.logprob[at] = np.where(first, _numbers(note.logprob_M), self.logprob[at])
            self.entropy[at] = np.where(first, _numbers(note.entropy_M), self.entropy[at])
            self.ratio[at], self.loss[at] = _numbers(note.ratio_M), _numbers(note.loss_M)
            self.pull[at] = np.where(first, 0.0, self.pull[at]) + _numbers(note.pull_M)

    def take(self, other: TermLog) -> None:
        """Whatever another process knows, which trained other terms."""
        known = np.isfinite(other.logprob)
        for name in ("logprob", "entropy", "ratio", "loss", "pull"):
            getattr(self, name)[known] = getattr(other, name)[known]


def _numbers(vector: Tensor) -> NDArray[np.float32]:
    return np.asarray(vector.float().cpu().numpy())
