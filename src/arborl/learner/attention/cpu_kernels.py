"""Attention over trees (`tree_attention.c`) and fused layers (`update_layers.c`) on a CPU, in float32.

The layer functions have the signatures of those in `layer_kernels.py`, except that `rotate` rotates heads that have had
their norms. N tokens, H query heads, K key heads, J heads, D head size, E model size, F feed-forward size, M terms, V
vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from arborl.learner.core.packing import MicroBatch
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention_layout
from arborl.models.c_library import load_c_library, run_parallel
from arborl.models.model_loading import compute_device

log = logging.getLogger(__name__)


class _Attention(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("trees", "heads", "key_heads", "size", "window")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("start", "end", "depth", "q", "k", "v", "grad")),
        *((f"{name}_{of}", c_int64) for name in ("q", "k", "v", "grad") for of in ("token", "head")),
        *((name, c_void_p) for name in ("out", "lse", "to_q", "to_k", "to_v")),
        ("next", c_int64),
        ("failed", c_int),
    ]


def _library(source: str, struct: type[Structure], size_function: str, functions: tuple[str, ...]) -> Any:
    """The compiled functions, which take a pointer to the struct; None without a C compiler."""
    library: Any = load_c_library(Path(__file__).with_name(source))
    if library is None:
        return None
    for name in functions:
        function = getattr(library, name)
        function.argtypes, function.restype = [POINTER(struct)], None
    getattr(library, size_function).restype = c_int64
    if getattr(library, size_function)() != ctypes.sizeof(struct):
        log.warning("%s is not used: its struct has another layout here", source)
        return None
    return library


@cache
def attention_library() -> Any:
    return _library("tree_attention.c", _Attention, "attention_bytes", ("forward", "backward"))


def supports_cpu_attention(model: PreTrainedModel) -> bool:
    place = compute_device(model)  # device and dtype of the computation; sharded weights may be stored differently
    if place.device.type != "cpu" or place.dtype != torch.float32:
        return False
    return not attention_layout(model).capped and attention_library() is not None


class CpuTreeAttention:
    """Attention of the whole micro-batch in one call."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.start = np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int64)
        self.end, self.depth = (np.ascontiguousarray(x, dtype=np.int64) for x in (batch.end, batch.depth))

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        if bounds.cap is not None:
            raise ValueError("the CPU attention does not cap scores")
        if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in (q_NHD, k_NKD, v_NKD)):
            raise ValueError("the CPU attention supports only float32 on a CPU")
        out: Tensor = _CpuAttention.apply(q_NHD, k_NKD, v_NKD, self, scale, bounds.window or 0)
        return out

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> _Attention:
        a = _Attention(len(self.start) - 1, q.shape[1], k.shape[1], q.shape[2], window, scale)
        a.start, a.end, a.depth = (x.ctypes.data for x in (self.start, self.end, self.depth))
        for name, x in (("q", q), ("k", k), ("v", v)):
            _set_pointer(a, name, x)
        return a


class _CpuAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, trees: CpuTreeAttention, scale: float, window: int
    ) -> Tensor:
        q, k, v = (_dense(x) for x in (q, k, v))
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        a = trees.arguments(q, k, v, scale, window)
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        _run_attention("forward", a)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.trees, ctx.scale, ctx.window = trees, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = _dense(gradients[0])
        outputs = [torch.empty(x.shape) for x in (q, k, v)]
        a = ctx.trees.arguments(q, k, v, ctx.scale, ctx.window)
        _set_pointer(a, "grad", grad)
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        a.to_q, a.to_k, a.to_v = (x.data_ptr() for x in outputs)
        _run_attention("backward", a)
        return (*outputs, None, None, None)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _set_pointer(a: _Attention, name: str, x: Tensor) -> None:
    setattr(a, name, x.data_ptr())
    setattr(a, f"{name}_token", x.stride(0))
    setattr(a, f"{name}_head", x.stride(1))


def _run_attention(direction: str, a: _Attention) -> None:
    library = attention_library()
    if library is None:
        raise RuntimeError("no C compiler found")
    function = getattr(library, direction)
    run_parallel(lambda part: function(a), min(torch.get_num_threads(), a.trees * a.key_heads))
    if a.failed:
        raise MemoryError("no memory for attention over these trees")


ROWS_PER_PARTIAL = 32  # `SOME` in the C source
MIN_NUMBERS_PER_THREAD = 2**15  # with fewer, another thread costs more than it saves
FUNCTIONS = ("norm", "norm_backward", "rotate", "gate", "gate_backward", "token_logprobs", "token_logprobs_backward")


class _Rows(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "width", "heads", "stride", "back")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("x", "y", "weight", "grad", "cos", "sin")),
        *((name, c_void_p) for name in ("out", "more", "each", "partial")),
        *((name, c_void_p) for name in ("token", "temperature", "to_logprob", "to_entropy", "logprob", "entropy")),
        ("next", c_int64),
    ]


@cache
def layers_library() -> Any:
    return _library("update_layers.c", _Rows, "rows_bytes", FUNCTIONS)


def _run_layers(
    name: str, rows: int, width: int, *, heads: int = 1, stride: int = 0, back: bool = False, epsilon: float = 0.0,
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    s = _Rows(rows, width, heads, stride or width, back, epsilon)
    for field, tensor in tensors.items():
        setattr(s, field, None if tensor is None else tensor.data_ptr())
    function = getattr(layers_library(), name)
    parts = min(torch.get_num_threads(), -(-rows // ROWS_PER_PARTIAL), rows * width * heads // MIN_NUMBERS_PER_THREAD)
    run_parallel(lambda part: function(s), max(1, parts))


def norm(x_NE: Tensor, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    count, width = x_NE.shape
    out, each = torch.empty_like(x_NE), x_NE.new_empty(count)
    _run_layers("norm", count, width, epsilon=epsilon, x=x_NE, weight=weight_E, out=out, each=each)
    return out, each


def norm_backward(x_NE: Tensor, weight_E: Tensor, each_N: Tensor, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
    count, width = x_NE.shape
    out, partial = torch.empty_like(x_NE), x_NE.new_empty(-(-count // ROWS_PER_PARTIAL), width)
    _run_layers(
        "norm_backward", count, width, x=x_NE, weight=weight_E, each=each_N, grad=grad_NE, out=out, partial=partial
    )
    return out, partial.sum(0)


def rotate(x_NJD: Tensor, cos_N1D: Tensor, signed_sin_N1D: Tensor, back: bool) -> Tensor:
    """Rotary position embedding by halves, or its gradient with `back`. The heads of a token must be contiguous."""
    count, heads, size = x_NJD.shape
    if (x_NJD.stride(1), x_NJD.stride(2)) != (size, 1):
        x_NJD = x_NJD.contiguous()
    out, cos, sin = x_NJD.new_empty(x_NJD.shape), cos_N1D.contiguous(), signed_sin_N1D.contiguous()
    _run_layers(
        "rotate", count, size, heads=heads, stride=x_NJD.stride(0), back=back, x=x_NJD, cos=cos, sin=sin, out=out
    )
    return out


def gate(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """SiLU(gate) * up."""
    out = torch.empty_like(gate_NF)
    _run_layers("gate", *gate_NF.shape, x=gate_NF, y=up_NF, out=out)
    return out


def gate_backward(gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    to_gate, to_up = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    _run_layers("gate_backward", *gate_NF.shape, x=gate_NF, y=up_NF, grad=grad_NF, out=to_gate, more=to_up)
    return to_gate, to_up


def token_logprobs(logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each token at its temperature, entropy, and log-sum-exp."""
    logprob, entropy, lse = torch.empty((3, len(logit_MV)))
    _run_layers(
        "token_logprobs", *logit_MV.shape, x=logit_MV, token=token_M, temperature=temperature_M, logprob=logprob,
        entropy=entropy, each=lse,
    )  # fmt: skip
    return logprob, entropy, lse


def token_logprobs_backward(
    logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor, entropy_M: Tensor, lse_M: Tensor, to_logprob_M: Tensor,
    to_entropy_M: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(logit_MV)
    _run_layers(
        "token_logprobs_backward", *logit_MV.shape, x=logit_MV, token=token_M, temperature=temperature_M,
        entropy=entropy_M, each=lse_M, to_logprob=to_logprob_M, to_entropy=to_entropy_M, out=out,
    )  # fmt: skip
    return out
