"""Micro-batches that fit into memory: where they do not, everything again on smaller ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from arborl.config.run_config import LearnerConfig
from arborl.learner.executor import EXECUTORS
from arborl.learner.packing import Costs, MicroBatch, rows_pay, spare, split
from arborl.learner.peers import ALONE, Peers
from arborl.models.place import place_of
from arborl.types import Terms, TokenTree

log = logging.getLogger(__name__)

T = TypeVar("T")


class Fitting:
    """Splits batches, and remembers what size has fitted.

    Args:
        model: as it is before it is sharded.
        meeting: the processes that meet at every micro-batch, where they do: each then has as many as the others.
    """

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, meeting: Peers = ALONE):
        self.attention, self.meeting = config.attention, meeting
        self.cuda, self.costs = place_of(model).device.type == "cuda", costs_of(model)
        self.kernel = self.attention in ("auto", "kernel") and EXECUTORS["kernel"].fits(model)
        self.budget = config.micro_batch_tokens or (16_384 if self.cuda else 4_096)
        """Tokens a micro-batch; less than asked for once memory has not sufficed."""

    def split(self, trees: Sequence[TokenTree], terms: Terms, square: bool = False) -> list[MicroBatch]:
        """The batch in micro-batches of the present size.

        Args:
            square: attention will cost what the square of each tree does, so trees are not joined.
        """
        shared = self.kernel and not square  # no pair is looked at that need not be
        plain: Callable[[TokenTree], bool] | None = None
        if self.attention == "causal":
            plain = _always
        elif self.attention == "auto" and not shared and not self.cuda:  # there a row costs as much as a tree
            plain = lambda tree: rows_pay(tree, self.costs)  # noqa: E731
        found = split(trees, terms, self.budget, plain, shared)
        if self.meeting.together:
            found += [spare()] * (max(self.meeting.gather(len(found))) - len(found))
        return found

    def run(
        self,
        trees: Sequence[TokenTree],
        terms: Terms,
        work: Callable[[list[MicroBatch]], T],
        undo: Callable[[], None],
    ) -> T:
        """Do `work` on the micro-batches; where memory does not suffice, all of it again on smaller ones, for good.

        Args:
            undo: gives back what `work` has left half done.
        """
        failed = 0
        while True:
            batches = self.split(trees, terms)
            largest = max((len(batch) for batch in batches), default=0)
            if failed and largest >= failed:
                raise torch.OutOfMemoryError(
                    f"a single branch of {largest} tokens does not fit into the GPU's memory. Write "
                    "learner.recompute=true, or a smaller sampling.max_context."
                )
            try:
                return work(batches)
            except torch.OutOfMemoryError as error:
                if self.meeting.together:  # the others wait in the middle of a pass, for what will never come
                    raise torch.OutOfMemoryError(
                        f"rank {self.meeting.rank} has no memory for micro-batches of {self.budget} tokens. Write "
                        f"learner.micro_batch_tokens={max(1, self.budget // 2)}, or learner.recompute=true."
                    ) from error
                what = str(error).splitlines()[0] if str(error) else "out of memory"
            failed, self.budget = largest, max(1, min(self.budget, largest) // 2)
            log.warning("%s; from now on learner.micro_batch_tokens=%d", what, self.budget)
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _always(tree: TokenTree) -> bool:
    return True


def costs_of(model: PreTrainedModel) -> Costs:
    """Multiplications a layer: about one a weight for each token, and two a number for each pair of tokens."""
    layers = model.config.num_hidden_layers
    inside = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return Costs(inside / layers, 2.0 * model.config.hidden_size)
