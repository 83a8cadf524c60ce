"""One optimiser step from trees and terms; the result does not depend on how they are split."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.algorithms.losses import Said, TermBatch
from arborl.config.run import LearnerConfig
from arborl.learner import spread
from arborl.learner.batch import Costs, MicroBatch, is_cut, rows_pay, split
from arborl.learner.critic import Critic
from arborl.learner.optimizer import Optimizer
from arborl.learner.score import score
from arborl.learner.tally import Tally, columns, what_is_wrong
from arborl.learner.trust_region import PolicyKL, natural_step
from arborl.learner.ways import Ways
from arborl.models.lora import adapters_off, dropout_on, export_merged, has_lora, load_adapter, save_adapter
from arborl.types import Floats, Metrics, Sampling, Terms, TokenTree

log = logging.getLogger(__name__)

T = TypeVar("T")
Heard = tuple[MicroBatch, Said, TermBatch]


class Learner:
    """Holds the policy's weights, their optimiser, and the models an algorithm needs around the policy.

    Args:
        model: the policy; its parameters are updated in place, so an engine that shares them needs no copy.
        sampling: how the rollout draws tokens; terms are scored under the same distribution.
        needs: what the algorithm asks for: a frozen copy of the weights as they are now (or, under adapters, the model
            with these off), a critic.
        total_steps: how many updates the run will make, for the learning rate's decay.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        sampling: Sampling,
        needs: Needs | None = None,
        total_steps: int = 0,
    ):
        needs = needs or Needs()
        self.model, self.config, self.sampling = model, config, sampling
        self.total_steps = total_steps
        adapted = has_lora(model)
        self.lr = config.lr or usual_rate(model.num_parameters()) * (10 if adapted else 1)
        copied = needs.reference and not adapted
        self.reference = copy.deepcopy(model).requires_grad_(False) if copied else None
        separate = config.critic == "separate"
        self.critic = Critic(model, separate, config.critic_detach) if needs.value else None
        self.optimizer = Optimizer(
            [p for p in model.parameters() if p.requires_grad],
            self.critic.trained().values() if self.critic else (),
            config,
            (self.lr, config.critic_lr or self.lr * (1 if separate else 10)),
        )
        self.ways = Ways(config.attention, config.compile, config.recompute)
        self.budget = config.micro_batch_tokens or (16_384 if model.device.type == "cuda" else 4_096)
        """Tokens a micro-batch; less than asked for once memory has not sufficed."""
        self.done = 0
        """Optimiser steps so far."""

    @property
    def scale(self) -> float:
        """What the rates are multiplied by at the next step: up over the warm-up, down to the run's end if asked."""
        config = self.config
        rise = min(1.0, (self.done + 1) / (config.warmup_steps + 1))
        if config.decay == "none" or not self.total_steps:
            return rise
        return rise * max(0.0, 1.0 - self.done / (self.total_steps * config.epochs * config.minibatches))

    # -------------------------------------------------------------------------------------------- without gradient

    def look(self, trees: Sequence[TokenTree], terms: Terms, needs: Needs) -> Terms:
        """The same terms with what `needs` asks for: what policy, reference and critic say before the update."""
        found: dict[str, Floats] = {}
        if needs.proximal or needs.value:
            logprob, value = self._say(self.model, trees, terms, self._critic() if needs.value else None)
            found |= {"proximal": logprob} if needs.proximal else {}
            found |= {"value": value} if needs.value else {}
        if needs.reference:
            found["reference"] = self._say(self.reference or self.model, trees, terms, base=self.reference is None)[0]
        return dataclasses.replace(terms, **found)  # type: ignore[arg-type]

    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Tensor:
        """Log-probability of every term under the present weights."""
        return torch.from_numpy(self._say(self.model, trees, terms)[0])

    @torch.no_grad()
    def _say(
        self,
        model: PreTrainedModel,
        trees: Sequence[TokenTree],
        terms: Terms,
        critic: Critic | None = None,
        base: bool = False,
    ) -> tuple[Floats, Floats]:
        """Log-probabilities, and values where there is a critic; with `base`, of the model under its adapters."""

        def work(batches: list[MicroBatch]) -> tuple[Floats, Floats]:
            logprob, value = np.zeros(len(terms)), np.zeros(len(terms))
            for batch in batches:
                way = self.ways(model, batch)  # with adapters on, as they are when it is checked elsewhere
                with adapters_off(model) if base else nullcontext():
                    said = score(model, batch, self.sampling, way, critic)
                logprob[batch.rows] = said.logprob_M.double().cpu().numpy()
                if said.value_M is not None:
                    value[batch.rows] = said.value_M.double().cpu().numpy()
            return logprob, value

        return self._fitting(trees, terms, work)

    def _critic(self) -> Critic:
        if self.critic is None:
            raise ValueError("this learner was made without a critic; give it the algorithm's `needs`")
        return self.critic

    # -------------------------------------------------------------------------------------------- with gradient

    def update(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Metrics:
        """Learn from the batch: `epochs` passes, each in `minibatches` optimiser steps of whole trees.

        Terms that no loss can be computed from leave the weights untouched, and the metrics say why.
        """
        if wrong := what_is_wrong(terms):
            if wrong != ["no_terms"]:  # which is what flat groups come to, and no reason for concern
                log.warning("an update is skipped: not finite: %s", ", ".join(wrong))
            return {"learner/skipped": 1.0} | {f"learner/skipped/{reason}": 1.0 for reason in wrong}
        seen: dict[str, list[float]] = {}
        for _ in range(self.config.epochs):
            for numbers in np.array_split(np.arange(len(trees)), self.config.minibatches):
                rows = np.flatnonzero(np.isin(terms.tree, numbers))
                if len(rows) or spread.together():
                    for name, value in self._step(trees, terms.pick(rows), algorithm).items():
                        seen.setdefault(name, []).append(value)
        # the gap between rollout and learner is read before any weight has moved
        return {name: v[0] if "rollout_gap" in name else float(np.mean(v)) for name, v in seen.items()}

    def _step(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Metrics:
        """The gradients of all micro-batches and processes add up to those of the whole; then one step."""
        metrics = self.backward(trees, terms, algorithm)
        if spread.together():
            spread.add_up(self.optimizer.gradients())
        scale = self.scale
        if algorithm.trust_region is None:
            metrics |= self.optimizer.step(scale)
        else:
            metrics |= self._trust_region_step(trees, terms, algorithm, metrics["policy/loss"])
            if self.critic is not None:
                metrics |= self.optimizer.step(scale, only="critic")
        self.optimizer.zero()
        self.done += 1
        return metrics | {"learner/lr": self.lr * scale, "learner/micro_batch_tokens": float(self.budget)}

    def backward(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Metrics:
        """Leave this batch's gradients; return its loss and the mean over terms of everything worth logging."""

        def work(batches: list[MicroBatch]) -> Tally:
            self.optimizer.zero()
            tally = Tally()
            with dropout_on(self.model):
                for batch, said, terms_M in self._heard(batches, terms, algorithm):
                    loss_M, parts = algorithm.loss(said, terms_M)
                    loss = (loss_M * terms_M.weight_M).sum() * self.config.minibatches
                    loss.backward()
                    tally.add(len(batch.rows), loss, said, terms_M, parts)
            return tally

        return self._fitting(trees, terms, work).metrics()

    def _heard(self, batches: list[MicroBatch], terms: Terms, algorithm: Algorithm) -> Iterator[Heard]:
        """Each micro-batch with what the models say about it and its columns, `sequence_M` filled where asked for."""
        device, needs = self.model.device, algorithm.needs
        sequence: Tensor | None = None
        if algorithm.whole and is_cut(batches):  # no micro-batch alone holds whole groups: look at all of them first
            now = np.full(len(terms), np.nan)
            with torch.no_grad():
                for batch in batches:
                    said = score(self.model, batch, self.sampling, self.ways(self.model, batch))
                    now[batch.rows] = said.logprob_M.double().cpu().numpy()
            everything = columns(terms, device, self.model.dtype)
            sequence = algorithm.prepare(torch.from_numpy(now).to(everything.old_M), everything)
        for batch in batches:
            critic = self._critic() if needs.value else None
            way = self.ways(self.model, batch)
            said = score(self.model, batch, self.sampling, way, critic, needs.entropy)
            terms_M = columns(batch.terms, device, self.model.dtype)
            if algorithm.whole:
                rows = torch.from_numpy(batch.rows).to(device)
                now_M = said.logprob_M.detach()
                prepared_M = algorithm.prepare(now_M, terms_M) if sequence is None else sequence[rows]
                terms_M = dataclasses.replace(terms_M, sequence_M=prepared_M)
            yield batch, said, terms_M

    def _trust_region_step(
        self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, before: float
    ) -> Metrics:
        settings = algorithm.trust_region
        assert settings is not None
        policy = self.optimizer.parts["policy"].all
        batches = self._split(trees, terms)
        kl = PolicyKL(self.model, policy, batches, self.sampling)

        @torch.no_grad()
        def surrogate() -> float:
            total = 0.0
            for _, said, terms_M in self._heard(batches, terms, algorithm):
                loss_M = algorithm.loss(said, terms_M)[0]
                total += float((loss_M * terms_M.weight_M).sum()) * self.config.minibatches
            return sum(spread.gather(total))

        return natural_step(policy, kl, surrogate, before, settings)

    # -------------------------------------------------------------------------------------------- memory

    def _split(self, trees: Sequence[TokenTree], terms: Terms) -> list[MicroBatch]:
        plain: Callable[[TokenTree], bool] | None = None
        if self.config.attention == "causal":
            plain = _always
        elif self.config.attention == "auto" and self.model.device.type != "cuda":  # flex costs a row as much as a tree
            costs = costs_of(self.model)
            plain = lambda tree: rows_pay(tree, costs)  # noqa: E731
        return split(trees, terms, self.budget, plain)

    def _fitting(self, trees: Sequence[TokenTree], terms: Terms, work: Callable[[list[MicroBatch]], T]) -> T:
        """Do `work` on the micro-batches; where memory does not suffice, all of it again on smaller ones, for good."""
        failed = 0
        while True:
            batches = self._split(trees, terms)
            largest = max((len(batch) for batch in batches), default=0)
            if failed and largest >= failed:
                raise torch.OutOfMemoryError(
                    f"a single branch of {largest} tokens does not fit into the GPU's memory. Write "
                    "learner.recompute=true, or a smaller sampling.max_context."
                )
            try:
                return work(batches)
            except torch.OutOfMemoryError as error:
                what = str(error).splitlines()[0] if str(error) else "out of memory"
            failed, self.budget = largest, max(1, min(self.budget, largest) // 2)
            log.warning("%s; from now on learner.micro_batch_tokens=%d", what, self.budget)
            self.optimizer.zero()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    # -------------------------------------------------------------------------------------------- files

    def weights(self) -> dict[str, Tensor]:
        """The parameters themselves, not copies."""
        return dict(self.model.state_dict())

    def save(self, folder: Path) -> None:
        """Model in Hugging Face form (adapters alone where there are some), and beside it what is needed to go on."""
        if has_lora(self.model):
            save_adapter(self.model, folder / "model")
        else:
            self.model.save_pretrained(folder / "model")
        if self.reference is not None:
            self.reference.save_pretrained(folder / "reference")
        critic = {name: p.detach() for name, p in self.critic.trained().items()} if self.critic else {}
        state = {"optimizer": self.optimizer.state_dict(), "critic": critic, "done": self.done, "budget": self.budget}
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Continue exactly where `save` left off."""
        if has_lora(self.model):
            load_adapter(self.model, folder / "model")
        else:
            _read(self.model, folder / "model")
        if self.reference is not None:
            _read(self.reference, folder / "reference")
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.model.device)
        if self.critic is not None:
            self.critic.load(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.budget = int(state["done"]), min(self.budget, int(state["budget"]))

    def export(self, folder: Path) -> None:
        """The policy as an ordinary Hugging Face model; adapters are added to the weights they correct."""
        if has_lora(self.model):
            export_merged(self.model, folder)
        else:
            self.model.save_pretrained(folder)


def _always(tree: TokenTree) -> bool:
    return True


def _read(model: PreTrainedModel, folder: Path) -> None:
    saved = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    with torch.no_grad():
        for name, own in model.state_dict().items():
            own.copy_(saved[name])


def costs_of(model: PreTrainedModel) -> Costs:
    """Multiplications a layer: about one a weight for each token, and two a number for each pair of tokens."""
    layers = model.config.num_hidden_layers
    inside = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return Costs(inside / layers, 2.0 * model.config.hidden_size)


def usual_rate(parameters: int) -> float:
    """A learning rate that is a fair start for a policy of this size."""
    return 6e-4 if parameters < 10_000_000 else 1e-5 if parameters < 500_000_000 else 1e-6
