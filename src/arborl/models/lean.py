"""The forward pass of Llama and its relatives in few operations, over the model's own modules.

The library's code is written for every use. This is the same computation with a third of the operations, which
compiles well and spares small models most of their time. The learner uses it; the engine has its own form of it, over a
cache (`engines/forward.py`). The first time a model comes here its layers are checked against the library's
(`path_check.py`); a model for which they differ, or of a kind not listed, keeps the library's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from arborl.models.attention import Attend, Bounds, Causal
from arborl.models.fallbacks import FastPath, first_line, report_fallback
from arborl.models.joined import NAME as JOINED
from arborl.models.joined import joined
from arborl.models.low_rank import through
from arborl.models.path_check import LayerCase, RunLayer, check_layers, sample_tokens

KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BOUNDS = "_bounds"
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
CHECKED = 40
"""Tokens that a model is checked on."""

Run = Callable[[Sequence[Any], Tensor, Tensor, Tensor, Attend], Tensor]
"""Runs some layers: their modules, what comes in, cosines and sines of the positions, and attention."""

_trusted: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def is_lean(model: PreTrainedModel) -> bool:
    """Whether this model goes the lean way; decided by a comparison the first time."""
    if model not in _trusted:
        _trusted[model] = type(model).__name__ in KINDS and _is_right(model)
    return _trusted[model]


@torch.no_grad()
def _is_right(model: PreTrainedModel) -> bool:
    try:
        why = check_layers(model, layer_runner, Causal(), Causal(), sample_tokens(model, CHECKED), range(CHECKED))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # code of others, which may have been changed in any way
        why = first_line(error)
    if why is not None:
        report_fallback(model, FastPath.TRAINING_LAYERS, why)
    return why is None


def layer_runner(case: LayerCase, ops: Ops | None = None) -> RunLayer:
    """A layer run by this code, for checks."""
    prepare(case.layer)
    cos, sin = case.cos[:, None], signed(case.sin)[:, None]
    return lambda x_NE, attend: one_layer(case.layer, x_NE, cos, sin, attend, ops=ops)


def leave_to_library(model: PreTrainedModel) -> None:
    """From now on the library's own code runs this model: whoever shards it hooks into its modules' calls. What was
    joined of its weights is let go: it would keep their memory when they have gone elsewhere."""
    _trusted[model] = False
    for module in model.modules():
        module.__dict__.pop(JOINED, None)


def lean(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    run: Run | None = None,
    wanted: Tensor | None = None,
    ops: Ops | None = None,
) -> Tensor:
    """The last layer's output for each token, `[N, E]`; N tokens, E model size.

    `run` runs the layers in place of `in_turn`: the same computation compiled, or recomputed when a gradient is due.
    `ops` are other forms of the operations between products, where there is no `run`.
    `wanted` are the rows to give, where not all are: after its attention, the last layer need not run at the others.
    """
    base = model.base_model
    x_NE = base.embed_tokens(tokens)
    cos, sin = (part[0, :, None] for part in base.rotary_emb(x_NE[None], positions[None]))
    sin = signed(sin)
    layers = list(base.layers)
    for layer in layers:
        prepare(layer)
    each, last = partial(in_turn, ops=ops), norm if ops is None else ops.norm
    if run is not None or wanted is None:
        x_NE = (run or each)(layers, x_NE, cos, sin, attend)
        return last(base.norm, x_NE if wanted is None else x_NE.index_select(0, wanted))
    x_NE = each(layers[:-1], x_NE, cos, sin, attend)
    return last(base.norm, one_layer(layers[-1], x_NE, cos, sin, attend, wanted, ops))


def prepare(layer: Any) -> None:
    """Join the products of a layer that read the same input, and note the bounds of its attention."""
    joined(layer.self_attn, *QKV)
    layer.self_attn.__dict__[BOUNDS] = bounds_of(layer.self_attn)


class Ops(NamedTuple):
    """What a layer computes between its products, in forms of one's own."""

    turn: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated: Callable[[nn.Module, Tensor, Tensor], Tensor]
    norm: Callable[[nn.Module, Tensor], Tensor]


def in_turn(
    layers: Sequence[Any], x_NE: Tensor, cos: Tensor, sin: Tensor, attend: Attend, ops: Ops | None = None
) -> Tensor:
    """One layer after the other."""
    for layer in layers:
        x_NE = one_layer(layer, x_NE, cos, sin, attend, ops=ops)
    return x_NE


def one_layer(
    layer: Any,
    x_NE: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    wanted: Tensor | None = None,
    ops: Ops | None = None,
) -> Tensor:
    """H query heads, K key heads, D head size. Attention is not told the layer's number: it would be compiled in, and
    every layer compiled anew. What follows attention is computed at the `wanted` tokens only. Gate and up stay apart:
    their gradients would have to be put side by side first, which costs more than one product saves."""
    attention, mlp = layer.self_attn, layer.mlp
    turned, gate, normed = (turn, gated, norm) if ops is None else ops
    qkv = getattr(attention, JOINED)(normed(layer.input_layernorm, x_NE)).unflatten(-1, (-1, attention.head_dim))
    keys = qkv.shape[1] // (attention.num_key_value_groups + 2)
    heads = qkv.shape[1] - 2 * keys
    both, v = qkv.split([heads + keys, keys], dim=1)
    if hasattr(attention, "q_norm"):
        q, k = both.split([heads, keys], dim=1)
        both = torch.cat([normed(attention.q_norm, q), normed(attention.k_norm, k)], dim=1)
    q, k = turned(both, cos, sin).split([heads, keys], dim=1)
    seen = attend(0, q, k, v, attention.scaling, getattr(attention, BOUNDS)).flatten(1)
    if wanted is not None:
        x_NE, seen = x_NE.index_select(0, wanted), seen.index_select(0, wanted)
    x_NE = x_NE + through(attention.o_proj, seen)
    h_NE = normed(layer.post_attention_layernorm, x_NE)
    inner = gate(mlp.act_fn, through(mlp.gate_proj, h_NE), through(mlp.up_proj, h_NE))
    return x_NE + through(mlp.down_proj, inner)


def bounds_of(attention: Any) -> Bounds:
    """What this attention is held within: some kinds say it of each layer, some of the whole model."""
    own = attention if hasattr(attention, "sliding_window") else attention.config
    return Bounds(getattr(own, "sliding_window", None))


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """Root-mean-square norm with the module's weight."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return rms_norm(x, weight.shape, weight, epsilon(module))


def epsilon(module: nn.Module) -> float:
    """What the norm adds under the root; the library has two names for it."""
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)  # type: ignore[arg-type]


def turn(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary position embedding: halves, not pairs."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


def gated(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """What goes on to the last product of a layer."""
    out: Tensor = act(gate) * up
    return out


def signed(sin: Tensor) -> Tensor:
    """With the sign that turning by halves gives them: minus in the first half."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
