"""What policy, reference, critic and teacher say about a batch before it is learned from: without gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Needs
from arborl.config.run_config import LearnerConfig
from arborl.learner.apart import ask_apart
from arborl.learner.attention_choice import Ways
from arborl.learner.critic import Critic
from arborl.learner.files import Snapshot
from arborl.learner.micro_batches import Fitting
from arborl.learner.offload import Guest
from arborl.learner.optimizer import Optimizer, local
from arborl.learner.packing import MicroBatch, places_of
from arborl.learner.peers import Peers
from arborl.learner.scorer import Asked
from arborl.learner.strategy import Strategy
from arborl.learner.teacher import RemoteTeacher, Teacher, warn_of_equals
from arborl.models.lora import adapter_of, with_adapter
from arborl.types import Floats, Ints, Sampling, Terms, TokenTree


class Precompute:
    """The half of a learner that asks. It has no state of its own: a `Learner` gives it what it declares."""

    model: PreTrainedModel
    config: LearnerConfig
    sampling: Sampling
    strategy: Strategy
    peers: Peers
    ways: Ways
    fitting: Fitting
    optimizer: Optimizer
    asked: Asked
    asked_reference: Asked | None
    reference: PreTrainedModel | None
    guest: Guest | None
    start: dict[str, Tensor] | None
    critic: Critic | None
    teacher: Teacher | None
    leaving: Snapshot | None
    done: int

    @property
    def steps(self) -> int:
        """Optimiser steps an update."""
        return self.config.epochs * self.config.minibatches

    def minibatches_of(self, trees: Sequence[TokenTree]) -> list[Ints]:
        """The trees of each, about as many in one as in another."""
        return np.array_split(np.arange(len(trees)), self.config.minibatches)

    def look(self, trees: Sequence[TokenTree], terms: Terms, needs: Needs, cut: Ints | None = None) -> Terms:
        """The same terms with what `needs` asks for: what policy, reference and critic say before the update.

        An anchor that only the loss reads is not looked up for an update of one step, which says it itself.

        Args:
            cut: rows of the terms that the critic is asked behind, too.
        """
        found: dict[str, Floats] = {}
        proximal = needs.proximal or (needs.anchor and self.steps > 1)
        if proximal or needs.value:
            logprob, value = np.zeros(len(terms)), np.zeros(len(terms))
            for numbers in self.minibatches_of(trees):  # packed as they will be: then rounding is the same, too
                rows = np.isin(terms.tree, numbers)
                logprob[rows], value[rows] = self._say(self.asked, trees, terms.pick(rows), needs.value)
            found |= {"proximal": logprob} if proximal else {}
            found |= {"value": value} if needs.value else {}
        if needs.after and cut is not None and self.peers.any(len(cut) > 0):
            last = terms.pick(cut)
            behind = dataclasses.replace(last, position=places_of(trees, last))
            after = found["after"] = terms.after.copy()
            after[cut] = self._say(self.asked, trees, behind, value=True)[1]
        if needs.reference:
            here = self.strategy.here
            with with_adapter(self.model, self.start, here) if self.start else self.with_reference():
                found["reference"] = self._say(self.asked_reference or self.asked, trees, terms)[0]
        if needs.teacher:
            found["teacher"] = self._taught(trees, terms)
        return dataclasses.replace(terms, **found)  # type: ignore[arg-type]

    def _taught(self, trees: Sequence[TokenTree], terms: Terms) -> Floats:
        if self.teacher is None:
            raise ValueError("this learner was made without a teacher, and the algorithm asks for one")
        if isinstance(self.teacher, RemoteTeacher):
            said = self.teacher.logprobs(trees, terms)
        else:
            said = self._say(Asked.plain(self.teacher), trees, terms)[0]
        if self.done == 0 and len(terms):
            warn_of_equals(said - terms.logprob)
        return said

    def renew_reference(self) -> None:
        """The reference policy is from now on the policy as it is."""
        self._settle()
        if self.start is not None:
            self.start = self._adapters()
        elif self.reference is not None:
            with self.with_reference(), torch.no_grad():
                policy = dict(self.model.named_parameters())
                for name, own in self.reference.named_parameters():
                    with self.strategy.here([policy[name]]):
                        local(own).copy_(local(policy[name]))

    def _adapters(self) -> dict[str, Tensor]:
        with self.strategy.here([p for name, p in self.model.named_parameters() if "lora_" in name]):
            return adapter_of(self.model)

    def with_reference(self) -> AbstractContextManager[None]:
        """Inside, a reference model's weights are on the device."""
        return self.guest.here() if self.guest is not None else nullcontext()

    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Tensor:
        """Log-probability of every term under the present weights."""
        return torch.from_numpy(self._say(self.asked, trees, terms)[0])

    @torch.no_grad()
    def _say(
        self, asked: Asked, trees: Sequence[TokenTree], terms: Terms, value: bool = False
    ) -> tuple[Floats, Floats]:
        """Log-probabilities, and values where there is a critic and it is asked."""
        if value:
            self._critic()

        def ask(trees: Sequence[TokenTree], terms: Terms) -> tuple[Floats, Floats]:
            def work(batches: list[MicroBatch]) -> tuple[Floats, Floats]:
                logprob, values = np.zeros(len(terms)), np.zeros(len(terms))
                for batch in batches:
                    said = asked(batch, self.sampling, self.ways(asked.model, batch), value)
                    if not len(batch.rows):
                        continue
                    logprob[batch.rows] = said.logprob_M.double().cpu().numpy()
                    if said.value_M is not None:
                        values[batch.rows] = said.value_M.double().cpu().numpy()
                return logprob, values

            return self.fitting.run(trees, terms, work, self.optimizer.zero)

        def announced(trees: Sequence[TokenTree], terms: Terms) -> tuple[Floats, Floats]:
            self.strategy.meeting.any(True)
            return ask(trees, terms)

        found, nothing = ask_apart(announced, trees, terms), terms.pick(np.zeros(0, dtype=np.int64))
        while self.strategy.meeting.any(False):  # others have something to ask once more, and cannot do so alone
            ask(trees, nothing)
        return found

    def _critic(self) -> Critic:
        if self.critic is None:
            raise ValueError("this learner was made without a critic; give it the algorithm's `needs`")
        return self.critic

    def _settle(self) -> None:
        """Before weights change: what a snapshot still copies must have been copied."""
        if self.leaving is not None:
            self.leaving.hold()
            self.leaving = None
