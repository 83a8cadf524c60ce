"""The learner of one process: optimizer steps from token trees and terms.

The result of an update does not depend on how trees are split into micro-batches.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.algorithms.token_losses import ModelOutputs, TermBatch
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.attention.path_selection import CHECK_STEM, PathSelector, sample_micro_batch
from arborl.learner.core.checkpoint_files import Snapshot, checkpoint_tensors, load_checkpoint
from arborl.learner.core.interface import BaseLearner, UpdateInterrupted
from arborl.learner.core.offload import HostCopier, OffloadedModel
from arborl.learner.core.optimizer import (
    NO_INITIAL_UPDATES,
    InitialUpdates,
    LossScale,
    local_shard,
    lr_factor,
)
from arborl.learner.core.packing import MicroBatch, Trees, has_split_tree, token_positions
from arborl.learner.core.teacher import RemoteTeacher, Teacher, warn_if_same_model
from arborl.learner.core.tree_forward import (
    Critic,
    MicroBatcher,
    PlacedModel,
    PolicyWithCritic,
    check_critic,
    score_separately,
)
from arborl.learner.core.trust_region import PolicyKL, natural_step
from arborl.learner.core.update_metrics import (
    UpdateSums,
    combine_metrics,
    drop_groups,
    non_finite_terms,
    term_tensors,
    with_proximal,
)
from arborl.learner.distributed.sharding import make_strategy
from arborl.learner.distributed.strategy import Strategy
from arborl.models.execution_paths import count_fallbacks
from arborl.models.lora import adapter_copy, dropout_on, has_lora, with_adapter
from arborl.models.model_loading import compute_device
from arborl.models.output_heads import CriticInit
from arborl.seeds import derive
from arborl.types import Floats, Ints, Metrics, Sampling, Terms

log = logging.getLogger(__name__)

ScoredBatch = tuple[MicroBatch, ModelOutputs, TermBatch | None]
"""A micro-batch, its model outputs and its columns; no columns for `padding_micro_batch`."""


class Learner(BaseLearner):
    """Holds the policy, its optimizer, and the reference model, critic and teacher that an algorithm needs.

    Args:
        model: the policy; its parameters are updated in place, so an engine that shares them needs no copy.
        sampling: the sampling parameters of the rollout; terms are scored under the same distribution.
        needs: the algorithm's needs: a frozen copy of the current weights (with LoRA of the adapter alone), a critic.
        total_steps: number of updates of the run, for the learning-rate schedule.
        seed: seeds the adapter's dropout, together with the step number.
        origin: initial weights of the critic, instead of the policy's.
        teacher: the model to distill.
        strategy: how weights and state are distributed. If it shards weights, `model` is sharded in place.
        first: updates with a constant learning rate before the schedule begins.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        sampling: Sampling,
        needs: AlgorithmNeeds | None = None,
        total_steps: int = 0,
        seed: int = 0,
        origin: CriticInit | None = None,
        teacher: Teacher | None = None,
        strategy: Strategy | None = None,
        first: InitialUpdates = NO_INITIAL_UPDATES,
    ):
        needs = needs or AlgorithmNeeds()
        if sampling.penalizes:
            raise ConfigError("frequency_penalty and presence_penalty: not supported in training. Write 0 for both.")
        self.teacher = teacher
        self.strategy = strategy = strategy or make_strategy(config)
        strategy.check(model)
        self.batch_group, self.place = strategy.batch_group, compute_device(model)
        self.model, self.config, self.sampling = model, config, sampling
        self.total_steps, self.seed, self.first = total_steps, seed, first
        adapted = has_lora(model)
        self.lr = config.learning_rate(model.num_parameters(), adapted)
        if config.min_lr > self.lr:
            raise ConfigError(
                f"learner.min_lr={config.min_lr:g} is above the learning rate {self.lr:g}. Write a smaller "
                "learner.min_lr, or learner.lr."
            )
        copied = needs.reference and not adapted
        self.reference = copy.deepcopy(model).requires_grad_(False) if copied else None
        offloads = self.reference is not None and config.offload == "all" and not strategy.shards_weights
        self.offloaded_reference = OffloadedModel(self.reference) if offloads and self.reference is not None else None
        check_critic(config, needs.value)
        separate = config.has_separate_critic
        self.critic = Critic(model, separate, config.critic == "detached", origin) if needs.value else None
        self.path_selector = PathSelector(config.attention, config.recompute is True)
        self.micro_batcher = MicroBatcher(model, config, strategy.lockstep_group)
        self.loss_scale = LossScale(model.dtype)
        self.copier = HostCopier(model.device)
        self.placed_reference = strategy.place_frozen(self.reference) if self.reference is not None else None
        self.placed_policy = strategy.place(PolicyWithCritic(model, self.critic))
        self.reference_adapter = self._adapter() if needs.reference and adapted else None
        """With LoRA, the adapter with which the model is its own reference."""
        self.optimizer = strategy.optimizer(
            [p for p in model.parameters() if p.requires_grad],
            self.critic.trained_parameters().values() if self.critic else (),
            (self.lr, config.critic_lr or self.lr * (1 if separate else 10)),
        )
        self.pending_snapshot: Snapshot | None = None  # the snapshot whose copies from the device may still be running
        self.done = 0
        """Optimizer steps of the run so far, including those of skipped updates: the schedule follows the run."""
        self.lr_multiplier = 1.0
        self.has_stepped = False
        """Whether the current update has changed the weights."""

    def check_paths(self) -> None:
        with torch.enable_grad():
            self.path_selector(self.model, sample_micro_batch(self.model, chain=False, size=CHECK_STEM))

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, parameter and master weight of every trained parameter."""
        policy = [f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad]
        critic = [f"critic.{name}" for name in self.critic.trained_parameters()] if self.critic is not None else []
        for names, part in zip((policy, critic), self.optimizer.parts.values(), strict=True):
            for name, (parameter, master) in zip(names, part.pairs, strict=True):
                yield name, parameter, master

    @property
    def steps(self) -> int:
        return self.config.epochs * self.config.minibatches

    @property
    def lr_factor(self) -> float:
        before = self.first.count * self.steps
        if self.done < before:
            return self.first.lr / self.lr * self.lr_multiplier
        total = max(self.total_steps * self.steps - before, 0)
        scheduled = lr_factor(self.config, self.done - before, total, self.config.min_lr / self.lr)
        return scheduled * self.lr_multiplier

    def minibatches_of(self, trees: Trees) -> list[Ints]:
        """The tree numbers of each mini-batch, in parts of nearly equal count."""
        return np.array_split(np.arange(len(trees)), self.config.minibatches)

    def score_terms(self, trees: Trees, terms: Terms, needs: AlgorithmNeeds, cut: Ints | None = None) -> Terms:
        """See `BaseLearner.score_terms`. `needs.anchor` costs no pass in an update of one step, which computes it."""
        columns: dict[str, Floats] = {}
        proximal = needs.proximal or (needs.anchor and self.steps > 1)
        if proximal or needs.value:
            logprob, value = np.zeros(len(terms)), np.zeros(len(terms))
            for numbers in self.minibatches_of(trees):  # packed as in the update, so that rounding is the same
                rows = np.isin(terms.tree, numbers)
                logprob[rows], value[rows] = self._score(self.placed_policy, trees, terms.pick(rows), needs.value)
            columns |= {"proximal": logprob} if proximal else {}
            columns |= {"value": value} if needs.value else {}
        if needs.after and cut is not None and self.batch_group.any(len(cut) > 0):
            last = terms.pick(cut)
            following = dataclasses.replace(last, position=token_positions(trees, last))
            after = columns["after"] = terms.after.copy()
            after[cut] = self._score(self.placed_policy, trees, following, value=True)[1]
        if needs.reference:
            adapter, writable = self.reference_adapter, self.strategy.writable
            with with_adapter(self.model, adapter, writable) if adapter else self.with_reference():
                columns["reference"] = self._score(self.placed_reference or self.placed_policy, trees, terms)[0]
        if needs.teacher:
            columns["teacher"] = self._teacher_logprobs(trees, terms)
        return dataclasses.replace(terms, **columns)  # type: ignore[arg-type]

    def _teacher_logprobs(self, trees: Trees, terms: Terms) -> Floats:
        if self.teacher is None:
            raise ValueError("the algorithm needs a teacher, and this learner was created without one")
        if isinstance(self.teacher, RemoteTeacher):
            logprob = self.teacher.logprobs(trees, terms)
        else:
            logprob = self._score(PlacedModel.local(self.teacher), trees, terms)[0]
        if self.done == 0 and len(terms):
            warn_if_same_model(logprob - terms.logprob)
        return logprob

    def logprobs(self, trees: Trees, terms: Terms) -> Tensor:
        return torch.from_numpy(self._score(self.placed_policy, trees, terms)[0])

    @torch.no_grad()
    def _score(self, placed: PlacedModel, trees: Trees, terms: Terms, value: bool = False) -> tuple[Floats, Floats]:
        """Log-probabilities, and with `value` the critic's estimates."""
        if value:
            self._require_critic()

        def run(trees: Trees, terms: Terms) -> tuple[Floats, Floats]:
            def work(batches: list[MicroBatch]) -> tuple[Floats, Floats]:
                logprob, values = np.zeros(len(terms)), np.zeros(len(terms))
                for batch in batches:
                    self._check_interrupt()
                    outputs = placed(batch, self.sampling, self.path_selector(placed.model, batch), value)
                    if not len(batch.rows):
                        continue
                    logprob[batch.rows] = outputs.logprob_M.double().cpu().numpy()
                    if outputs.value_M is not None:
                        values[batch.rows] = outputs.value_M.double().cpu().numpy()
                return logprob, values

            return self.micro_batcher.run(trees, terms, work, self.optimizer.zero_grad)

        def run_in_lockstep(trees: Trees, terms: Terms) -> tuple[Floats, Floats]:
            self.strategy.lockstep_group.any(True)
            return run(trees, terms)

        scores, nothing = score_separately(run_in_lockstep, trees, terms), terms.pick(np.zeros(0, dtype=np.int64))
        while self.strategy.lockstep_group.any(False):  # another rank repeats a pass, which is a collective operation
            run(trees, nothing)
        return scores

    def _require_critic(self) -> None:
        if self.critic is None:
            raise ValueError("the algorithm needs a critic, and this learner was created without one: pass its `needs`")

    def update_reference(self) -> None:
        self._finish_copies()
        if self.reference_adapter is not None:
            self.reference_adapter = self._adapter()
        elif self.reference is not None:
            with self.with_reference(), torch.no_grad():
                policy = dict(self.model.named_parameters())
                for name, parameter in self.reference.named_parameters():
                    with self.strategy.writable([policy[name]]):
                        local_shard(parameter).copy_(local_shard(policy[name]))

    def _adapter(self) -> dict[str, Tensor]:
        with self.strategy.writable([p for name, p in self.model.named_parameters() if "lora_" in name]):
            return adapter_copy(self.model)

    def with_reference(self) -> AbstractContextManager[None]:
        """Keep the reference model's weights on the device inside the context."""
        return self.offloaded_reference.on_device() if self.offloaded_reference is not None else nullcontext()

    def _finish_copies(self) -> None:
        """Call before weights change: later GPU work waits for the copies of a snapshot."""
        if self.pending_snapshot is not None:
            self.pending_snapshot.copied.block_stream()
            self.pending_snapshot = None

    def update(self, trees: Trees, terms: Terms, algorithm: Algorithm, names: Sequence[str] = ()) -> Metrics:
        self._finish_copies()
        began, loss_scale = self.done, self.loss_scale.state_dict()
        try:
            return self._update(trees, terms, algorithm, names)
        except UpdateInterrupted:
            self.done = began
            self.loss_scale.load_state_dict(loss_scale)
            self.optimizer.zero_grad()
            raise
        finally:
            self.has_stepped = False

    def _check_interrupt(self) -> None:
        """Called between micro-batches."""
        if self.interrupt is not None and self.interrupt.is_set() and not self.has_stepped:
            raise UpdateInterrupted

    def _update(self, trees: Trees, terms: Terms, algorithm: Algorithm, names: Sequence[str]) -> Metrics:
        began, whole = self.done, self.batch_group.sum(algorithm.count(terms))
        self.done = began + self.steps
        finite, metrics = drop_groups(terms, non_finite_terms(terms), names, self.batch_group)
        if not self.batch_group.sum(len(finite)):
            why = "not_finite" if metrics else "no_terms"
            return metrics | {"learner/steps": 0.0, "learner/skipped": 1.0, f"learner/skipped/{why}": 1.0}
        values: dict[str, list[float]] = {name: [value] for name, value in metrics.items()}
        minibatches = [finite.pick(np.isin(finite.tree, numbers)) for numbers in self.minibatches_of(trees)]
        for number in range(self.steps):
            at = number % len(minibatches)
            part = minibatches[at]
            if not self.batch_group.sum(len(part)):
                continue
            self.done = began + number
            if number == 0 and algorithm.needs.anchor:  # the weights have not moved: this step computes its own anchor
                part = dataclasses.replace(part, proximal=np.full(len(part), np.nan))
            metrics = self._step(trees, part, algorithm, whole)
            if "learner/skipped/gradient" in metrics:
                bad = np.isin(part.tree, self._trees_with_bad_gradient(trees, part, algorithm))
                minibatches[at], dropped = drop_groups(minibatches[at], bad, names, self.batch_group)
                if dropped and self.batch_group.sum(len(minibatches[at])):
                    metrics = self._step(trees, part.pick(~bad), algorithm, whole)
                metrics |= dropped
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        self.done = began + self.steps
        return combine_metrics(values)

    def _step(self, trees: Trees, terms: Terms, algorithm: Algorithm, whole: float) -> Metrics:
        """One optimizer step from the gradients of all micro-batches and ranks. Weights are normalized by `whole`, the
        number of units (`Algorithm.count`) of the update over all ranks."""
        share = whole / max(self.batch_group.sum(algorithm.count(terms)), 1.0)
        sums = self._compute_gradients(trees, terms, algorithm, share)
        metrics = sums.metrics(self.batch_group)
        self.strategy.reduce_gradients(self.optimizer)
        factor, self.has_stepped = self.lr_factor, True
        if algorithm.trust_region is None:
            metrics |= self.optimizer.step(factor)
        else:
            metrics |= self._trust_region_step(trees, terms, algorithm, share, metrics["policy/loss"])
            if self.critic is not None:
                metrics |= self.optimizer.step(factor, only="critic")
        self.optimizer.zero_grad()
        if self.term_log is not None and not metrics["learner/skipped"]:
            self.term_log.add(sums.records)
        metrics["learner/steps"] = 1.0 - metrics["learner/skipped"]
        metrics["learner/fallbacks"] = float(count_fallbacks(self.model, "learner"))
        metrics |= {"learner/lr": self.lr * factor, "learner/micro_batch_tokens": float(self.micro_batcher.budget)}
        if self.place.device.type == "cuda":
            metrics["learner/memory_gib"] = torch.cuda.max_memory_allocated(self.place.device) / 2**30
        return metrics

    def backward(self, trees: Trees, terms: Terms, algorithm: Algorithm) -> Metrics:
        metrics = self._compute_gradients(trees, terms, algorithm, 1.0).metrics(self.batch_group)
        self.strategy.reduce_gradients(self.optimizer)
        return metrics

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient.clone() for name, gradient in self.strategy.gradients(self)}

    def _compute_gradients(self, trees: Trees, terms: Terms, algorithm: Algorithm, share: float) -> UpdateSums:
        def work(batches: list[MicroBatch]) -> UpdateSums:
            self.optimizer.zero_grad()
            for batch in batches:
                self.path_selector(self.model, batch)  # check new paths without dropout
            sums = UpdateSums()
            with dropout_on(self.model, derive(self.seed, "dropout", self.done, self.batch_group.rank)):
                for number, (batch, outputs, terms_M) in enumerate(self._forward(batches, terms, algorithm), start=1):
                    self._check_interrupt()
                    last = number == len(batches)
                    if terms_M is None:
                        zero = [one for one in (outputs.logprob_M, outputs.value_M) if one is not None]
                        self.strategy.backward(0.0 * torch.cat(zero).sum(), last=last)
                        continue
                    loss_M, parts = algorithm.loss(outputs, terms_M)
                    loss = (loss_M * terms_M.weight_M).sum() * share
                    if self.term_log is not None:
                        outputs.logprob_M.retain_grad()
                    self.strategy.backward(loss * self.loss_scale.value, last=last)
                    sums.add(batch, loss, outputs, terms_M, parts)
                    if self.term_log is not None:
                        sums.record(batch, outputs, terms_M, loss_M * share, parts, self.loss_scale.value)
            self.optimizer.collect()
            return sums

        while True:
            sums = self.micro_batcher.run(trees, terms, work, self.optimizer.zero_grad)
            if self.loss_scale.unscale(self.optimizer.present_gradients(), self.strategy.ranks):
                return sums

    def _trees_with_bad_gradient(self, trees: Trees, terms: Terms, algorithm: Algorithm) -> Ints:
        """Trees whose own gradient is not finite. All ranks go through the same trees: passes may be collective."""
        bad = []
        everywhere = self.batch_group.all_gather(np.unique(terms.tree).tolist())
        for number in sorted({number for some in everywhere for number in some}):
            self._compute_gradients(trees, terms.pick(np.flatnonzero(terms.tree == number)), algorithm, 1.0)
            finite = all(bool(torch.isfinite(gradient).all()) for gradient in self.optimizer.present_gradients())
            if self.strategy.ranks.any(not finite):
                bad.append(number)
        self.optimizer.zero_grad()
        return np.array(bad, dtype=np.int64)

    def _forward(self, batches: list[MicroBatch], terms: Terms, algorithm: Algorithm) -> Iterator[ScoredBatch]:
        """The model outputs and the columns of each micro-batch, with `sequence_M` where the loss needs it."""
        (device, dtype), needs = self.place, algorithm.needs
        sequence: Tensor | None = None
        if algorithm.whole and self.strategy.lockstep_group.any(has_split_tree(batches)):
            sequence = self._prepare_sequences(batches, terms, algorithm)
        for batch in batches:
            if needs.value:
                self._require_critic()
            path = self.path_selector(self.model, batch)
            outputs = self.placed_policy(batch, self.sampling, path, needs.value, needs.entropy)
            if not len(batch.rows):
                yield batch, outputs, None
                continue
            new_M = outputs.logprob_M.detach()
            terms_M = with_proximal(term_tensors(batch.terms, device, dtype), new_M, needs)
            if algorithm.whole:
                rows = torch.from_numpy(batch.rows).to(device)
                prepared_M = algorithm.prepare(new_M, terms_M) if sequence is None else sequence[rows]
                terms_M = dataclasses.replace(terms_M, sequence_M=prepared_M)
            yield batch, outputs, terms_M

    @torch.no_grad()
    def _prepare_sequences(self, batches: list[MicroBatch], terms: Terms, algorithm: Algorithm) -> Tensor | None:
        """`Algorithm.prepare` over the whole mini-batch, for groups that are split over micro-batches."""
        logprob = np.full(len(terms), np.nan)
        for batch in batches:
            outputs = self.placed_policy(batch, self.sampling, self.path_selector(self.model, batch))
            if len(batch.rows):
                logprob[batch.rows] = outputs.logprob_M.double().cpu().numpy()
        if not len(terms):
            return None
        terms_M = term_tensors(terms, *self.place)
        new_M = torch.from_numpy(logprob).to(terms_M.old_M)
        return algorithm.prepare(new_M, with_proximal(terms_M, new_M, algorithm.needs))

    def _trust_region_step(
        self, trees: Trees, terms: Terms, algorithm: Algorithm, share: float, before: float
    ) -> Metrics:
        settings = algorithm.trust_region
        assert settings is not None
        policy = self.optimizer.parts["policy"].masters
        batches = self.micro_batcher.split(trees, terms, square=True)
        kl = PolicyKL(self.model, policy, batches, self.sampling, self.batch_group)

        @torch.no_grad()
        def surrogate() -> float:
            total = 0.0
            for _, outputs, terms_M in self._forward(batches, terms, algorithm):
                assert terms_M is not None
                loss_M = algorithm.loss(outputs, terms_M)[0]
                total += float((loss_M * terms_M.weight_M).sum()) * share
            return self.batch_group.sum(total)

        return natural_step(policy, kl, surrogate, before, settings)

    def scale_lr(self, multiplier: float) -> None:
        self.lr_multiplier = multiplier

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def reserve(self) -> Callable[[], object]:
        with self.with_reference():
            return partial(self.copier.reserve, self.copier.tensor_sizes(checkpoint_tensors(self)))

    def snapshot(self) -> Snapshot:
        offloaded = self.offloaded_reference is not None
        self.pending_snapshot = made = Snapshot.of(self, self.copier, offloaded)
        return made

    def load(self, folder: Path) -> None:
        load_checkpoint(self, folder)

    def close(self) -> None:
        """Nothing to stop: there are no further ranks."""
