"""The terms file: log-probability, advantage, weight and gradient of each sampled token of an update, as columns.

`terms/step-000012.npz` belongs to `episodes/step-000012.jsonl`. A row is identified by `episode` (line of the episode
file, from 0), `call` and `index` (of the token in the completion).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborl.rollout.episode_store import atomic_file
from arborl.track.folder_files import Unreadable, read_arrays

Columns = dict[str, NDArray[Any]]
INDEX_COLUMNS = {"episode": np.uint32, "call": np.uint32, "index": np.uint32}
VALUE_COLUMNS = {
    "logprob": np.float32, "entropy": np.float16, "advantage": np.float32, "weight": np.float32, "ratio": np.float32,
    "loss": np.float32, "pull": np.float32,
}  # fmt: skip


class TermStore:
    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06}.npz"

    def write(self, step: int, columns: Mapping[str, NDArray[Any]], most: int) -> Path:
        """Write the columns of a step atomically. Of more than `most` rows those with the largest gradients."""
        path = self.path(step)
        norms = np.nan_to_num(gradient_norms(columns["pull"], columns["logprob"]))
        rows = np.sort(np.argsort(-norms, kind="stable")[:most])
        dtypes = INDEX_COLUMNS | VALUE_COLUMNS
        kept: dict[str, Any] = {name: np.asarray(columns[name])[rows].astype(dtype) for name, dtype in dtypes.items()}
        with atomic_file(path) as file:
            np.savez_compressed(file, of=np.uint64(len(norms)), pushed=np.float64(norms.sum()), **kept)
        return path

    def read(self, step: int) -> Columns | None:
        """The columns of a step; None if there is no valid file. `of` is the number of terms of the step, `pushed` the
        sum of all gradient norms."""
        try:
            columns = read_arrays(self.path(step), (*INDEX_COLUMNS, *VALUE_COLUMNS, "of", "pushed"))
        except (OSError, Unreadable):
            return None
        dtypes = INDEX_COLUMNS | VALUE_COLUMNS
        rows = columns["call"].shape
        is_valid = len(rows) == 1 and all(
            columns[name].shape == rows and columns[name].dtype == dtype for name, dtype in dtypes.items()
        )
        return columns if is_valid and columns["of"].shape == columns["pushed"].shape == () else None


def gradient_norms(pull: NDArray[Any], logprob: NDArray[Any]) -> NDArray[np.float64]:
    """Norm of the gradient of the loss with respect to the logits that predict each token.

    The gradient is `pull` * (one-hot vector - distribution). Its norm lies between 1 - p and sqrt(2) (1 - p) times
    |pull|; this is the lower bound.

    >>> gradient_norms(np.array([-2.0, 2.0]), np.log([0.5, 1.0])).tolist()
    [1.0, 0.0]
    """
    probability = np.exp(np.minimum(logprob.astype(np.float64), 0.0))
    return np.asarray(np.abs(pull.astype(np.float64)) * (1.0 - probability))
