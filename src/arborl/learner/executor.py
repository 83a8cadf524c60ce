"""Ways to run a model over a micro-batch: how it attends, whether its layers are fused, what is kept for gradients.

All give the same numbers; `attention_choice.py` chooses one and makes sure of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from arborl.learner.compiled_attention import CompiledAttend, compiled_fits
from arborl.learner.fused_layers import FUSED
from arborl.learner.kernel_attention import KernelAttend, kernel_fits
from arborl.learner.packing import MicroBatch
from arborl.learner.tree_attention import BLOCK, BlockAttend, CausalAttend, DenseAttend
from arborl.learner.upload import upload
from arborl.models.attention import AttentionFunction, attention_layout, library_hidden_states
from arborl.models.fast_forward import RunLayers, fast_hidden_states, has_fast_forward, run_layers
from arborl.models.model_loading import compute_device

WORTH_GATHERING = 0.7
"""Blocks are used when they multiply less than this share of what the dense way does."""


@dataclass(frozen=True, slots=True)
class Executor:
    """Attention for one micro-batch, and what it asks of the batch."""

    make: Callable[[MicroBatch, torch.device], AttentionFunction]
    fits: Callable[[PreTrainedModel], bool] = lambda model: True
    """Whether it is worth trying with a model, where nobody has asked for it by name."""


def _kernel(batch: MicroBatch, device: torch.device) -> AttentionFunction:
    return CompiledAttend(batch, device) if device.type == "cpu" else KernelAttend(batch, device)


EXECUTORS: dict[str, Executor] = {
    "causal": Executor(CausalAttend),
    "dense": Executor(DenseAttend),
    "blocks": Executor(BlockAttend),
    "kernel": Executor(_kernel, fits=lambda model: kernel_fits(model) or compiled_fits(model)),
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model."""

    attend: str
    """A name in `EXECUTORS`."""
    fused: bool = False
    """What lies between products by kernels of our own."""
    recompute: bool = False
    """Keep only what goes into each layer, and run the layer again when its gradient is due."""

    def __str__(self) -> str:
        return f"{self.attend} attention" + ", fused" * self.fused


DENSE = Way("dense")


def hidden(model: PreTrainedModel, batch: MicroBatch, way: Way) -> Tensor:
    """The last layer's output where each term is predicted, `[M, hidden]`."""
    predicting = np.unique(batch.terms.position, return_inverse=True)
    device, dtype = compute_device(model)
    attend = EXECUTORS[way.attend].make(batch, device)
    if isinstance(attend, KernelAttend):
        attend.prepare(attention_layout(model).windows, attention_layout(model).size, dtype)
    tokens, depth, rows, term = upload(device, batch.tokens, batch.depth, *predicting)
    recompute = way.recompute and torch.is_grad_enabled()
    if has_fast_forward(model):
        found = fast_hidden_states(
            model, tokens, depth, attend, _run(way, recompute), rows, FUSED if way.fused else None
        )
    else:
        with _recomputing(model, recompute):
            found = library_hidden_states(model, tokens, depth, attend)[rows]
    return found.index_select(0, term)


def _run(way: Way, recompute: bool) -> RunLayers | None:
    if not recompute:
        return None
    run = partial(run_layers, ops=FUSED if way.fused else None)

    def again(layers: Sequence[Any], x_NE: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFunction) -> Tensor:
        for layer in layers:
            x_NE = checkpoint(run, [layer], x_NE, cos, sin, attend, use_reentrant=False)
        return x_NE

    return again


@contextmanager
def _recomputing(model: PreTrainedModel, wanted: bool) -> Iterator[None]:
    """The library's own recomputation. It asks for training mode: given to the layers, not to the dropout in them."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] if wanted else []
    if layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        if layers:
            model.gradient_checkpointing_disable()


def cheapest(batch: MicroBatch, device: torch.device) -> str:
    """The executor that should be quickest for this batch; on a CPU, of those that need no compiler."""
    if device.type == "cuda" and not (len(batch.lengths) == 1 and batch.is_chains):
        return "kernel"
    if batch.is_chains:
        return "causal"
    firsts = batch.depth[::BLOCK]  # a token has as many ancestors as its depth
    blocks = BLOCK * int((firsts + BLOCK).sum())
    dense = sum(length**2 for length in np.asarray(batch.lengths))
    return "blocks" if blocks < WORTH_GATHERING * dense else "dense"
