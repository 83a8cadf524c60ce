"""One optimiser step from trees and terms; the result does not depend on how they are split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.losses import LossParts, TermBatch
from arborl.config.run import LearnerConfig
from arborl.learner.batch import MicroBatch, split
from arborl.learner.score import score
from arborl.types import Metrics, Sampling, Terms, TokenTree

Loss = Callable[[Tensor, TermBatch], LossParts]


class Learner:
    """Holds the policy's weights and their optimiser.

    Args:
        model: the policy; its parameters are updated in place, so an engine that shares them needs no copy.
        sampling: how the rollout draws tokens; terms are scored under the same distribution.
        reference: keep a frozen copy of the weights as they are now, for algorithms that ask for one.
        total_steps: how many updates the run will make, for the learning rate's decay.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        sampling: Sampling,
        reference: bool = False,
        total_steps: int = 0,
    ):
        self.model, self.config, self.sampling = model, config, sampling
        self.total_steps = total_steps
        self.lr = config.lr or usual_rate(model.num_parameters())
        self.reference = copy.deepcopy(model).requires_grad_(False) if reference else None
        decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=self.lr,
            betas=config.betas,
        )
        self.done = 0
        """Optimiser steps so far."""

    @property
    def rate(self) -> float:
        """The learning rate of the next optimiser step: up over the warm-up, then down to the run's end if asked."""
        config = self.config
        rise = min(1.0, (self.done + 1) / (config.warmup_steps + 1))
        if config.decay == "none" or not self.total_steps:
            return self.lr * rise
        return self.lr * rise * max(0.0, 1.0 - self.done / (self.total_steps * config.epochs * config.minibatches))

    def update(self, trees: Sequence[TokenTree], terms: Terms, loss: Loss) -> Metrics:
        """Learn from the batch: `epochs` passes, each in `minibatches` optimiser steps of whole trees."""
        seen: dict[str, list[float]] = {}
        for _ in range(self.config.epochs):
            for numbers in np.array_split(np.arange(len(trees)), self.config.minibatches):
                rows = np.flatnonzero(np.isin(terms.tree, numbers))
                if len(rows):
                    for name, value in self._step(trees, terms.pick(rows), loss).items():
                        seen.setdefault(name, []).append(value)
        # the gap between rollout and learner is read before any weight has moved
        metrics = {name: v[0] if "rollout_gap" in name else float(np.mean(v)) for name, v in seen.items()}
        return metrics

    def _step(self, trees: Sequence[TokenTree], terms: Terms, loss: Loss) -> Metrics:
        """Gradients of all micro-batches add up to those of the whole; then one optimiser step."""
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self.backward(trees, terms, loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        for part in self.optimizer.param_groups:
            part["lr"] = self.rate
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        metrics |= {"learner/lr": self.rate, "learner/grad_norm": float(norm), "learner/skipped": float(not finite)}
        self.done += 1
        return metrics

    def backward(self, trees: Sequence[TokenTree], terms: Terms, loss: Loss) -> Metrics:
        """Add this batch's gradients; return its loss and the mean over terms of everything worth logging."""
        sums: dict[str, float] = {}
        total = len(terms)
        for batch in split(trees, terms, self.config.micro_batch_tokens):
            scores = score(self.model, batch, self.sampling)
            columns = self._columns(batch)
            loss_M, parts = loss(scores.logprob_M, columns)
            value = (loss_M * columns.weight_M).sum() * self.config.minibatches
            value.backward()
            gap_M = (scores.logprob_M.detach() - columns.old_M).abs()
            parts |= {"policy/entropy": scores.entropy_M, "policy/rollout_gap": gap_M.exp() - 1}
            for name, vector in parts.items():
                sums[name] = sums.get(name, 0.0) + float(vector.sum()) / total
            sums["policy/loss"] = sums.get("policy/loss", 0.0) + float(value.detach())
            sums["policy/rollout_gap_max"] = max(sums.get("policy/rollout_gap_max", 0.0), float(gap_M.max()))
        return sums

    def _columns(self, batch: MicroBatch) -> TermBatch:
        def tensor(column: np.ndarray) -> Tensor:
            found = torch.from_numpy(column).to(self.model.device)
            return found.to(dtype) if found.is_floating_point() else found

        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = score(self.reference, batch, self.sampling).logprob_M
        terms = batch.terms
        return TermBatch(
            tensor(terms.logprob),
            tensor(terms.advantage),
            tensor(terms.weight),
            tensor(terms.episode),
            tensor(terms.call),
            reference,
        )

    @torch.no_grad()
    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Tensor:
        """Log-probability of every term under the present weights."""
        out = torch.zeros(len(terms), dtype=torch.float64)
        for batch in split(trees, terms, self.config.micro_batch_tokens):
            out[torch.from_numpy(batch.rows)] = score(self.model, batch, self.sampling).logprob_M.double().cpu()
        return out

    def weights(self) -> dict[str, Tensor]:
        """The parameters themselves, not copies."""
        return dict(self.model.state_dict())

    def save(self, folder: Path) -> None:
        """Model in Hugging Face form, and the optimiser beside it."""
        self.model.save_pretrained(folder / "model")
        state = {"optimizer": self.optimizer.state_dict(), "done": self.done}
        if self.reference is not None:
            self.reference.save_pretrained(folder / "reference")
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Continue exactly where `save` left off."""
        self._read(self.model, folder / "model")
        if self.reference is not None:
            self._read(self.reference, folder / "reference")
        state = torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.model.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = int(state["done"])

    @staticmethod
    def _read(model: PreTrainedModel, folder: Path) -> None:
        saved = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
        with torch.no_grad():
            for name, own in model.state_dict().items():
                own.copy_(saved[name])


def usual_rate(parameters: int) -> float:
    """A learning rate that is a fair start for a policy of this size."""
    return 6e-4 if parameters < 10_000_000 else 1e-5 if parameters < 500_000_000 else 1e-6
