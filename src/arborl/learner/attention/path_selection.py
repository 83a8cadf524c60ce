"""Execution paths: how a model runs over a micro-batch of trees, and which path is used.

A path combines an attention backend, fused or library layers, and gradient checkpointing. All compute the same numbers.
When a path is first used for a model, it is compared on a small tree with the library's code and dense attention
(`models/path_check.py`), with gradients if they are enabled. A path that differs or fails is reported and not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from arborl.learner.attention.cpu_kernels import CpuTreeAttention, supports_cpu_attention
from arborl.learner.attention.fused_layers import FUSED_OPS, fused_logprobs, supports_fused_layers
from arborl.learner.attention.kernel_attention import TritonTreeAttention, supports_gpu_attention
from arborl.learner.attention.tree_attention import BLOCK, BlockAttention, DenseAttention, PackedCausalAttention
from arborl.learner.core.packing import MicroBatch, upload
from arborl.models.attention import AttentionFunction, attention_layout, library_hidden_states, raw_head_logits
from arborl.models.execution_paths import FastPath, first_line, record_path, report_fallback
from arborl.models.fast_forward import (
    RunLayers,
    fast_hidden_states,
    has_fast_forward,
    layer_runner,
    run_layers,
    use_library_forward,
)
from arborl.models.model_loading import compute_device
from arborl.models.path_check import HIGHER, Outputs, check_attention, check_layers, excess, norm_error, sample_tokens
from arborl.types import Terms

MAX_BLOCK_SHARE = 0.7  # block attention is used if it multiplies less than this share of dense attention
CHECK_STEM, LARGE_CHECK_STEM = 24, 200  # tokens of the check tree's stem; the second is for kernels with large blocks
CHECKED_HEAD_ROWS = 16  # tokens whose log-probabilities are compared


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    make: Callable[[MicroBatch, torch.device], AttentionFunction]
    supports: Callable[[PreTrainedModel], bool] = lambda model: True
    """Whether `learner.attention=auto` tries it for a model."""


def _kernel(batch: MicroBatch, device: torch.device) -> AttentionFunction:
    return CpuTreeAttention(batch, device) if device.type == "cpu" else TritonTreeAttention(batch, device)


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "causal": AttentionBackend(PackedCausalAttention),
    "dense": AttentionBackend(DenseAttention),
    "blocks": AttentionBackend(BlockAttention),
    "kernel": AttentionBackend(_kernel, lambda model: supports_gpu_attention(model) or supports_cpu_attention(model)),
}


@dataclass(frozen=True, slots=True)
class ExecutionPath:
    attention: str  # a name in `ATTENTION_BACKENDS`
    fused: bool = False  # whether norms, rotary embedding, gates and the head run in fused kernels
    recompute: bool = False
    """Gradient checkpointing: keep each layer's input and run the layer again in the backward pass."""

    def __str__(self) -> str:
        return f"{self.attention} attention" + ", fused" * self.fused


DENSE = ExecutionPath("dense")


def _make_attention(model: PreTrainedModel, batch: MicroBatch, path: ExecutionPath) -> AttentionFunction:
    device, dtype = compute_device(model)
    attend = ATTENTION_BACKENDS[path.attention].make(batch, device)
    if isinstance(attend, TritonTreeAttention):
        layout = attention_layout(model)
        attend.prepare(layout.windows, layout.key_heads, layout.size, dtype)
    return attend


def hidden_states(model: PreTrainedModel, batch: MicroBatch, path: ExecutionPath) -> Tensor:
    """The last layer's output at each term's predicting position, `[M, hidden]`."""
    predicting = np.unique(batch.terms.position, return_inverse=True)
    attend = _make_attention(model, batch, path)
    tokens, depth, rows, term = upload(compute_device(model).device, batch.tokens, batch.depth, *predicting)
    recompute = path.recompute and torch.is_grad_enabled()
    if has_fast_forward(model):
        ops = FUSED_OPS if path.fused else None
        hidden = fast_hidden_states(
            model, tokens, depth, attend, _checkpointed_run(path) if recompute else None, rows, ops
        )
    else:
        with _library_checkpointing(model, recompute):
            hidden = library_hidden_states(model, tokens, depth, attend)[rows]
    return hidden.index_select(0, term)


def _checkpointed_run(path: ExecutionPath) -> RunLayers:
    run = partial(run_layers, ops=FUSED_OPS if path.fused else None)

    def run_checkpointed(
        layers: Sequence[Any], x_NE: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFunction
    ) -> Tensor:
        for layer in layers:
            x_NE = checkpoint(run, [layer], x_NE, cos, sin, attend, use_reentrant=False)
        return x_NE

    return run_checkpointed


@contextmanager
def _library_checkpointing(model: PreTrainedModel, enabled: bool) -> Iterator[None]:
    """The library's gradient checkpointing. It requires training mode, which is set on layers but not on dropout."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] if enabled else []
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


def cheapest_attention(batch: MicroBatch, device: torch.device) -> str:
    """The backend that should be fastest for this batch; on a CPU, among those that need no compiler."""
    if device.type == "cuda" and not (len(batch.lengths) == 1 and batch.is_unbranched):
        return "kernel"
    if batch.is_unbranched:
        return "causal"
    firsts = batch.depth[::BLOCK]  # a token has as many ancestors as its depth
    blocks = BLOCK * int((firsts + BLOCK).sum())
    dense = sum(length**2 for length in np.asarray(batch.lengths))
    return "blocks" if blocks < MAX_BLOCK_SHARE * dense else "dense"


_checked: WeakKeyDictionary[PreTrainedModel, dict[tuple[ExecutionPath, bool], bool]] = WeakKeyDictionary()
"""By model: whether a path (with or without gradients) passed its check."""


class PathSelector:
    """Selects the fastest checked path for each model and micro-batch."""

    def __init__(self, attention: str = "auto", recompute: bool = False):
        self.attention, self.recompute = attention, recompute

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> ExecutionPath:
        has_fast_forward(model)  # runs that check too, so that no later call has to
        known = _checked.setdefault(model, {})
        for path in self._candidates(model, batch):
            key = (path, torch.is_grad_enabled())
            if key not in known:
                known[key] = path == DENSE or self._passes(model, path)
            if known[key]:
                record_path(model, "learner", str(path))
                return replace(path, recompute=self.recompute)
        return replace(DENSE, recompute=self.recompute)

    @staticmethod
    def _passes(model: PreTrainedModel, path: ExecutionPath) -> bool:
        error = path_error(model, path)
        if error is not None:
            kind = FastPath.TRAINING_FUSED if path.fused else FastPath.TRAINING_TREES
            report_fallback(model, kind, f"{path}: {error}")
        return error is None

    @staticmethod
    def check_all(model: PreTrainedModel) -> None:
        """Check every path with the library's layers now, before the model is sharded: afterwards a check would be a
        collective operation, and gradients are stored elsewhere."""
        use_library_forward(model)
        known = _checked.setdefault(model, {})
        known.clear()
        for path in (ExecutionPath(name) for name in ATTENTION_BACKENDS):
            for graded in (True, False):
                with torch.set_grad_enabled(graded):
                    supported = ATTENTION_BACKENDS[path.attention].supports(model)
                    known[path, graded] = supported and (path == DENSE or PathSelector._passes(model, path))

    def _candidates(self, model: PreTrainedModel, batch: MicroBatch) -> Iterator[ExecutionPath]:
        if self.attention == "auto":
            device = compute_device(model).device
            names = [cheapest_attention(batch, device)]
            if names == ["kernel"] or device.type == "cpu":
                other = "blocks" if names == ["kernel"] else names[0]
                names = ["kernel", other] if ATTENTION_BACKENDS["kernel"].supports(model) else [other]
        else:
            dense = self.attention == "causal" and not batch.is_unbranched
            names = [DENSE.attention if dense else self.attention]
        fuses = has_fast_forward(model) and supports_fused_layers(model)
        for name in names:
            if fuses and name != DENSE.attention:
                yield ExecutionPath(name, fused=True)
            yield ExecutionPath(name)


def path_error(model: PreTrainedModel, path: ExecutionPath) -> str | None:
    """How the path differs from the library's code with dense attention; None if it does not."""
    large = path.attention == "kernel" and model.device.type != "cpu"  # a GPU's kernels have large blocks
    size = LARGE_CHECK_STEM if large else CHECK_STEM
    batch = sample_micro_batch(model, chain=path.attention == "causal", size=size)
    attend, dense = _make_attention(model, batch, path), _make_attention(model, batch, DENSE)
    tokens, positions = batch.tokens.tolist(), batch.depth.tolist()
    try:
        if not has_fast_forward(model):
            return check_attention(model, attend, dense, tokens, positions)
        run = partial(layer_runner, ops=FUSED_OPS if path.fused else None)
        error = check_layers(model, run, attend, dense, tokens, positions)
        return _head_error(model, tokens, positions, dense) if path.fused and error is None else error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel's compiler may raise anything
        return first_line(error)


def _head_error(
    model: PreTrainedModel, tokens: list[int], positions: list[int], attend: AttentionFunction
) -> str | None:
    """How the fused log-probabilities and entropies differ from the unfused ones on the same logits."""
    token_N, position_N = (torch.tensor(x, device=model.device) for x in (tokens, positions))
    with torch.no_grad():
        hidden_NE = library_hidden_states(model, token_N, position_N, attend)[-CHECKED_HEAD_ROWS:]
        logit_NV = raw_head_logits(model.get_output_embeddings(), None, hidden_NE)
    graded, target_N = torch.is_grad_enabled(), token_N[-CHECKED_HEAD_ROWS:]

    def run(head: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype) -> Outputs:
        logits = logit_NV.to(dtype).requires_grad_(graded)
        logprob_N, entropy_N = head(logits)
        outputs = {"log-probabilities": logprob_N.detach()[None], "entropies": entropy_N.detach()[None]}
        if graded:
            weight = torch.linspace(-1, 1, len(logprob_N), device=logits.device)
            outputs["gradients of logits"] = torch.autograd.grad((logprob_N * weight).sum(), logits)[0]
        return outputs

    def plain(logits: Tensor) -> tuple[Tensor, Tensor]:
        log_NV = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        return log_NV.gather(1, target_N[:, None])[:, 0], -(log_NV.exp() * log_NV).sum(-1)

    def fused(logits: Tensor) -> tuple[Tensor, Tensor]:
        return fused_logprobs(logits, target_N, torch.ones(len(target_N), device=logits.device))

    dtype = logit_NV.dtype
    exact = run(plain, HIGHER.get(dtype, dtype))
    ratio, name = excess(run(fused, dtype), run(plain, dtype), exact, dtype, norm_error)
    return None if ratio <= 1.0 else f"the error of {name} is {ratio:.1f} times what rounding explains"


def sample_micro_batch(model: PreTrainedModel, chain: bool, size: int) -> MicroBatch:
    """A small tree: a stem of `size` tokens and three branches, one of which branches again; with `chain` one
    branch."""
    rng = np.random.default_rng(0)  # not the run's generator: a resumed run would draw other numbers
    twig = size // 3
    depth = [np.arange(size + twig)]
    if not chain:
        depth += [size + np.arange(twig), size + twig + np.arange(twig), size + np.arange(twig)]
        depth[2] -= twig // 2  # branches off in the middle of the second
    depth_N = np.concatenate(depth)
    end_N = np.full(len(depth_N), len(depth_N))
    for k in range(len(depth_N)):
        after = np.flatnonzero(depth_N[k + 1 :] <= depth_N[k])
        end_N[k] = k + 1 + after[0] if len(after) else len(depth_N)
    position = np.arange(0, len(depth_N), 2)
    tokens = np.asarray(sample_tokens(model, len(depth_N)))
    zeros, ints = np.zeros(len(position)), np.zeros(len(position), dtype=np.int64)
    target = rng.integers(0, model.config.vocab_size, len(position))
    terms = Terms(ints, position, target, zeros, zeros, zeros, ints, ints, ints, ints, *[zeros] * 6)  # type: ignore[arg-type]
    return MicroBatch(tokens, depth_N, end_N, (len(depth_N),), terms, np.arange(len(position)))
