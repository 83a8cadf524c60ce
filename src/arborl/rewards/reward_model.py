"""An episode scored by a reward model of one's own: a sequence classifier of one label, as Bradley and Terry's are."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from arborl.chat import Renderer
from arborl.errors import paused_deadlines
from arborl.models.find import described, holds_model
from arborl.rewards.reward import Reward
from arborl.types import Episode, Message

if TYPE_CHECKING:
    from arborl.models.scalar import Scorer

RECORD = "reward_record.json"


@dataclass(frozen=True, slots=True)
class Record:
    """What a reward model's folder says of itself."""

    scale: float = 1.0
    shift: float = 0.0
    """What the model says becomes `scale * number + shift`."""
    max_tokens: int = 4096
    """Of a longer conversation the beginning is left out."""
    accuracy: float | None = None
    """Share of held-out pairs whose better side it prefers; None where none was held out."""
    history: Sequence[Mapping[str, float]] = ()
    """One row an epoch."""

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The folder's; as it is by default where there is none."""
        file = folder / RECORD
        if not file.exists():
            return cls()
        try:
            record = cls(**json.loads(file.read_text(encoding="utf-8")))
            if not math.isfinite(record.scale + record.shift) or record.max_tokens < 1:
                raise ValueError(f"scale={record.scale}, shift={record.shift}, max_tokens={record.max_tokens}")
            return record
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{file}: no record of a reward model: {error}. Mend it, or remove it.") from error

    def write(self, folder: Path) -> None:
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(slots=True, eq=False)
class Ticket:
    """One episode on its way through the model."""

    tokens: list[int]
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    score: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RewardModel(Reward):
    """What the model says of the conversation, rendered with its own chat template: what the environment said at the
    start, and every message of the agent with the answer to it. Calls of tools within a turn are not shown to it.

    The number is the model's own, on no scale in particular: `scale` and `shift` make it `scale * number + shift`. What
    is not given is as the folder's record says (`NeuralRewardTrainer` writes one); without one it is 1, 0 and 4096.

    Args:
        path: folder of the model, in Hugging Face form, with its tokenizer and chat template.
        device: where it runs; `auto` takes the GPU where there is one.
        dtype: `float32`, `bfloat16`, `float16` or `float64`.
        batch: episodes that are read at once; how they fall into batches changes the last digits only, 1 nothing.
        max_tokens: of a longer conversation the beginning is left out.
        scale, shift: applied to what the model says.

    Example:
        rewards: [{name: reward_model, args: {path: models/judge, batch: 16}}]
    """

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
        self.folder = Path(path).expanduser()
        if not holds_model(self.folder):
            raise ValueError(f"path={path}: no folder of a model in Hugging Face form. Give one with a config.json.")
        about = described(self.folder)
        kinds, labels = about.get("architectures") or [""], about.get("id2label")
        if not str(kinds[0]).endswith("ForSequenceClassification") or not isinstance(labels, dict) or len(labels) != 1:
            raise ValueError(f"path={path}: is a {kinds[0] or 'model'} and no sequence classifier of one label.")
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype={dtype}: give float32, bfloat16, float16 or float64.")
        if batch < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"batch={batch}, max_tokens={max_tokens}: give 1 or more.")
        self.device, self.dtype, self.batch, self.record = device, dtype, batch, Record.read(self.folder)
        self.max_tokens = self.record.max_tokens if max_tokens is None else max_tokens
        self.scale = self.record.scale if scale is None else scale
        self.shift = self.record.shift if shift is None else shift
        self.renderer = Renderer.from_folder(self.folder)
        self.waiting: list[Ticket] = []
        self._worker: asyncio.Task[None] | None = None
        self._scorer: Scorer | None = None

    async def __call__(self, episode: Episode) -> float:
        ticket = Ticket(self.tokens(episode))
        self.waiting.append(ticket)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            with paused_deadlines():  # whose turn it is depends on the others
                await ticket.begun
            return self.scale * await ticket.score + self.shift
        finally:
            for future in (ticket.begun, ticket.score):
                if not future.cancel() and not future.cancelled():  # nobody listens any more
                    future.exception()

    def tokens(self, episode: Episode) -> list[int]:
        """The conversation's ids."""
        return shown(self.renderer, conversation(episode), self.max_tokens)

    async def _work(self) -> None:
        """consumes: `waiting`     produces: each ticket's score     waits for: nothing; ends when idle."""
        while True:
            await asyncio.sleep(0)  # all who are asked at once come before the first batch is made
            self.waiting = [ticket for ticket in self.waiting if not ticket.score.done()]
            if not self.waiting:
                return
            self.waiting.sort(key=lambda ticket: len(ticket.tokens))  # like beside like: less to fill up
            some, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            try:
                scorer = await asyncio.to_thread(self._load)
                for ticket in some:
                    if not ticket.begun.done():
                        ticket.begun.set_result(None)
                scores = await asyncio.to_thread(scorer, [ticket.tokens for ticket in some])
            except Exception as error:
                for ticket in some:
                    for future in (ticket.begun, ticket.score):
                        if not future.done():
                            future.set_exception(RuntimeError(f"the reward model failed: {error}"))
                continue
            for ticket, score in zip(some, scores, strict=True):
                if not ticket.score.done():
                    ticket.score.set_result(score)

    def _load(self) -> Scorer:
        """The model, read when it is first needed: it wants torch, and time."""
        from arborl.models.scalar import Scorer

        if self._scorer is None:
            self._scorer = Scorer(self.folder, self.dtype, self.device)
        return self._scorer


def conversation(episode: Episode) -> list[Message]:
    """What environment and agent said to each other, up to the agent's last message."""
    said = list(episode.opening or episode.task.messages)
    for turn in episode.turns:
        said += [turn.message, *turn.observation]
    return up_to_reply(said) if episode.turns else said


def up_to_reply(messages: Sequence[Message]) -> list[Message]:
    """The conversation as far as a reward model is shown it: what follows the assistant's last message is left out."""
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    return list(messages[: last + 1])


def shown(renderer: Renderer, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
    """The ids that a reward model is shown, in training and in use: the conversation in its chat template; of a longer
    one the last `max_tokens`."""
    tokens = renderer.encode(renderer.render(messages, generation=False))
    return tokens if max_tokens is None else tokens[-max_tokens:]
