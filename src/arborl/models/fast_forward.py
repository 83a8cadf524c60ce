"""Forward pass of Llama and related models with a third of the library's operations, over the model's own modules.

It compiles well and saves small models most of their time. The learner uses it; the engine has a form with a KV cache
(`engines/local/fused_forward.py`). A model's layers are compared with the library's at first use (`path_check.py`); a
model that does not match, or of another class, runs by the library's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from arborl.models.attention import AttentionFunction, AttentionLimits, CausalAttention
from arborl.models.execution_paths import FastPath, first_line, report_fallback
from arborl.models.fused_linear import FUSED_ATTRIBUTE, fuse_linear, lora_linear
from arborl.models.path_check import LayerCase, RunLayer, check_layers, sample_tokens

FAST_MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LIMITS_ATTRIBUTE = "_limits"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
CHECK_TOKENS = 40  # tokens of the comparison with the library

HeadNorms = tuple[nn.Module, nn.Module]
"""Norms of queries and keys."""
RunLayers = Callable[[Sequence[Any], Tensor, Tensor, Tensor, AttentionFunction], Tensor]
"""Runs layers: their modules, the input, cosines and sines of the positions, and attention."""

_is_fast: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


class LayerFunctions(NamedTuple):
    """Replacements of a layer's operations between its matrix products."""

    heads: Callable[[Tensor, HeadNorms | None, int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """As `rotated_heads`."""
    gated: Callable[[nn.Module, Tensor, Tensor], Tensor]
    norm: Callable[[nn.Module, Tensor], Tensor]


def has_fast_forward(model: PreTrainedModel) -> bool:
    """Whether this module runs the model; compared with the library at the first call."""
    if model not in _is_fast:
        _is_fast[model] = type(model).__name__ in FAST_MODEL_CLASSES and _matches_library(model)
    return _is_fast[model]


@torch.no_grad()
def _matches_library(model: PreTrainedModel) -> bool:
    attend, tokens = CausalAttention(), sample_tokens(model, CHECK_TOKENS)
    try:
        reason = check_layers(model, layer_runner, attend, attend, tokens, range(CHECK_TOKENS))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a patched library may fail in any way
        reason = first_line(error)
    if reason is not None:
        report_fallback(model, FastPath.TRAINING_LAYERS, reason)
    return reason is None


def layer_runner(case: LayerCase, ops: LayerFunctions | None = None) -> RunLayer:
    prepare(case.layer)
    cos, sin = case.cos[:, None], signed_sin(case.sin)[:, None]
    return lambda x_NE, attend: run_layer(case.layer, x_NE, cos, sin, attend, ops=ops)


def use_library_forward(model: PreTrainedModel) -> None:
    """Run the model by the library's code from now on: sharding hooks into its modules. Fused weights are released,
    because they would keep memory of parameters that were moved."""
    _is_fast[model] = False
    for module in model.modules():
        module.__dict__.pop(FUSED_ATTRIBUTE, None)


def fast_hidden_states(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    attend: AttentionFunction,
    run: RunLayers | None = None,
    rows: Tensor | None = None,
    ops: LayerFunctions | None = None,
) -> Tensor:
    """Hidden states after the final norm, `[N, E]`; N tokens, E model size."""
    base = model.base_model
    x_NE = base.embed_tokens(tokens)
    cos, sin = (part[0, :, None] for part in base.rotary_emb(x_NE[None], positions[None]))
    sin = signed_sin(sin)
    layers = list(base.layers)
    for layer in layers:
        prepare(layer)
    each, final_norm = partial(run_layers, ops=ops), norm if ops is None else ops.norm
    if run is not None or rows is None:
        x_NE = (run or each)(layers, x_NE, cos, sin, attend)
        return final_norm(base.norm, x_NE if rows is None else x_NE.index_select(0, rows))
    x_NE = each(layers[:-1], x_NE, cos, sin, attend)
    return final_norm(base.norm, run_layer(layers[-1], x_NE, cos, sin, attend, rows, ops))


def prepare(layer: Any) -> None:
    fuse_linear(layer.self_attn, *QKV)
    layer.self_attn.__dict__[LIMITS_ATTRIBUTE] = attention_limits(layer.self_attn)


def run_layers(
    layers: Sequence[Any],
    x_NE: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: AttentionFunction,
    ops: LayerFunctions | None = None,
) -> Tensor:
    for layer in layers:
        x_NE = run_layer(layer, x_NE, cos, sin, attend, ops=ops)
    return x_NE


def run_layer(
    layer: Any,
    x_NE: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: AttentionFunction,
    rows: Tensor | None = None,
    ops: LayerFunctions | None = None,
) -> Tensor:
    """Output of a layer; behind attention at `rows` only. Attention gets layer number 0: a different number would be
    compiled in for every layer. Gate and up stay separate, because concatenating their gradients costs more than one
    product saves."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, gate, normed = (rotated_heads, gated_activation, norm) if ops is None else ops
    fused = getattr(attention, FUSED_ATTRIBUTE)
    qkv = fused(normed(layer.input_layernorm, x_NE)).unflatten(-1, (-1, attention.head_dim))
    head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    q, k, v = heads(qkv, head_norms, qkv.shape[1] // (attention.num_key_value_groups + 2), cos, sin)
    attended = attend(0, q, k, v, attention.scaling, getattr(attention, LIMITS_ATTRIBUTE)).flatten(1)
    if rows is not None:
        x_NE, attended = x_NE.index_select(0, rows), attended.index_select(0, rows)
    x_NE = x_NE + lora_linear(attention.o_proj, attended)
    h_NE = normed(layer.post_attention_layernorm, x_NE)
    inner = gate(mlp.act_fn, lora_linear(mlp.gate_proj, h_NE), lora_linear(mlp.up_proj, h_NE))
    return x_NE + lora_linear(mlp.down_proj, inner)


def attention_limits(attention: Any) -> AttentionLimits:
    source = attention if hasattr(attention, "sliding_window") else attention.config
    return AttentionLimits(getattr(source, "sliding_window", None))


def norm(module: nn.Module, x: Tensor) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return rms_norm(x, weight.shape, weight, epsilon(module))


def epsilon(module: nn.Module) -> float:
    """Epsilon of a norm; the library has two names for it."""
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)  # type: ignore[arg-type]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


def rotated_heads(
    qkv_NJD: Tensor,
    head_norms: HeadNorms | None,
    key_heads: int,
    cos: Tensor,
    signed_sin: Tensor,
    fused_norm: Callable[[nn.Module, Tensor], Tensor] | None = None,
    fused_rotate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of a joined projection, after their norms (if any) and the rotary embedding; values. Norm and
    rotation are torch's unless others are given."""
    heads = qkv_NJD.shape[1] - 2 * key_heads
    qk, v = qkv_NJD.split([heads + key_heads, key_heads], dim=1)
    if head_norms is not None:
        q, k = qk.split([heads, key_heads], dim=1)
        qk = torch.cat([(fused_norm or norm)(*given) for given in zip(head_norms, (q, k), strict=True)], dim=1)
    q, k = (fused_rotate or rotate)(qk, cos, signed_sin).split([heads, key_heads], dim=1)
    return q, k, v


def gated_activation(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = act(gate) * up
    return out


def signed_sin(sin: Tensor) -> Tensor:
    """Sines with the signs for rotation by halves: negative in the first half."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
