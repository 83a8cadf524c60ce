"""Optimiser steps from trees and terms; the result does not depend on how these are split into micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.algorithms.token_losses import Said, TermBatch
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner import schedule
from arborl.learner.attention_choice import CHECKED, Ways, sample
from arborl.learner.critic import Critic, check_critic
from arborl.learner.files import Snapshot, load, parts_of
from arborl.learner.host_copy import HostCopies
from arborl.learner.loss_scale import LossScale
from arborl.learner.micro_batches import Fitting
from arborl.learner.offload import Guest
from arborl.learner.packing import MicroBatch, is_cut
from arborl.learner.precompute import Precompute
from arborl.learner.scorer import Scorer
from arborl.learner.strategies import strategy_of
from arborl.learner.strategy import Strategy
from arborl.learner.teacher import Teacher
from arborl.learner.term_log import TermLog
from arborl.learner.trust_region import PolicyKL, natural_step
from arborl.learner.update_metrics import Tally, anchored, columns, not_finite, summed_up, without
from arborl.models.fallbacks import fallbacks
from arborl.models.lora import (
    dropout_on,
    export_merged,
    has_lora,
)
from arborl.models.place import place_of
from arborl.models.scalar import Origin
from arborl.seeds import derive
from arborl.types import Ints, Metrics, Sampling, Terms, TokenTree

log = logging.getLogger(__name__)

Heard = tuple[MicroBatch, Said, TermBatch | None]
"""No terms of what stands for nothing (`packing.spare`)."""


class Learner(Precompute):
    """Holds the policy's weights, their optimiser, and the models an algorithm needs around the policy.

    Args:
        model: the policy; its parameters are updated in place, so an engine that shares them needs no copy.
        sampling: how the rollout draws tokens; terms are scored under the same distribution.
        needs: what the algorithm asks for: a frozen copy of the weights as they are now (of the adapters alone, where
            there are some), a critic.
        total_steps: how many updates the run will make, for the learning rate's decay.
        seed: decides what the adapters' dropout drops, together with the number of the step.
        origin: what a critic begins as, instead of the policy.
        teacher: whom the policy is distilled from, where the algorithm needs one.
        strategy: how all of this lies in one or several processes. Where it takes weights apart, `model` is taken
            apart, and is of no more use to others.
        first: updates before the schedule of the learning rate begins.
    """

    log: TermLog | None = None
    """Where updates note what they made of each term, for people; None where nobody asks."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        sampling: Sampling,
        needs: Needs | None = None,
        total_steps: int = 0,
        seed: int = 0,
        origin: Origin | None = None,
        teacher: Teacher | None = None,
        strategy: Strategy | None = None,
        first: schedule.FirstSteps = schedule.NONE,
    ):
        needs = needs or Needs()
        self.teacher = teacher
        self.strategy = strategy = strategy or strategy_of(config)
        strategy.check(model)
        self.peers, self.place = strategy.peers, place_of(model)
        self.model, self.config, self.sampling = model, config, sampling
        self.total_steps, self.seed, self.first = total_steps, seed, first
        adapted = has_lora(model)
        self.lr = config.lr or config.lr_scale * schedule.usual_rate(model.num_parameters()) * (10 if adapted else 1)
        if config.min_lr > self.lr:
            raise ConfigError(f"learner.min_lr={config.min_lr:g} is above the rate of such a model, {self.lr:g}.")
        copied = needs.reference and not adapted
        self.reference = copy.deepcopy(model).requires_grad_(False) if copied else None
        visits = self.reference is not None and config.offload == "all" and not strategy.apart
        self.guest = Guest(self.reference) if visits and self.reference is not None else None
        """Brings the reference to the device."""
        check_critic(config, needs.value)
        separate = config.has_separate_critic
        self.critic = Critic(model, separate, config.critic_detach, origin) if needs.value else None
        self.ways = Ways(config.attention, config.recompute is True)
        self.fitting = Fitting(model, config, strategy.meeting)
        self.loss_scale = LossScale(model.dtype)
        self.copies = HostCopies(model.device)
        self.asked_reference = strategy.place_frozen(self.reference) if self.reference is not None else None
        self.asked = strategy.place(Scorer(model, self.critic))
        self.start = self._adapters() if needs.reference and adapted else None
        """The adapters that make the model its own reference."""
        self.optimizer = strategy.optimizer(
            [p for p in model.parameters() if p.requires_grad],
            self.critic.trained().values() if self.critic else (),
            (self.lr, config.critic_lr or self.lr * (1 if separate else 10)),
        )
        self.leaving: Snapshot | None = None
        """The snapshot that may still be under way from the device."""
        self.done = 0
        """Optimiser steps that the run has come past, those of skipped updates too: rates follow the run."""

    def check_paths(self) -> None:
        """Choose the execution path for trees now, and not in the first update."""
        with torch.enable_grad():
            self.ways(self.model, sample(self.model, chain=False, size=CHECKED))

    def trained(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Every parameter that learns, by name, with its master."""
        policy = [f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad]
        critic = [f"critic.{name}" for name in self.critic.trained()] if self.critic is not None else []
        for names, part in zip((policy, critic), self.optimizer.parts.values(), strict=True):
            for name, (parameter, master) in zip(names, part.pairs, strict=True):
                yield name, parameter, master

    @property
    def scale(self) -> float:
        """What the rates are multiplied by at the next step."""
        before = self.first.count * self.steps
        if self.done < before:
            return self.first.lr / self.lr
        total = max(self.total_steps * self.steps - before, 0)
        return schedule.scale(self.config, self.done - before, total, self.config.min_lr / self.lr)

    # -------------------------------------------------------------------------------------------- with gradient

    def update(
        self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, names: Sequence[str] = ()
    ) -> Metrics:
        """Learn from the batch: `epochs` passes, each in `minibatches` optimiser steps of whole trees.

        The loss of a step is the mean over its own part, however large a part of the batch that is. A group whose
        numbers are not finite is left out and named; where nothing is left, the weights stay, and the metrics say why.

        Args:
            names: of the episodes, by their number.
        """
        self._settle()
        began, whole = self.done, self.peers.total(algorithm.count(terms))
        self.done = began + self.steps
        sound, metrics = without(terms, not_finite(terms), names, self.peers)
        if not self.peers.total(len(sound)):
            why = "not_finite" if metrics else "no_terms"
            return metrics | {"learner/steps": 0.0, "learner/skipped": 1.0, f"learner/skipped/{why}": 1.0}
        seen: dict[str, list[float]] = {name: [value] for name, value in metrics.items()}
        minibatches = [sound.pick(np.isin(sound.tree, numbers)) for numbers in self.minibatches_of(trees)]
        for number in range(self.steps):
            at = number % len(minibatches)
            part = minibatches[at]
            if not self.peers.total(len(part)):
                continue
            self.done = began + number
            if number == 0 and algorithm.needs.anchor:  # no weight has moved: the anchor is what the step itself finds
                part = dataclasses.replace(part, proximal=np.full(len(part), np.nan))
            metrics = self._step(trees, part, algorithm, whole)
            if "learner/skipped/gradient" in metrics:
                bad = np.isin(part.tree, self._poisonous(trees, part, algorithm))
                minibatches[at], dropped = without(minibatches[at], bad, names, self.peers)
                if dropped and self.peers.total(len(minibatches[at])):
                    metrics = self._step(trees, part.pick(~bad), algorithm, whole)
                metrics |= dropped
            for name, value in metrics.items():
                seen.setdefault(name, []).append(value)
        self.done = began + self.steps
        return summed_up(seen)

    def _step(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, whole: float) -> Metrics:
        """The gradients of all micro-batches and processes add up to those of the minibatch; then one step.

        Args:
            whole: what the weights of the update's terms are a mean over (`Algorithm.count`), in all processes.
        """
        share = whole / max(self.peers.total(algorithm.count(terms)), 1.0)
        tally = self._gradients(trees, terms, algorithm, share)
        metrics = tally.metrics(self.peers)
        self.strategy.add_up(self.optimizer)
        scale = self.scale
        if algorithm.trust_region is None:
            metrics |= self.optimizer.step(scale)
        else:
            metrics |= self._trust_region_step(trees, terms, algorithm, share, metrics["policy/loss"])
            if self.critic is not None:
                metrics |= self.optimizer.step(scale, only="critic")
        self.optimizer.zero()
        if self.log is not None and not metrics["learner/skipped"]:
            self.log.add(tally.noted)
        metrics["learner/steps"] = 1.0 - metrics["learner/skipped"]
        metrics["learner/fallbacks"] = float(fallbacks(self.model, "learner"))
        metrics |= {"learner/lr": self.lr * scale, "learner/micro_batch_tokens": float(self.fitting.budget)}
        if self.place.device.type == "cuda":
            metrics["learner/memory_gib"] = torch.cuda.max_memory_allocated(self.place.device) / 2**30
        return metrics

    def backward(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Metrics:
        """Leave this batch's gradients; return its loss and the mean over terms of everything worth logging."""
        metrics = self._gradients(trees, terms, algorithm, 1.0).metrics(self.peers)
        self.strategy.add_up(self.optimizer)
        return metrics

    def gradients(self) -> dict[str, Tensor]:
        """All that `backward` has left, by name."""
        return {name: gradient.clone() for name, gradient in self.strategy.gradients(self)}

    def _gradients(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, share: float) -> Tally:
        def work(batches: list[MicroBatch]) -> Tally:
            self.optimizer.zero()
            for batch in batches:
                self.ways(self.model, batch)  # a way that is new is checked now: under dropout none agrees with another
            tally = Tally()
            with dropout_on(self.model, derive(self.seed, "dropout", self.done, self.peers.rank)):
                for number, (batch, said, terms_M) in enumerate(self._heard(batches, terms, algorithm), start=1):
                    last = number == len(batches)
                    if terms_M is None:
                        nothing = 0.0 * torch.cat([p for p in (said.logprob_M, said.value_M) if p is not None]).sum()
                        self.strategy.backward(nothing, last=last)
                        continue
                    loss_M, parts = algorithm.loss(said, terms_M)
                    loss = (loss_M * terms_M.weight_M).sum() * share
                    if self.log is not None:
                        said.logprob_M.retain_grad()
                    self.strategy.backward(loss * self.loss_scale.value, last=last)
                    tally.add(batch, loss, said, terms_M, parts)
                    if self.log is not None:
                        tally.note(batch, said, terms_M, loss_M * share, parts, self.loss_scale.value)
            self.optimizer.collect()
            return tally

        tally = self.fitting.run(trees, terms, work, self.optimizer.zero)
        while not self.loss_scale.settled(self.optimizer.found(), self.strategy.ranks):
            tally = self.fitting.run(trees, terms, work, self.optimizer.zero)
        return tally

    def _poisonous(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Ints:
        """Trees whose gradient alone is not finite; one after the other in all processes, for they may have to meet."""
        bad = []
        everywhere = self.peers.gather(np.unique(terms.tree).tolist())
        for number in sorted({number for some in everywhere for number in some}):
            self._gradients(trees, terms.pick(np.flatnonzero(terms.tree == number)), algorithm, 1.0)
            sound = all(bool(torch.isfinite(gradient).all()) for gradient in self.optimizer.found())
            if self.strategy.ranks.any(not sound):
                bad.append(number)
        self.optimizer.zero()
        return np.array(bad, dtype=np.int64)

    def _heard(self, batches: list[MicroBatch], terms: Terms, algorithm: Algorithm) -> Iterator[Heard]:
        """Each micro-batch with what the models say about it and its columns, `sequence_M` filled where asked for."""
        (device, dtype), needs = self.place, algorithm.needs
        sequence: Tensor | None = None
        if algorithm.whole and self.strategy.meeting.any(is_cut(batches)):
            # no micro-batch alone holds whole groups: look at all of them first
            now = np.full(len(terms), np.nan)
            with torch.no_grad():
                for batch in batches:
                    said = self.asked(batch, self.sampling, self.ways(self.model, batch))
                    if len(batch.rows):
                        now[batch.rows] = said.logprob_M.double().cpu().numpy()
            if len(terms):
                everything = columns(terms, device, dtype)
                now_M = torch.from_numpy(now).to(everything.old_M)
                sequence = algorithm.prepare(now_M, anchored(everything, now_M, needs))
        for batch in batches:
            if needs.value:
                self._critic()
            said = self.asked(batch, self.sampling, self.ways(self.model, batch), needs.value, needs.entropy)
            if not len(batch.rows):
                yield batch, said, None
                continue
            now_M = said.logprob_M.detach()
            terms_M = anchored(columns(batch.terms, device, dtype), now_M, needs)
            if algorithm.whole:
                rows = torch.from_numpy(batch.rows).to(device)
                prepared_M = algorithm.prepare(now_M, terms_M) if sequence is None else sequence[rows]
                terms_M = dataclasses.replace(terms_M, sequence_M=prepared_M)
            yield batch, said, terms_M

    def _trust_region_step(
        self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, share: float, before: float
    ) -> Metrics:
        settings = algorithm.trust_region
        assert settings is not None
        policy = self.optimizer.parts["policy"].all
        batches = self.fitting.split(trees, terms, square=True)
        kl = PolicyKL(self.model, policy, batches, self.sampling, self.peers)

        @torch.no_grad()
        def surrogate() -> float:
            total = 0.0
            for _, said, terms_M in self._heard(batches, terms, algorithm):
                assert terms_M is not None
                loss_M = algorithm.loss(said, terms_M)[0]
                total += float((loss_M * terms_M.weight_M).sum()) * share
            return self.peers.total(total)

        return natural_step(policy, kl, surrogate, before, settings)

    # -------------------------------------------------------------------------------------------- files

    def weights(self) -> dict[str, Tensor]:
        """The parameters themselves, not copies."""
        return dict(self.model.state_dict())

    def reserve(self) -> Callable[[], object]:
        """What takes the memory for a snapshot; it may be called in another thread."""
        with self.with_reference():
            return partial(self.copies.reserve, self.copies.sizes_of(parts_of(self)))

    def snapshot(self) -> Snapshot:
        """Everything that must be kept, as it is now, to be written while training goes on. One is good at a time: the
        next is made in the same memory."""
        self.leaving = made = Snapshot.of(self, self.copies)
        return made

    def save(self, folder: Path) -> None:
        """Model in Hugging Face form (adapters alone where there are some), and beside it what is needed to go on."""
        self.snapshot().write(folder)

    def load(self, folder: Path) -> None:
        """Continue exactly where `save` left off."""
        load(self, folder)

    def close(self) -> None:
        """There is nobody to let go."""

    def export(self, folder: Path) -> None:
        """The policy as an ordinary Hugging Face model; adapters are added to the weights they correct."""
        if has_lora(self.model):
            export_merged(self.model, folder)
        else:
            self.model.save_pretrained(folder)
