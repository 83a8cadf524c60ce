"""A reward that was learned from preferences: a reward model in a folder, as a reward that reads turns."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from arborl.errors import ConfigError, disk_errors
from arborl.rewards.reward_model import RewardModel
from arborl.rewards.text.base import Context, RewardFunction, RewardResult, Turns
from arborl.rewards.text.turns import as_turns, episode_of
from arborl.types import Episode


class NeuralReward(RewardFunction):
    """What a trained reward model says of a conversation. `NeuralRewardTrainer` makes it; the folder is an ordinary one
    of transformers, and `{name: reward_model, args: {path: FOLDER}}` in a file is the same reward.

    Args:
        path: its folder.
        weight: of this reward among others.
        name: what it is called in metrics.
        device, dtype, batch: as in `RewardModel`.

    Example:
        reward = NeuralReward("models/judge")
        (await reward.compute_reward(turns)).score
    """

    def __init__(
        self,
        path: str | Path,
        weight: float = 1.0,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
    ):
        super().__init__(weight, name)
        self.model = RewardModel(str(path), device, dtype, batch)

    async def __call__(self, episode: Episode) -> float:
        return await self.model(episode)

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        """The score of these turns; `context` is not shown to the model."""
        if not turns:
            raise ValueError(f"{self.name}: there are no turns to score")
        return RewardResult(await self.model(episode_of(as_turns(turns), context or {})))

    @property
    def folder(self) -> Path:
        """Where the model is."""
        return self.model.folder

    @property
    def accuracy(self) -> float | None:
        """Share of held-out pairs whose better side it prefers; None where none was held out."""
        return self.model.record.accuracy

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """One row an epoch: `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`."""
        return self.model.record.history

    def save(self, folder: str | Path) -> Path:
        """Copy the model into a new or an empty folder."""
        to = Path(folder).expanduser()
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"{to}: is there already. Give a new or an empty folder.")
        with disk_errors(to):
            shutil.copytree(self.folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        return to

    @classmethod
    def load(cls, folder: str | Path, weight: float = 1.0) -> NeuralReward:
        """From a folder that `save` or a trainer has written."""
        return cls(folder, weight)
