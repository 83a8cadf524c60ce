"""`NeuralRewardTrainer`: train a reward model on pairs of conversations, from Python objects or files."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from rich.console import Console

from arborl.chat import Renderer
from arborl.config.load_config import is_text
from arborl.config.run_config import RunConfig
from arborl.config.training_config import LearnerConfig
from arborl.conversational.config import check_counts
from arborl.conversational.environment import MultiTurnTrajectory
from arborl.data.reading.row_reader import OfflineRowReader, messages_of_cell
from arborl.data.reading.table_files import open_table
from arborl.errors import ConfigError, RunStopped, disk_errors
from arborl.models.model_files import read_model_config, resolve
from arborl.rewards.reward_model import NeuralReward, RewardModelRecord, conversation_tokens, up_to_reply
from arborl.rewards.text.text_measures import ConversationTurn
from arborl.rewards.text.text_reward import finite
from arborl.seeds import generator
from arborl.types import Message

if TYPE_CHECKING:  # needs torch
    from arborl.learner.core.pairwise import EpochMetrics, PairLearner, TextPair

log = logging.getLogger(__name__)

MAX_TOKENS = 4096
"""Default length of a conversation; less if the model supports less."""
DTYPES = ("float32", "bfloat16", "float64")


class NeuralRewardTrainer:
    """Trains a reward model on preferences.

    The model is a sequence classifier with one label. The loss is Bradley-Terry: the mean over pairs of
    -log σ(score of the better - score of the worse). Equal seeds give equal weights on a CPU.

    Args:
        model_name: initial model: `seedling`, `smollm2`, a folder, a Hugging Face id, or a reward model's folder.
        preference_data: a list of (better, worse), each the text of a reply, or a conversation as messages, turns or a
            `MultiTurnTrajectory`; or of dicts with `prompt`, `chosen` and `rejected`; or a file of such rows. Include
            prompts: in use the model reads whole conversations.
        learning_rate: default: by the model's size, as `learner.lr`; with warm-up over the first tenth of all steps and
            decay to 0.
        epochs: passes over the pairs.
        batch_size: pairs per step.
        validation: share of held-out pairs. The epoch with the lowest loss on them is kept; with 0 the last one.
        normalize: scale scores to mean 0 and standard deviation 1 over the training pairs.
        fields: other names of `prompt`, `chosen` or `rejected`: `{"prompt": "question"}`.
        max_tokens: longer conversations are cut at the start, in training and in use.
        seed: seed of the split and of the order of pairs.
        device: `auto`: the GPU if there is one.
        dtype: `float32`, `bfloat16` (with float32 master weights) or `float64`.
        output_dir: folder of the reward model, new or empty; default: the next free `runs/neural-reward-NNN`.
        progress: print a line per epoch.

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
            raise ConfigError(f"learning_rate={learning_rate}: must be a number above 0.")
        length = 1 if max_tokens is None else max_tokens
        check_counts("NeuralRewardTrainer", epochs=epochs, batch_size=batch_size, max_tokens=length)
        if not 0 <= finite(validation, "validation") < 1:
            raise ConfigError(f"validation={validation}: must be a share from 0 to below 1.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype}: must be one of {', '.join(DTYPES)}.")
        self.model_name, self.epochs, self.batch_size, self.validation = model_name, epochs, batch_size, validation
        self.normalize, self.max_tokens, self.seed, self.progress = normalize, max_tokens, seed, progress
        self.device, self.dtype = device, dtype
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self.config = LearnerConfig(lr=learning_rate, warmup=0.1)
        self.preferences = read_preferences(preference_data, fields or {})
        minimum = 2 if validation else 1
        if len(self.preferences) < minimum:
            count = len(self.preferences)
            raise ConfigError(f"preference_data: {count} pairs; at least {minimum} are needed, 500 recommended.")
        self.history: list[EpochMetrics] = []
        """One row per epoch: `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`."""

    async def train(self) -> NeuralReward:
        """Train in a thread. A cancellation stops it within a step and removes partial files."""
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
        from arborl.learner.core.pairwise import UNINFORMED_LOSS, PairLearner
        from arborl.models.output_heads import SequenceScorer
        from arborl.training_run.run_folder import claimed

        config = RunConfig(name="neural-reward", output_dir=self.output_dir)
        source = resolve(self.model_name, "model_name")
        max_tokens = self._max_tokens(source)
        renderer = Renderer.from_folder(source)
        training, held = self._pairs(renderer, max_tokens)
        with claimed(config, resuming=False) as folder:
            steps = self.epochs * math.ceil(len(training) / self.batch_size)
            learner = PairLearner(SequenceScorer(source, self.dtype, self.device, begin=True), self.config, steps)
            best = self._fit(learner, training, held, stop)
            if best.get("loss", 0.0) >= UNINFORMED_LOSS:
                log.warning("the reward model is not better than chance on held-out pairs")
            scale, shift = self._scale(learner, training)
            record = RewardModelRecord(scale, shift, max_tokens, best.get("accuracy"), tuple(self.history))
            _save(folder, learner, source, renderer, record)
            return folder

    def _fit(
        self, learner: PairLearner, training: list[TextPair], held: list[TextPair], stop: threading.Event
    ) -> EpochMetrics:
        """Train, with a printed line per epoch; `_Cancelled` once `stop` is set."""
        from arborl.learner.core.pairwise import fit

        console, start = Console(quiet=not self.progress), time.monotonic()
        self.history = []

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        def check() -> None:
            if stop.is_set():
                raise _Cancelled

        def on_step(epoch: int, pairs: int) -> None:
            check()
            status.update(f"epoch {epoch}/{self.epochs}, pair {pairs}/{len(training)}")

        def on_epoch(row: EpochMetrics) -> None:
            self.history.append(row)
            measured = f"  held out: loss {row['loss']:.3f}  accuracy {row['accuracy']:.1%}" if "loss" in row else ""
            text = f"epoch {row['epoch']:g}/{self.epochs}  loss {row['train_loss']:.3f}{measured}"
            say(f"{text}  {time.monotonic() - start:.0f} s")

        pairs = f"{len(training)} pairs" + (f", {len(held)} held out" if held else "")
        say(f"reward model: training {self.model_name} on {pairs}")
        with console.status("") as status:
            best = fit(learner, training, held, self.epochs, self.batch_size, self.seed, on_step, on_epoch)
            check()
        return best

    def _max_tokens(self, source: Path) -> int:
        model = read_model_config(source)
        limit = model.get("max_position_embeddings") or model.get("n_positions") or MAX_TOKENS
        if self.max_tokens is not None and self.max_tokens > limit:
            raise ConfigError(f"max_tokens={self.max_tokens}: {self.model_name} supports at most {limit}.")
        return self.max_tokens or min(MAX_TOKENS, int(limit))

    def _pairs(self, renderer: Renderer, max_tokens: int) -> tuple[list[TextPair], list[TextPair]]:
        """Training and held-out pairs as token ids. Pairs that are equal after the cut at the start are left out."""
        from arborl.learner.core.pairwise import TextPair

        pairs_by_row: dict[int, TextPair] = {}
        num_cut = 0
        for number, one in enumerate(self.preferences):
            sides = [self._tokens(renderer, one, side) for side in (one.better, one.worse)]
            num_cut += max(map(len, sides)) > max_tokens
            better, worse = (side[-max_tokens:] for side in sides)
            if better != worse:
                pairs_by_row[number] = TextPair(better, worse, one.weight)
        count = len(self.preferences)
        if num_cut:
            log.warning("%d of %d pairs are longer than max_tokens=%d: cut at the start", num_cut, count, max_tokens)
        if len(pairs_by_row) < count:
            log.warning("%d of %d pairs are left out: both sides are equal", count - len(pairs_by_row), count)
        kept = [self.preferences[number] for number in pairs_by_row]
        pairs = list(pairs_by_row.values())
        training, held = split_preferences(kept, self.validation, self.seed)
        if not training or (self.validation and not held):
            raise ConfigError(
                f"preference_data: only {len(pairs)} of {count} pairs differ in their last {max_tokens} tokens. Add "
                "pairs, or write a larger max_tokens."
            )
        return [pairs[i] for i in training], [pairs[i] for i in held]

    def _tokens(self, renderer: Renderer, one: Preference, side: Sequence[Any]) -> list[int]:
        try:
            return conversation_tokens(renderer, side)
        except ValueError as error:
            raise ConfigError(
                f"{one.where}: {error}. Write the whole conversation: {{'prompt': …, 'chosen': …, 'rejected': …}}."
            ) from error

    def _scale(self, learner: PairLearner, training: Sequence[TextPair]) -> tuple[float, float]:
        scores = learner.scores(training)
        deviation = pstdev(scores)
        if not deviation:
            raise RunStopped(
                "the reward model gives all conversations the same score. Write more epochs, or a larger learning_rate."
            )
        return (1 / deviation, -fmean(scores) / deviation) if self.normalize else (1.0, 0.0)


class _Cancelled(Exception):
    """The training was cancelled."""


def _save(folder: Path, learner: PairLearner, source: Path, renderer: Renderer, record: RewardModelRecord) -> None:
    """Write the model in Hugging Face format; `config.json` comes last and marks the folder as complete."""
    from arborl.training_run.build import save_tokenizer

    partial = folder / ".making"
    with disk_errors(folder):
        try:
            learner.scorer.model.save_pretrained(partial)
            save_tokenizer(source, renderer, partial)
            record.write(partial)
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(folder / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ preferences

FORMS = '(better, worse), or {"prompt": …, "chosen": …, "rejected": …}'
SIDES = ("better", "worse")


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations; the first one is preferred."""

    better: Sequence[Message]
    worse: Sequence[Message]
    where: str
    """Place of the row, for error messages."""
    weight: float = 1.0

    @property
    def prompt(self) -> str:
        """The common first messages as text; empty if there are none."""
        common = 0
        while common < min(len(self.better), len(self.worse)) and self.better[common] == self.worse[common]:
            common += 1
        return repr(self.better[:common]) if common else ""


def read_preferences(data: Any, fields: Mapping[str, str] | None = None) -> list[Preference]:
    """The pairs of a file or of Python objects, as conversations for a reward model."""
    if isinstance(data, str | PathLike):
        path = Path(data).expanduser()
        table = open_table(path)
        count = int(table.sizes.sum())
        places = (f"{path}, {table.place(number)}" for number in range(count))
        rows: Iterable[tuple[str, Any]] = zip(places, table.rows(range(count)), strict=True)
    elif isinstance(data, Mapping | bytes) or not isinstance(data, Iterable):
        raise ConfigError(f"preference_data: must be a list of {FORMS} or a file, not a {type(data).__name__}.")
    else:
        rows = ((f"preference_data, row {number}", row) for number, row in enumerate(data, 1))
    reader = OfflineRowReader("preferences", fields=fields or {}, kind="pairs")
    return [_preference(row, where, reader) for where, row in rows]


def _preference(row: Any, where: str, reader: OfflineRowReader) -> Preference:
    if isinstance(row, Mapping):
        task = reader.task({key: _plain(value) for key, value in row.items()}, where)
        better, worse = (up_to_reply([*task.messages, *side.messages]) for side in task.responses)
        return Preference(_check_text(better, where), _check_text(worse, where), where, task.weight)
    if isinstance(row, str | bytes) or not isinstance(row, Sequence) or len(row) != 2:
        size = f" of {len(row)}" if isinstance(row, Sequence) and not isinstance(row, str | bytes) else ""
        raise ConfigError(f"{where}: {type(row).__name__}{size}. Write {FORMS}.")
    better, worse = (_conversation(one, f"{where}, {side}") for one, side in zip(row, SIDES, strict=True))
    if better == worse:
        raise ConfigError(f"{where}: better and worse are equal. Change one, or remove the row.")
    return Preference(_check_text(better, where), _check_text(worse, where), where)


def _check_text(messages: Sequence[Message], where: str) -> Sequence[Message]:
    if not all(is_text(message.content) for message in messages):
        raise ConfigError(f"{where}: contains half of a surrogate pair. Repair the row, or remove it.")
    return messages


def _conversation(side: Any, where: str) -> list[Message]:
    """One side of a tuple: a reply as text, or a conversation."""
    side = _plain(side)
    if isinstance(side, str):
        if not side.strip():
            raise ConfigError(f"{where}: empty. Fill it, or remove the row.")
        return [Message("assistant", side)]
    column = where.rpartition(", ")
    messages = messages_of_cell(side, column[0], column[2])
    if not any(one.role == "assistant" and (one.content.strip() or one.tool_calls) for one in messages):
        raise ConfigError(f'{where}: has no text of the assistant. Add {{"role": "assistant", "content": "…"}}.')
    return up_to_reply(messages)


def _plain(value: Any) -> Any:
    """Trajectories, turns and messages in OpenAI's format; anything else unchanged."""
    if isinstance(value, MultiTurnTrajectory):
        value = value.turns
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_dict(one) if isinstance(one, ConversationTurn | Message) else one for one in value]
    return value


def _as_dict(turn: ConversationTurn | Message) -> dict[str, Any]:
    has_calls = isinstance(turn, Message) and not turn.sampled and turn.tool_calls  # sampled text contains its calls
    calls = {"tool_calls": turn.tool_calls} if has_calls else {}  # type: ignore[union-attr]
    return {"role": turn.role, "content": turn.content, **calls}


def split_preferences(preferences: Sequence[Preference], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the training rows and of the held-out rows. Rows with the same prompt stay together if there
    are enough prompts."""
    wanted = max(1, round(share * len(preferences))) if share else 0
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(preferences):
        groups.setdefault(one.prompt or f"row {number}", []).append(number)
    held = set(_draw_groups(list(groups.values()), wanted, seed))
    if len(held) < wanted / 2:  # few prompts with many pairs each
        held = set(_draw_groups([[number] for number in range(len(preferences))], wanted, seed))
    return [number for number in range(len(preferences)) if number not in held], sorted(held)


def _draw_groups(groups: Sequence[Sequence[int]], wanted: int, seed: int) -> Iterator[int]:
    """Items of random whole groups, at most `wanted`."""
    left = wanted
    for index in generator(seed, "held out").permutation(len(groups)):
        if len(groups[index]) <= left:
            left -= len(groups[index])
            yield from groups[index]
