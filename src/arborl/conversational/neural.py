"""A reward learned from preferences: pairs of conversations in, a reward model's folder and the reward out."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from rich.console import Console

from arborl.chat import Renderer
from arborl.config.run_config import RunConfig
from arborl.config.training_config import LearnerConfig
from arborl.conversational.preferences import Preference, held_out, read_preferences
from arborl.errors import ConfigError, RunStopped, disk_errors
from arborl.models.find import described, resolve
from arborl.rewards.neural import NeuralReward
from arborl.rewards.reward_model import Record, shown
from arborl.rewards.text.base import finite

if TYPE_CHECKING:  # what needs torch
    from arborl.learner.pairs import Pair, PairLearner, Row

log = logging.getLogger(__name__)

MOST_TOKENS = 4096
"""Of a conversation, unless told otherwise; fewer where the model reads fewer."""
DTYPES = ("float32", "bfloat16", "float64")


class NeuralRewardTrainer:
    """Trains a language model to say which of two conversations is better, and makes a reward of it.

    The model becomes a sequence classifier of one label; the loss is Bradley and Terry's, -log σ(score of the better -
    score of the worse), the mean over pairs. Equal seeds give equal weights on a CPU.

    Args:
        model_name: what it begins as: `seedling`, `smollm2`, a folder, a Hugging Face id, or a reward model's folder.
        preference_data: a list of (better, worse), each the reply's text, or a conversation as messages, turns or a
            `MultiTurnTrajectory`; or of dicts with `prompt`, `chosen` and `rejected`; or a file of such rows. Give
            prompts where there are some: in use the model is shown whole conversations.
        learning_rate: without one by the model's size, as in `learner.lr`; it rises over the first tenth of all steps
            and then falls to 0.
        epochs: passes over the pairs.
        batch_size: pairs a step.
        validation: share of the pairs that is held out. The epoch with the least loss on them is kept; with 0 it is the
            last, and nothing is measured.
        normalize: give scores of the mean 0 and the deviation 1 over the training pairs. What the model itself says has
            no scale.
        fields: where rows call `prompt`, `chosen` or `rejected` something else: `{"prompt": "question"}`.
        max_tokens: of a longer conversation the beginning is left out, in training and in use.
        seed: decides which pairs are held out, and the order of the others.
        device: `auto` takes the GPU where there is one.
        dtype: `float32`, `bfloat16` (with float32 masters) or `float64`.
        output_dir: folder of the reward model, new or empty; else the next free `runs/neural-reward-NNN`.
        progress: print a line an epoch.

    Example:
        trainer = NeuralRewardTrainer(model_name="seedling", preference_data="pairs.jsonl")
        reward = await trainer.train()
        reward.accuracy                                      # on held-out pairs
    """

    def __init__(
        self,
        model_name: str = "seedling",
        preference_data: Any = (),
        *,
        learning_rate: float | None = None,
        epochs: int = 3,
        batch_size: int = 16,
        validation: float = 0.1,
        normalize: bool = True,
        fields: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        device: str = "auto",
        dtype: str = "float32",
        output_dir: str | Path | None = None,
        progress: bool = True,
    ):
        if learning_rate is not None and finite(learning_rate, "learning_rate") <= 0:
            raise ConfigError(f"learning_rate={learning_rate}: give a number above 0.")
        counts = {"epochs": epochs, "batch_size": batch_size, "max_tokens": 1 if max_tokens is None else max_tokens}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number, 1 or more.")
        if not 0 <= finite(validation, "validation") < 1:
            raise ConfigError(f"validation={validation}: give a share, 0 or more and below 1.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype}: give {', '.join(DTYPES)}.")
        self.model_name, self.epochs, self.batch_size, self.validation = model_name, epochs, batch_size, validation
        self.normalize, self.max_tokens, self.seed, self.progress = normalize, max_tokens, seed, progress
        self.device, self.dtype = device, dtype
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self.config = LearnerConfig(lr=learning_rate, warmup_ratio=0.1)
        self.preferences = read_preferences(preference_data, fields or {})
        least = 2 if validation else 1
        if len(self.preferences) < least:
            raise ConfigError(f"preference_data: {len(self.preferences)} pairs. Give {least} at least, and rather 500.")
        self.history: list[Row] = []
        """One row an epoch: `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`."""

    async def train(self) -> NeuralReward:
        """Train in a thread of its own; cancelled, it stops within a step and leaves nothing behind."""
        stop = threading.Event()
        work = asyncio.create_task(asyncio.to_thread(self._train, stop))
        try:
            folder = await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            with suppress(Exception):
                await work
            raise
        return NeuralReward(folder.absolute(), device=self.device, dtype=self.dtype)

    def _train(self, stop: threading.Event) -> Path:
        from arborl.learner.pairs import NO_GAIN, PairLearner, fit
        from arborl.models.scalar import Scorer
        from arborl.training_run.run_folder import claimed

        asked = RunConfig(name="neural-reward", output_dir=self.output_dir)
        source = resolve(self.model_name, "model_name")
        most = self._longest(source)
        renderer = Renderer.from_folder(source)
        training, held = self._pairs(renderer, most)
        with claimed(asked, resuming=False) as folder:
            steps = self.epochs * math.ceil(len(training) / self.batch_size)
            learner = PairLearner(Scorer(source, self.dtype, self.device, begin=True), self.config, steps)
            with _Shown(self, len(training), len(held), stop) as seen:
                best = fit(learner, training, held, self.epochs, self.batch_size, self.seed, seen.step, seen.epoch)
                seen.check()
            if best.get("loss", 0.0) >= NO_GAIN:
                log.warning(
                    "the reward model has learned nothing that holds for held-out pairs: it does not beat chance"
                )
            scale, shift = self._scale(learner, training)
            record = Record(scale, shift, most, best.get("accuracy"), tuple(self.history))
            _save(folder, learner, source, renderer, record)
            return folder

    def _longest(self, source: Path) -> int:
        about = described(source)
        reads = about.get("max_position_embeddings") or about.get("n_positions") or MOST_TOKENS
        if self.max_tokens is not None and self.max_tokens > reads:
            raise ConfigError(f"max_tokens={self.max_tokens}: {self.model_name} reads {reads} at most.")
        return self.max_tokens or min(MOST_TOKENS, int(reads))

    def _pairs(self, renderer: Renderer, most: int) -> tuple[list[Pair], list[Pair]]:
        """Pairs to train on and to hold out, as the model is shown them. Those of which it is shown the same (cut at
        the beginning, they end alike) say nothing and are left out."""
        from arborl.learner.pairs import Pair

        made: dict[int, Pair] = {}
        cut = 0
        for number, one in enumerate(self.preferences):
            sides = [self._tokens(renderer, one, side) for side in (one.better, one.worse)]
            cut += max(map(len, sides)) > most
            better, worse = (side[-most:] for side in sides)
            if better != worse:
                made[number] = Pair(better, worse, one.weight)
        count = len(self.preferences)
        if cut:
            log.warning("%d of %d pairs are longer than max_tokens=%d: their beginning is left out", cut, count, most)
        if len(made) < count:
            log.warning("%d of %d pairs are left out: the model is shown the same of both", count - len(made), count)
        kept = [self.preferences[number] for number in made]
        pairs = list(made.values())
        training, held = held_out(kept, self.validation, self.seed)
        if not training or (self.validation and not held):
            raise ConfigError(
                f"preference_data: {len(pairs)} of {count} pairs can be told apart by their last "
                f"{most} tokens, which are too few. Give more, or a larger max_tokens."
            )
        return [pairs[i] for i in training], [pairs[i] for i in held]

    def _tokens(self, renderer: Renderer, one: Preference, side: Sequence[Any]) -> list[int]:
        try:
            return shown(renderer, side)
        except ValueError as error:
            raise ConfigError(
                f"{one.where}: {error}. Give the conversation from its beginning: {{'prompt': …, 'chosen': …, "
                "'rejected': …}."
            ) from error

    def _scale(self, learner: PairLearner, training: Sequence[Pair]) -> tuple[float, float]:
        says = learner.says(training)
        spread = pstdev(says)
        if not spread:
            raise RunStopped(
                "the reward model says the same of all conversations: it learned nothing. Give more epochs, or a "
                "larger learning_rate."
            )
        return (1 / spread, -fmean(says) / spread) if self.normalize else (1.0, 0.0)


class _Stopped(Exception):
    """Nobody waits for the training any more."""


class _Shown:
    """What a person sees of the training, and where it is told to stop."""

    def __init__(self, trainer: NeuralRewardTrainer, training: int, held: int, stop: threading.Event):
        self.trainer, self.training, self.held, self.stop = trainer, training, held, stop
        self.console = Console(quiet=not trainer.progress)
        self.status = self.console.status("")

    def __enter__(self) -> _Shown:
        self.trainer.history, self.began = [], time.monotonic()
        held = f" and {self.held} held out" if self.held else ""
        self._say(f"reward model: {self.trainer.model_name} learns from {self.training} pairs{held}")
        self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def check(self) -> None:
        if self.stop.is_set():
            raise _Stopped

    def step(self, epoch: int, pairs: int) -> None:
        self.check()
        self.status.update(f"epoch {epoch}/{self.trainer.epochs}, pair {pairs}/{self.training}")

    def epoch(self, row: Row) -> None:
        self.trainer.history.append(row)
        measured = f"  held out: loss {row['loss']:.3f}  accuracy {row['accuracy']:.1%}" if "loss" in row else ""
        took = time.monotonic() - self.began
        self._say(f"epoch {row['epoch']:g}/{self.trainer.epochs}  loss {row['train_loss']:.3f}{measured}  {took:.0f} s")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _save(folder: Path, learner: PairLearner, source: Path, renderer: Renderer, record: Record) -> None:
    """A whole model in Hugging Face form; what makes the folder one comes last."""
    from arborl.training_run.build import save_tokenizer

    making = folder / ".making"
    with disk_errors(folder):
        try:
            learner.scorer.model.save_pretrained(making)
            save_tokenizer(source, renderer, making)
            record.write(making)
            for file in sorted(making.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(folder / file.name)
        finally:
            shutil.rmtree(making, ignore_errors=True)
