"""A layer of an update on a GPU as one autograd function.

With small models the host launches the kernels of an update more slowly than a GPU runs them. A third of its time is
autograd's work for single operations, which one function per layer does not need. The kernels and what is kept for the
backward pass are those of `run_layer` with `FUSED_OPS`. `run_layer` runs layers with adapters or frozen weights, with
biases behind attention, or with another activation.

N tokens, E model size, F feed-forward size, J query and key heads and values, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from arborl.learner.attention.kernel_attention import TritonTreeAttention
from arborl.learner.attention.tree_plan import Tiles
from arborl.models.attention import AttentionFunction
from arborl.models.fast_forward import LIMITS_ATTRIBUTE, epsilon
from arborl.models.fused_linear import FUSED_ATTRIBUTE, FusedLinear

SILU = ("SiLU", "SiLUActivation")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    fused: FusedLinear
    """Projections of queries, keys and values."""
    key_heads: int
    head_size: int
    epsilon: float
    """Of both norms."""
    head_epsilon: float
    attention: tuple[tuple[int, int, int], float, int, float, Tiles | None]
    """Sizes of the plan, scale, window, cap and tiles, as in `tree_kernels.forward`."""


def whole_layer(layer: Any, x_NE: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFunction) -> Tensor | None:
    """The layer's output, or None if this function does not support it."""
    attention, mlp = layer.self_attn, layer.mlp
    fused: FusedLinear = attention.__dict__[FUSED_ATTRIBUTE]
    products = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not isinstance(attend, TritonTreeAttention) or fused.weight is None or type(mlp.act_fn).__name__ not in SILU:
        return None
    if any(type(product) is not nn.Linear or product.bias is not None for product in products):
        return None
    weights = [product.weight for product in products]
    if torch.is_grad_enabled() and not all(weight.requires_grad for weight in (*weights, *fused.weights)):
        return None  # the gradients of frozen weights would be computed too
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    limits, size = getattr(attention, LIMITS_ATTRIBUTE), attention.head_dim
    plan, plan_sizes = attend.plans[limits.window]
    settings = LayerSettings(
        fused,
        len(fused.weight) // size // (attention.num_key_value_groups + 2),
        size,
        epsilon(norms[0]),
        0.0 if head_norms is None else epsilon(head_norms[0]),
        (plan_sizes, attention.scaling, limits.window or 0, limits.cap or 0.0, attend.tiles),
    )
    head_weights = (None, None) if head_norms is None else (head_norms[0].weight, head_norms[1].weight)
    out: Tensor = _WholeLayer.apply(
        settings, x_NE.contiguous(), cos, sin, plan, norms[0].weight, norms[1].weight,
        *head_weights, *weights, *fused.weights, *fused.biases,
    )  # fmt: skip
    return out


class _WholeLayer(Function):
    @staticmethod
    def forward(
        ctx: Any, settings: LayerSettings, x: Tensor, cos: Tensor, sin: Tensor, plan: Tensor, norm_in: Tensor,
        norm_post: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, w_out: Tensor, w_gate: Tensor, w_up: Tensor,
        w_down: Tensor, *projections: Tensor,
    ) -> Tensor:  # fmt: skip
        from arborl.learner.attention import layer_kernels, tree_kernels

        fused = settings.fused
        assert fused.weight is not None
        h, scale_in = layer_kernels.norm(x, norm_in, settings.epsilon)
        qkv_NJD = linear(h, fused.weight, fused.bias).unflatten(-1, (-1, settings.head_size))
        q, k, v = layer_kernels.rotated_heads(
            qkv_NJD, q_norm, k_norm, cos, sin, settings.key_heads, settings.head_epsilon
        )
        attended, lse = tree_kernels.forward(q, k, v, plan, *settings.attention)  # type: ignore[arg-type]
        middle = x + linear(attended.flatten(1), w_out)
        h_post, scale_post = layer_kernels.norm(middle, norm_post, settings.epsilon)
        gate, up = linear(h_post, w_gate), linear(h_post, w_up)
        inner = layer_kernels.gate(gate, up)
        ctx.settings = settings
        ctx.save_for_backward(
            x, scale_in, h, None if q_norm is None else qkv_NJD, q, k, v, attended, lse, middle, scale_post, h_post,
            gate, up, inner, cos, sin, plan, norm_in, norm_post, q_norm, k_norm, w_out, w_gate, w_up, w_down,
        )  # fmt: skip
        return middle + linear(inner, w_down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        from arborl.learner.attention import layer_kernels, tree_kernels

        settings, fused = ctx.settings, ctx.settings.fused
        (x, scale_in, h, qkv_NJD, q, k, v, attended, lse, middle, scale_post, h_post, gate, up, inner, cos, sin, plan,
         norm_in, norm_post, q_norm, k_norm, w_out, w_gate, w_up, w_down) = ctx.saved_tensors  # fmt: skip
        to_out = grads[0].contiguous()
        to_down = to_out.T @ inner
        to_gate, to_up = layer_kernels.gate_backward(gate, up, to_out @ w_down)
        to_w_gate, to_w_up = to_gate.T @ h_post, to_up.T @ h_post
        to_h = (to_gate @ w_gate).addmm_(to_up, w_up)
        del to_gate, to_up  # the largest tensors
        to_middle, to_norm_post = layer_kernels.norm_backward(middle, norm_post, scale_post, to_h)
        to_middle.add_(to_out)
        to_attended = (to_middle @ w_out).view(attended.shape)
        to_w_out = to_middle.T @ attended.flatten(1)
        plan_sizes, *limits = settings.attention
        to_heads = tree_kernels.backward(q, k, v, plan, plan_sizes, attended, to_attended, lse, *limits)
        to_qkv, to_head_norms = layer_kernels.rotated_heads_backward(
            *to_heads, qkv_NJD, q_norm, k_norm, cos, sin, settings.head_epsilon
        )
        to_qkv = to_qkv.flatten(1)
        sizes = [len(weight) for weight in fused.weights]
        to_projections = [*(to_qkv.T @ h).split(sizes), *(to_qkv.sum(0).split(sizes) if fused.biases else ())]
        to_x, to_norm_in = layer_kernels.norm_backward(x, norm_in, scale_in, to_qkv @ fused.weight)
        to_x.add_(to_middle)
        return (
            None, to_x, None, None, None, to_norm_in, to_norm_post, *to_head_norms, to_w_out, to_w_gate, to_w_up,
            to_down, *to_projections,
        )  # fmt: skip
