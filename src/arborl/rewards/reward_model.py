"""Reward models: sequence classifiers with one label (Bradley-Terry), as a reward of episodes and of turns."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from arborl.chat import Renderer
from arborl.errors import ConfigError, disk_errors, paused_deadlines
from arborl.models.model_files import HUB_ID, read_model_config, resolve
from arborl.rewards.reward import Reward
from arborl.rewards.text.text_measures import as_turns, episode_of
from arborl.rewards.text.text_reward import Context, RewardFunction, RewardResult, Turns
from arborl.types import Episode, Message

if TYPE_CHECKING:
    from arborl.models.output_heads import SequenceScorer

RECORD_FILE = "reward_record.json"


@dataclass(frozen=True, slots=True)
class RewardModelRecord:
    """Settings and results of training, stored in the folder of a reward model."""

    scale: float = 1.0
    shift: float = 0.0
    """The reward is `scale * output + shift`."""
    max_tokens: int = 4096
    """The beginning of a longer conversation is cut off."""
    accuracy: float | None = None
    """Accuracy on held-out pairs; None if there are none."""
    history: Sequence[Mapping[str, float]] = ()
    """One row per epoch."""

    @classmethod
    def read(cls, folder: Path) -> RewardModelRecord:
        file = folder / RECORD_FILE
        if not file.exists():
            return cls()
        try:
            record = cls(**json.loads(file.read_text(encoding="utf-8")))
            if not math.isfinite(record.scale + record.shift) or record.max_tokens < 1:
                raise ValueError(f"scale={record.scale}, shift={record.shift}, max_tokens={record.max_tokens}")
            return record
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{file}: not a record of a reward model: {error}. Correct or remove it.") from error

    def write(self, folder: Path) -> None:
        (folder / RECORD_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(slots=True, eq=False)
class ScoringRequest:
    """One episode that waits for its score."""

    tokens: list[int]
    started: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    score: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RewardModel(Reward):
    """The model's score of the conversation, rendered with its chat template: the opening, and every message of the
    agent with the environment's answer. Tool calls within a turn are not included.

    The reward is `scale * output + shift`. Defaults come from the folder's record (`NeuralRewardTrainer` writes one),
    else 1, 0 and 4096 tokens.

    Args:
        path: folder of the model, in Hugging Face form, with its tokenizer and chat template; or a Hugging Face id,
            which is read from the local cache or downloaded, as with `model.name`.
        device: `auto` uses the GPU if there is one.
        dtype: `float32`, `bfloat16`, `float16` or `float64`.
        batch: episodes per forward pass; it changes the last digits only.
        max_tokens: the beginning of a longer conversation is cut off.
        scale, shift: applied to the output.

    Example:
        rewards: [{name: reward_model, args: {path: models/judge, batch: 16}}]
    """

    graded = True

    def __init__(
        self,
        path: str,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
        max_tokens: int | None = None,
        scale: float | None = None,
        shift: float | None = None,
    ):
        if not Path(path).expanduser().is_dir() and not HUB_ID.fullmatch(str(path)):
            raise ValueError(f"path={path}: no such folder. Give the folder of a reward model, or a Hugging Face id.")
        try:
            self.folder = resolve(str(path), "path")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        config = read_model_config(self.folder)
        kinds, labels = config.get("architectures") or [""], config.get("id2label")
        if not str(kinds[0]).endswith("ForSequenceClassification") or not isinstance(labels, dict) or len(labels) != 1:
            raise ValueError(f"path={path}: is a {kinds[0] or 'model'}, not a sequence classifier with one label.")
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype={dtype}: give float32, bfloat16, float16 or float64.")
        if batch < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"batch={batch}, max_tokens={max_tokens}: give 1 or more.")
        self.device, self.dtype, self.batch, self.record = device, dtype, batch, RewardModelRecord.read(self.folder)
        self.max_tokens = self.record.max_tokens if max_tokens is None else max_tokens
        self.scale = self.record.scale if scale is None else scale
        self.shift = self.record.shift if shift is None else shift
        self.renderer = Renderer.from_folder(self.folder)
        self.waiting: list[ScoringRequest] = []
        self._worker: asyncio.Task[None] | None = None
        self._scorer: SequenceScorer | None = None

    async def __call__(self, episode: Episode) -> float:
        request = ScoringRequest(self.tokens(episode))
        self.waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            with paused_deadlines():  # the deadline is paused while others are scored
                await request.started
            return self.scale * await request.score + self.shift
        finally:
            for future in (request.started, request.score):
                if not future.cancel() and not future.cancelled():
                    future.exception()

    def tokens(self, episode: Episode) -> list[int]:
        return conversation_tokens(self.renderer, conversation(episode), self.max_tokens)

    async def _work(self) -> None:
        """Score the waiting requests in batches; ends when there are none."""
        while True:
            await asyncio.sleep(0)  # requests of the same moment join the first batch
            self.waiting = [request for request in self.waiting if not request.score.done()]
            if not self.waiting:
                return
            self.waiting.sort(key=lambda request: len(request.tokens))  # similar lengths: less padding
            batch, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            try:
                scorer = await asyncio.to_thread(self._load)
                for request in batch:
                    if not request.started.done():
                        request.started.set_result(None)
                scores = await asyncio.to_thread(scorer, [request.tokens for request in batch])
            except Exception as error:
                for request in batch:
                    for future in (request.started, request.score):
                        if not future.done():
                            future.set_exception(RuntimeError(f"the reward model failed: {error}"))
                continue
            for request, score in zip(batch, scores, strict=True):
                if not request.score.done():
                    request.score.set_result(score)

    def _load(self) -> SequenceScorer:
        """The model, loaded on first use because it imports torch."""
        from arborl.models.output_heads import SequenceScorer

        if self._scorer is None:
            self._scorer = SequenceScorer(self.folder, self.dtype, self.device)
        return self._scorer


def conversation(episode: Episode) -> list[Message]:
    """The messages of environment and agent, up to the agent's last message."""
    messages = list(episode.opening or episode.task.messages)
    for turn in episode.turns:
        messages += [turn.message, *turn.observation]
    return up_to_reply(messages) if episode.turns else messages


def up_to_reply(messages: Sequence[Message]) -> list[Message]:
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    return list(messages[: last + 1])


def conversation_tokens(renderer: Renderer, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
    """Token ids of the conversation in the chat template; of a longer one the last `max_tokens`."""
    tokens = renderer.encode(renderer.render(messages, generation=False))
    return tokens if max_tokens is None else tokens[-max_tokens:]


class NeuralReward(RewardFunction):
    """A trained reward model as a reward of turns, made by `NeuralRewardTrainer`. The configuration
    `{name: reward_model, args: {path: FOLDER}}` is the same reward.

    Args:
        path: folder of the model, or a Hugging Face id.
        weight: of this reward.
        name: in metrics.
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
        super().__init__(weight, name or "")
        self.model = RewardModel(str(path), device, dtype, batch)

    async def __call__(self, episode: Episode) -> float:
        return await self.model(episode)

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        """The score of these turns; the model does not see `context`."""
        if not turns:
            raise ValueError(f"{self.name}: there are no turns to score")
        return RewardResult(await self.model(episode_of(as_turns(turns), context or {})))

    @property
    def folder(self) -> Path:
        return self.model.folder

    @property
    def accuracy(self) -> float | None:
        """Accuracy on held-out pairs; None if there are none."""
        return self.model.record.accuracy

    @property
    def history(self) -> Sequence[Mapping[str, float]]:
        """One row per epoch: `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`."""
        return self.model.record.history

    def save(self, folder: str | Path) -> Path:
        """Copy the model into a new or an empty folder."""
        to = Path(folder).expanduser()
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"{to}: exists. Give a new or an empty folder.")
        with disk_errors(to):
            shutil.copytree(self.folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        return to

    @classmethod
    def load(cls, folder: str | Path, weight: float = 1.0) -> NeuralReward:
        """From a folder that `save` or a trainer wrote."""
        return cls(folder, weight)
