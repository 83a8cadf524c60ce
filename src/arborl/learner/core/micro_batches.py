"""Splits a batch into micro-batches that fit into memory; after an out-of-memory error it repeats with smaller ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from arborl.config.run import LearnerConfig
from arborl.learner.attention.execution import ATTENTION_BACKENDS
from arborl.learner.core.packing import ForwardCosts, MicroBatch, padding_micro_batch, rows_are_cheaper, split
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.models.place import place_of
from arborl.types import Terms, TokenTree

log = logging.getLogger(__name__)

T = TypeVar("T")


class MicroBatcher:
    """Splits batches and remembers the size that fits.

    Args:
        model: the policy before it is sharded.
        lockstep: ranks that must run the same number of micro-batches.
    """

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, lockstep: RankGroup = SINGLE_RANK):
        self.attention, self.lockstep = config.attention, lockstep
        self.cuda, self.costs = place_of(model).device.type == "cuda", model_costs(model)
        self.kernel = self.attention in ("auto", "kernel") and ATTENTION_BACKENDS["kernel"].supports(model)
        self.budget = config.micro_batch_tokens or (16_384 if self.cuda else 4_096)
        """Tokens per micro-batch; smaller than the setting after an out-of-memory error."""

    def split(self, trees: Sequence[TokenTree], terms: Terms, square: bool = False) -> list[MicroBatch]:
        """The batch in micro-batches of the current size.

        Args:
            square: attention will cost the square of each tree, so trees are not merged.
        """
        merge = self.kernel and not square  # the kernels skip pairs of tokens that do not see each other
        as_rows: Callable[[TokenTree], bool] | None = None
        if self.attention == "causal":
            as_rows = lambda tree: True  # noqa: E731
        elif self.attention == "auto" and not merge and not self.cuda:  # on a GPU a row costs as much as a tree
            as_rows = lambda tree: rows_are_cheaper(tree, self.costs)  # noqa: E731
        batches = split(trees, terms, self.budget, as_rows, merge)
        if self.lockstep.is_distributed:
            batches += [padding_micro_batch()] * (max(self.lockstep.all_gather(len(batches))) - len(batches))
        return batches

    def run(
        self,
        trees: Sequence[TokenTree],
        terms: Terms,
        work: Callable[[list[MicroBatch]], T],
        undo: Callable[[], None],
    ) -> T:
        """Call `work` with the micro-batches. After an out-of-memory error, reduce the size and call it again.

        Args:
            undo: discards what an interrupted `work` has left.
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
                if self.lockstep.is_distributed:  # the other ranks wait inside a collective operation
                    raise torch.OutOfMemoryError(
                        f"rank {self.lockstep.rank} has no memory for micro-batches of {self.budget} tokens. Write "
                        f"learner.micro_batch_tokens={max(1, self.budget // 2)}, or learner.recompute=true."
                    ) from error
                reason = str(error).splitlines()[0] if str(error) else "out of memory"
            failed, self.budget = largest, max(1, min(self.budget, largest) // 2)
            log.warning("%s; the run continues with learner.micro_batch_tokens=%d", reason, self.budget)
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def model_costs(model: PreTrainedModel) -> ForwardCosts:
    """Multiplications per layer: about one per weight and token, and 2 × hidden size per pair of tokens."""
    layers = model.config.num_hidden_layers
    inside = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return ForwardCosts(inside / layers, 2.0 * model.config.hidden_size)
