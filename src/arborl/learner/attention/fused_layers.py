"""The kernels of `layer_kernels.py`, and on a CPU those of `cpu_kernels.py`, as torch operations with gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel

from arborl.learner.attention import cpu_kernels
from arborl.models.attention import raw_head_logits
from arborl.models.fast_forward import (
    HeadNorms,
    LayerFunctions,
    epsilon,
    gated_activation,
    has_fast_forward,
    rotated_heads,
)
from arborl.models.sampling import DistributionParams, possible_logits

SILU = ("SiLU", "SiLUActivation")


def supports_fused_layers(model: PreTrainedModel) -> bool:
    if model.device.type == "cpu":
        able = model.dtype == torch.float32 and cpu_kernels.layers_library() is not None
    else:
        able = model.dtype != torch.float64 and model.device.type == "cuda" and find_spec("triton") is not None
    return able and has_fast_forward(model)


def _kernels(x: Tensor) -> Any:
    if x.device.type == "cpu":
        return cpu_kernels
    from arborl.learner.attention import layer_kernels

    return layer_kernels


class _Rotate(Function):
    """On a CPU; on a GPU `_RotatedHeads` rotates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return cpu_kernels.rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return cpu_kernels.rotate(grads[0], cos, sin, back=True), None, None


class _RotatedHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
        key_heads: int, epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from arborl.learner.attention import layer_kernels

        ctx.key_heads, ctx.epsilon = key_heads, epsilon
        ctx.save_for_backward(None if q_weight is None else qkv, q_weight, k_weight, cos, sin)
        return layer_kernels.rotated_heads(qkv, q_weight, k_weight, cos, sin, key_heads, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from arborl.learner.attention import layer_kernels

        to_q, to_k, to_v = grads
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        to_qkv, to_weights = layer_kernels.rotated_heads_backward(
            to_q, to_k, to_v, qkv, q_weight, k_weight, cos, sin, ctx.epsilon
        )
        return to_qkv, *to_weights, None, None, None, None


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _kernels(gate).gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = ctx.saved_tensors
        return _kernels(gate).gate_backward(gate, up, grads[0].contiguous())


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
        logit_MV, token_M = logit_MV.contiguous(), token_M.contiguous()
        logprob, entropy, lse = _kernels(logit_MV).token_logprobs(logit_MV, token_M, temperature_M)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logit_MV, token_M, temperature_M, entropy, lse)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logit_MV, token_M, temperature_M, entropy_M, lse_M = ctx.saved_tensors
        to_logprob, to_entropy = (None if grad is None else grad.contiguous() for grad in grads)
        if to_logprob is None:
            to_logprob = torch.zeros_like(lse_M)
        known = (logit_MV, token_M, temperature_M, entropy_M, lse_M)
        return _kernels(logit_MV).token_logprobs_backward(*known, to_logprob, to_entropy), None, None


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out, each = _kernels(x).norm(rows, weight, epsilon)
        ctx.save_for_backward(rows, weight, each)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, each = ctx.saved_tensors
        to_rows, to_weight = _kernels(rows).norm_backward(rows, weight, each, grads[0].contiguous())
        return to_rows.view(grads[0].shape), to_weight, None


def _fused_norm(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = _Norm.apply(x, module.weight, epsilon(module))
    return out


def _fused_heads(
    qkv: Tensor, head_norms: HeadNorms | None, key_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if qkv.device.type == "cpu":
        return rotated_heads(qkv, head_norms, key_heads, cos, sin, _fused_norm, _Rotate.apply)
    weights, eps = (None, None), 0.0
    if head_norms is not None:
        weights, eps = tuple(norm.weight for norm in head_norms), epsilon(head_norms[0])  # type: ignore[assignment]
    found: tuple[Tensor, Tensor, Tensor] = _RotatedHeads.apply(qkv, *weights, cos, sin, key_heads, eps)
    return found


def _fused_gate(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return _Gate.apply(gate, up) if type(act).__name__ in SILU else gated_activation(act, gate, up)


FUSED_OPS = LayerFunctions(_fused_heads, _fused_gate, _fused_norm)


def fused_head(
    head: Any, hidden_ME: Tensor, token_M: Tensor, shape: DistributionParams, entropy: bool
) -> tuple[Tensor, Tensor]:
    temperature_M = shape.temperature_B.float().expand(len(token_M)).contiguous()
    logit_MV = possible_logits(raw_head_logits(head, None, hidden_ME), shape, token_M)
    logprob_M, entropy_M = fused_logprobs(logit_MV, token_M, temperature_M)
    return logprob_M, entropy_M if entropy else entropy_M.detach()


def fused_logprobs(logit_MV: Tensor, token_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logit_MV, token_M, temperature_M)
    return result
