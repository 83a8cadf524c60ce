"""What happens between the matrix products of an update on a CPU, by `update_layers.c`: the functions of
`layer_kernels.py`, which are for a GPU, and a norm.

N tokens, J heads, D head size, E model size, F width of the layer's inner part, M terms, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from arborl.models.c_library import load_c_library, run_parallel

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("update_layers.c")
SOME = 32
"""As in the C source."""
NUMBERS_A_THREAD = 2**15
"""With fewer, another thread costs more than it brings."""
FUNCTIONS = ("norm", "norm_backward", "turn", "gate", "gate_backward", "say", "say_backward")


class _Rows(Structure):
    """As `Rows` in the C source."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "width", "heads", "stride", "back")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("x", "y", "weight", "grad", "cos", "sin")),
        *((name, c_void_p) for name in ("out", "more", "each", "partial")),
        *((name, c_void_p) for name in ("token", "heat", "to_logprob", "to_entropy", "logprob", "entropy")),
        ("next", c_int64),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, where there are some."""
    found = load_c_library(SOURCE)
    if found is not None:
        found.rows_bytes.restype = c_int64
        for name in FUNCTIONS:
            function = getattr(found, name)
            function.argtypes, function.restype = [POINTER(_Rows)], None
        if found.rows_bytes() != ctypes.sizeof(_Rows):
            log.warning("%s is not used: it is laid out otherwise here", SOURCE.name)
            return None
    return found


def _run(name: str, rows: int, width: int, *, heads: int = 1, stride: int = 0, back: bool = False, epsilon: float = 0.0,
         **tensors: Tensor | None) -> None:  # fmt: skip
    s = _Rows(rows, width, heads, stride or width, back, epsilon)
    for field, tensor in tensors.items():
        setattr(s, field, None if tensor is None else tensor.data_ptr())
    function = getattr(library(), name)
    parts = min(torch.get_num_threads(), -(-rows // SOME), rows * width * heads // NUMBERS_A_THREAD)
    run_parallel(lambda part: function(s), max(1, parts))


def norm(x_NE: Tensor, weight_E: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The root-mean-square norm of rows, and what each was multiplied by."""
    count, width = x_NE.shape
    out, each = torch.empty_like(x_NE), x_NE.new_empty(count)
    _run("norm", count, width, epsilon=epsilon, x=x_NE, weight=weight_E, out=out, each=each)
    return out, each


def norm_backward(x_NE: Tensor, weight_E: Tensor, each_N: Tensor, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weight."""
    count, width = x_NE.shape
    out, partial = torch.empty_like(x_NE), x_NE.new_empty(-(-count // SOME), width)
    _run("norm_backward", count, width, x=x_NE, weight=weight_E, each=each_N, grad=grad_NE, out=out, partial=partial)
    return out, partial.sum(0)


def turn(x_NJD: Tensor, cos_N1D: Tensor, signed_sin_N1D: Tensor, back: bool) -> Tensor:
    """Rotary position embedding by halves; `back` is its gradient. Heads of a token must lie next to each other."""
    count, heads, size = x_NJD.shape
    if (x_NJD.stride(1), x_NJD.stride(2)) != (size, 1):
        x_NJD = x_NJD.contiguous()
    out, cos, sin = x_NJD.new_empty(x_NJD.shape), cos_N1D.contiguous(), signed_sin_N1D.contiguous()
    _run("turn", count, size, heads=heads, stride=x_NJD.stride(0), back=back, x=x_NJD, cos=cos, sin=sin, out=out)
    return out


def gate(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """SiLU of one times the other."""
    out = torch.empty_like(gate_NF)
    _run("gate", *gate_NF.shape, x=gate_NF, y=up_NF, out=out)
    return out


def gate_backward(gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both."""
    to_gate, to_up = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    _run("gate_backward", *gate_NF.shape, x=gate_NF, y=up_NF, grad=grad_NF, out=to_gate, more=to_up)
    return to_gate, to_up


def say(logit_MV: Tensor, token_M: Tensor, heat_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each token at its temperature, the entropy there, and the logarithm of the sum."""
    logprob, entropy, lse = torch.empty((3, len(logit_MV)))
    _run(
        "say", *logit_MV.shape, x=logit_MV, token=token_M, heat=heat_M, logprob=logprob, entropy=entropy, each=lse
    )  # fmt: skip
    return logprob, entropy, lse


def say_backward(
    logit_MV: Tensor, token_M: Tensor, heat_M: Tensor, entropy_M: Tensor, lse_M: Tensor, to_logprob_M: Tensor,
    to_entropy_M: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of the logits."""
    out = torch.empty_like(logit_MV)
    _run(
        "say_backward", *logit_MV.shape, x=logit_MV, token=token_M, heat=heat_M, entropy=entropy_M, each=lse_M,
        to_logprob=to_logprob_M, to_entropy=to_entropy_M, out=out,
    )  # fmt: skip
    return out
