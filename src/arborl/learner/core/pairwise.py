"""Trains a reward model on preference pairs with the Bradley-Terry model: P(a preferred to b) = σ(score(a) - score(b)).

Bradley & Terry, "Rank analysis of incomplete block designs" (1952); for reward models: Ouyang et al., "Training
language models to follow instructions with human feedback" (2022), equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from arborl.config.training_config import LearnerConfig
from arborl.errors import RunStopped
from arborl.learner.core.optimizer import Optimizer, lr_factor
from arborl.learner.core.packing import chunks
from arborl.models.output_heads import SequenceScorer
from arborl.seeds import generator

EpochMetrics = dict[str, float]
UNINFORMED_LOSS = math.log(2)  # the loss of a model that scores everything alike


@dataclass(frozen=True, slots=True)
class TextPair:
    better: Sequence[int]
    worse: Sequence[int]
    weight: float = 1.0  # relative to other pairs

    @property
    def longest(self) -> int:
        return max(len(self.better), len(self.worse))


class PairLearner:
    """Optimizer steps on pairs. The loss of a step is the mean over its pairs, independent of micro-batches."""

    def __init__(self, scorer: SequenceScorer, config: LearnerConfig, total_steps: int):
        self.scorer, self.config, self.total_steps, self.done = scorer, config, total_steps, 0
        self.lr = config.learning_rate(scorer.model.num_parameters())
        self.optimizer = Optimizer(scorer.model.parameters(), (), config, (self.lr, self.lr))
        self.budget = config.micro_batch_tokens or (16_384 if scorer.model.device.type == "cuda" else 4_096)

    def update(self, pairs: Sequence[TextPair]) -> float:
        """One optimizer step; returns the loss before it."""
        self.optimizer.zero_grad()
        whole, loss = sum(pair.weight for pair in pairs), 0.0
        for some in micro_batches(pairs, self.budget):
            part = self.losses(some)[0].sum() / whole
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        self.done += 1  # counted first, so that no step has learning rate 0: a run may have one step
        floor = self.config.min_lr / self.lr
        self.optimizer.step(lr_factor(self.config, self.done, self.total_steps + 1, floor))
        return loss

    @torch.no_grad()
    def measure(self, pairs: Sequence[TextPair]) -> tuple[float, float]:
        loss = right = 0.0
        for some in micro_batches(pairs, self.budget):
            losses, margins = self.losses(some)
            loss += float(losses.sum())
            right += float(((margins > 0).float() + (margins == 0).float() / 2).sum())
        return loss / sum(pair.weight for pair in pairs), right / len(pairs)

    def losses(self, pairs: Sequence[TextPair]) -> tuple[Tensor, Tensor]:
        """-log σ(better - worse) of each pair, times its weight; and better - worse."""
        scores = self.scorer.scores([*(pair.better for pair in pairs), *(pair.worse for pair in pairs)])
        better, worse = scores.to(torch.promote_types(scores.dtype, torch.float32)).chunk(2)
        weights = torch.tensor([pair.weight for pair in pairs], dtype=better.dtype, device=better.device)
        return -weights * logsigmoid(better - worse), better - worse

    @torch.no_grad()
    def scores(self, pairs: Sequence[TextPair]) -> list[float]:
        """The scores of all texts of the pairs, in no particular order."""
        return [
            score
            for some in micro_batches(pairs, self.budget)
            for score in self.scorer([side for pair in some for side in (pair.better, pair.worse)])
        ]


def micro_batches(pairs: Sequence[TextPair], tokens: int) -> Iterator[list[TextPair]]:
    """Pairs of similar length together, with at most `tokens` tokens after padding, or one pair."""
    by_length = sorted(pairs, key=lambda pair: pair.longest)
    return chunks(by_length, lambda some, pair: 2 * (len(some) + 1) * pair.longest <= tokens)


def fit(
    learner: PairLearner,
    training: Sequence[TextPair],
    held_out: Sequence[TextPair],
    epochs: int,
    batch: int,
    seed: int,
    before_step: Callable[[int, int], None],
    after_epoch: Callable[[EpochMetrics], None],
) -> EpochMetrics:
    """Train, and keep the weights of the epoch with the lowest loss on held-out pairs (without such pairs, the last);
    returns its metrics: `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`, which `after_epoch` gets
    too. `before_step` gets the epoch and the pairs seen in it; an exception ends the training."""
    parameters = list(learner.scorer.model.parameters())
    best: EpochMetrics = {}
    kept: list[Tensor] = []
    for epoch in range(1, epochs + 1):
        order, lost = generator(seed, "pairs", epoch).permutation(len(training)), 0.0
        for start in range(0, len(order), batch):
            before_step(epoch, start)
            some = [training[i] for i in order[start : start + batch]]
            lost += learner.update(some) * len(some)
        row: EpochMetrics = {"epoch": epoch, "train_loss": lost / len(training)}
        if held_out:
            row["loss"], row["accuracy"] = learner.measure(held_out)
        if not all(map(math.isfinite, row.values())):
            raise RunStopped(
                f"the reward model's loss is not finite after epoch {epoch}. Write learning_rate below {learner.lr:g}."
            )
        after_epoch(row)
        if not held_out or not best or row["loss"] < best["loss"]:
            best = row
            if held_out and epoch < epochs:
                kept = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    if best["epoch"] < epochs:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
    return best
