"""A scorer learns from pairs, by Bradley and Terry's model: of two texts the one is preferred with the probability
σ(its score - the other's), and what was preferred is made likely.

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
from arborl.learner import schedule
from arborl.learner.optimizer import Optimizer
from arborl.models.scalar import Scorer
from arborl.seeds import generator

Row = dict[str, float]
NO_GAIN = math.log(2)
"""The loss of a scorer that says the same of everything."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, as token ids."""

    better: Sequence[int]
    worse: Sequence[int]
    weight: float = 1.0
    """Among other pairs."""

    @property
    def longest(self) -> int:
        return max(len(self.better), len(self.worse))


class PairLearner:
    """Optimiser steps from pairs. A step's loss is the mean over its pairs, however they are split into micro-batches.

    Args:
        scorer: its weights are updated in place; dropout is off, so nothing is drawn.
        config: rates, clipping, micro-batches.
        total_steps: for the learning rate's decay.
    """

    def __init__(self, scorer: Scorer, config: LearnerConfig, total_steps: int):
        self.scorer, self.config, self.total_steps, self.done = scorer, config, total_steps, 0
        self.lr = config.lr or schedule.usual_rate(scorer.model.num_parameters())
        self.optimizer = Optimizer(scorer.model.parameters(), (), config, (self.lr, self.lr))
        self.budget = config.micro_batch_tokens or (16_384 if scorer.model.device.type == "cuda" else 4_096)

    def update(self, pairs: Sequence[Pair]) -> float:
        """One step; the loss before it."""
        self.optimizer.zero()
        whole, loss = sum(pair.weight for pair in pairs), 0.0
        for some in micro_batches(pairs, self.budget):
            part = self.losses(some)[0].sum() / whole
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        self.done += 1  # so that the warm-up does not begin with a step at the rate 0: a run may be that short
        floor = self.config.min_lr / self.lr
        self.optimizer.step(schedule.scale(self.config, self.done, self.total_steps + 1, floor))
        return loss

    @torch.no_grad()
    def measure(self, pairs: Sequence[Pair]) -> tuple[float, float]:
        """The loss, and the share of pairs whose better side scores higher; one where both score alike counts half."""
        loss = right = 0.0
        for some in micro_batches(pairs, self.budget):
            losses, margins = self.losses(some)
            loss += float(losses.sum())
            right += float(((margins > 0).float() + (margins == 0).float() / 2).sum())
        return loss / sum(pair.weight for pair in pairs), right / len(pairs)

    def losses(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """-log σ(better - worse) of each pair, times its weight; and better - worse."""
        scores = self.scorer.scores([*(pair.better for pair in pairs), *(pair.worse for pair in pairs)])
        better, worse = scores.to(torch.promote_types(scores.dtype, torch.float32)).chunk(2)
        weights = torch.tensor([pair.weight for pair in pairs], dtype=better.dtype, device=better.device)
        return -weights * logsigmoid(better - worse), better - worse

    @torch.no_grad()
    def says(self, pairs: Sequence[Pair]) -> list[float]:
        """What it says of either side of each pair, in no particular order."""
        return [
            score
            for some in micro_batches(pairs, self.budget)
            for score in self.scorer([side for pair in some for side in (pair.better, pair.worse)])
        ]


def micro_batches(pairs: Sequence[Pair], tokens: int) -> Iterator[list[Pair]]:
    """Pairs of like length together, so many that filled up they are no more than `tokens`; one at least."""
    some: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: pair.longest):
        if some and 2 * (len(some) + 1) * pair.longest > tokens:
            yield some
            some = []
        some.append(pair)
    if some:
        yield some


def fit(
    learner: PairLearner,
    training: Sequence[Pair],
    held_out: Sequence[Pair],
    epochs: int,
    batch: int,
    seed: int,
    before_step: Callable[[int, int], None],
    after_epoch: Callable[[Row], None],
) -> Row:
    """Train, and leave the weights as they were after the epoch with the least loss on held-out pairs, whose row is
    returned; without such pairs, after the last.

    Args:
        epochs: passes over the pairs, each in an order of its own.
        batch: pairs a step.
        before_step: told the epoch and the number of pairs seen in it; what it raises ends the training.
        after_epoch: told `epoch`, `train_loss`, and on held-out pairs `loss` and `accuracy`.
    """
    parameters = list(learner.scorer.model.parameters())
    best: Row = {}
    kept: list[Tensor] = []
    for epoch in range(1, epochs + 1):
        order, lost = generator(seed, "pairs", epoch).permutation(len(training)), 0.0
        for start in range(0, len(order), batch):
            before_step(epoch, start)
            some = [training[i] for i in order[start : start + batch]]
            lost += learner.update(some) * len(some)
        row: Row = {"epoch": epoch, "train_loss": lost / len(training)}
        if held_out:
            row["loss"], row["accuracy"] = learner.measure(held_out)
        if not all(map(math.isfinite, row.values())):
            raise RunStopped(
                f"the reward model's loss is not finite after epoch {epoch}. Give a learning_rate below {learner.lr:g}."
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
