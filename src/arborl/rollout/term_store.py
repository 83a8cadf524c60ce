"""The terms file: what became of each sampled token in a step's update, as columns.

`terms/step-000012.npz` lies beside `episodes/step-000012.jsonl` and speaks of the same episodes. A row is found by
`episode` (the line of the episode file, counted from 0), `call` and `index` (of the token within the completion).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborl.errors import disk_errors
from arborl.track.folder_files import Unreadable, read_arrays

Columns = dict[str, NDArray[Any]]
PLACE = {"episode": np.uint32, "call": np.uint32, "index": np.uint32}
NUMBERS = {
    "logprob": np.float32, "entropy": np.float16, "advantage": np.float32, "weight": np.float32, "ratio": np.float32,
    "loss": np.float32, "pull": np.float32,
}  # fmt: skip


class TermStore:
    """A folder of terms files, one a step.

    Example:
        store = TermStore(folder / "terms")
        store.write(12, columns, most=50_000)
        store.read(12)["pull"]
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06}.npz"

    def write(self, step: int, columns: Mapping[str, NDArray[Any]], most: int) -> Path:
        """Write the columns of a step, whole or not at all; of more than `most` rows those that pushed hardest, in
        their order."""
        path = self.path(step)
        fresh = path.with_name(f".{path.name}.tmp")
        push = np.nan_to_num(pushes(columns["pull"], columns["logprob"]))
        rows = np.sort(np.argsort(-push, kind="stable")[:most])
        kinds = PLACE | NUMBERS
        kept: dict[str, Any] = {name: np.asarray(columns[name])[rows].astype(kind) for name, kind in kinds.items()}
        with disk_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with fresh.open("wb") as file:
                    np.savez_compressed(file, of=np.uint64(len(push)), pushed=np.float64(push.sum()), **kept)
                os.replace(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
        return path

    def read(self, step: int) -> Columns | None:
        """The columns of a step; None where there are none, or what is there is not a terms file. `of` is how many
        terms the step had, and `pushed` what the pushes of all came to."""
        try:
            found = read_arrays(self.path(step), (*PLACE, *NUMBERS, "of", "pushed"))
        except (OSError, Unreadable):
            return None
        kinds = PLACE | NUMBERS
        same = {found[name].shape for name in kinds} == {(len(found["call"]),)} if found["call"].shape else False
        right = same and all(found[name].dtype == kind for name, kind in kinds.items())
        return found if right and found["of"].shape == found["pushed"].shape == () else None


def pushes(pull: NDArray[Any], logprob: NDArray[Any]) -> NDArray[np.float64]:
    """How hard each term pushed at the model's outputs: the size of the loss's gradient by the logits that predict it.

    That gradient is `pull` times (the token's one-hot vector less the distribution), whose length lies between 1 - p
    and sqrt(2) (1 - p); this is the lower end. A token that the model is sure of pushes nothing, however large its
    advantage.

    >>> pushes(np.array([-2.0, 2.0]), np.log([0.5, 1.0])).tolist()
    [1.0, 0.0]
    """
    chance = np.exp(np.minimum(logprob.astype(np.float64), 0.0))
    return np.asarray(np.abs(pull.astype(np.float64)) * (1.0 - chance))
