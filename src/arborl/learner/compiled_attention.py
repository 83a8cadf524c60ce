"""Attention over trees on a CPU by `tree_attention.c`, as an operation that torch differentiates, once.

N tokens, H query heads, K key heads, D head size.
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

from arborl.learner.packing import MicroBatch
from arborl.models.attention import NO_LIMITS, AttentionLimits, attention_layout
from arborl.models.c_library import load_c_library, run_parallel
from arborl.models.model_loading import compute_device

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("tree_attention.c")


class _Attention(Structure):
    """As `Attention` in the C source."""

    _fields_ = [
        *((name, c_int64) for name in ("trees", "heads", "key_heads", "size", "window")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("start", "end", "depth", "q", "k", "v", "grad")),
        *((f"{name}_{of}", c_int64) for name in ("q", "k", "v", "grad") for of in ("token", "head")),
        *((name, c_void_p) for name in ("out", "lse", "to_q", "to_k", "to_v")),
        ("next", c_int64),
        ("failed", c_int),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled attention, where there is one."""
    found = load_c_library(SOURCE)
    if found is not None:
        found.attention_bytes.restype = c_int64
        found.forward.argtypes = found.backward.argtypes = [POINTER(_Attention)]
        found.forward.restype = found.backward.restype = None
        if found.attention_bytes() != ctypes.sizeof(_Attention):
            log.warning("%s is not used: it is laid out otherwise here", SOURCE.name)
            return None
    return found


def compiled_fits(model: PreTrainedModel) -> bool:
    """Whether the compiled attention can serve this model here."""
    place = compute_device(model)  # where and how it computes: of a sharded one, the weights may rest otherwise
    if place.device.type != "cpu" or place.dtype != torch.float32:
        return False
    return not attention_layout(model).capped and library() is not None


class CompiledAttend:
    """The whole micro-batch in one call."""

    def __init__(self, batch: MicroBatch, device: torch.device):
        self.start = np.concatenate([[0], np.cumsum(batch.lengths)]).astype(np.int64)
        self.end, self.depth = (np.ascontiguousarray(x, dtype=np.int64) for x in (batch.end, batch.depth))

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        if bounds.cap is not None:
            raise ValueError("the compiled attention does not cap scores")
        if any(x.dtype != torch.float32 or x.device.type != "cpu" for x in (q_NHD, k_NKD, v_NKD)):
            raise ValueError("the compiled attention is for float32 on a CPU")
        out: Tensor = _Attend.apply(q_NHD, k_NKD, v_NKD, self, scale, bounds.window or 0)
        return out

    def described(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> _Attention:
        """What both directions are given."""
        a = _Attention(len(self.start) - 1, q.shape[1], k.shape[1], q.shape[2], window, scale)
        a.start, a.end, a.depth = (x.ctypes.data for x in (self.start, self.end, self.depth))
        for name, x in (("q", q), ("k", k), ("v", v)):
            _point(a, name, x)
        return a


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trees: CompiledAttend, scale: float, window: int) -> Tensor:
        q, k, v = (_dense(x) for x in (q, k, v))
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        a = trees.described(q, k, v, scale, window)
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        _run("forward", a)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.trees, ctx.scale, ctx.window = trees, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = _dense(gradients[0])
        found = [torch.empty(x.shape) for x in (q, k, v)]
        a = ctx.trees.described(q, k, v, ctx.scale, ctx.window)
        _point(a, "grad", grad)
        a.out, a.lse = out.data_ptr(), lse.data_ptr()
        a.to_q, a.to_k, a.to_v = (x.data_ptr() for x in found)
        _run("backward", a)
        return (*found, None, None, None)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _point(a: _Attention, name: str, x: Tensor) -> None:
    setattr(a, name, x.data_ptr())
    setattr(a, f"{name}_token", x.stride(0))
    setattr(a, f"{name}_head", x.stride(1))


def _run(direction: str, a: _Attention) -> None:
    found = library()
    if found is None:
        raise RuntimeError("there is no C compiler to make it with")
    function = getattr(found, direction)
    run_parallel(lambda part: function(a), min(torch.get_num_threads(), a.trees * a.key_heads))
    if a.failed:
        raise MemoryError("there is no memory for attention over these trees")
