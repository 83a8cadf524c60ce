"""One hook into every Hugging Face causal language model: the caller decides which tokens attend to which.

Models run on flat, unpadded rows of tokens (`[1, N]`). At each layer the hook passes queries, keys and values to the
`AttentionFunction` of the call: the learner's knows token trees, the engine's KV caches. Weights and modules stay
unmodified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "arbor"  # name of the hook in transformers' table of attention implementations


class AttentionLimits(NamedTuple):
    window: int | None = None
    """A token sees itself and the tokens less than this many positions before it; all without a window."""
    cap: float | None = None  # soft cap of the scores: `cap * tanh(score / cap)`


NO_LIMITS = AttentionLimits()


class AttentionFunction(Protocol):
    """Attention of one forward pass. N tokens, H query heads, K key heads (H a multiple of K), D head size."""

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        scale: float,
        limits: AttentionLimits = NO_LIMITS,
        /,
    ) -> Tensor:
        """The attended values, `[N, H, D]`."""
        ...


def _hook(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    if options.get("s_aux") is not None:
        raise ValueError("its attention has sinks (s_aux)")
    if "attend" not in options:
        raise ValueError("its layers do not pass keyword arguments on to attention")
    attend: AttentionFunction = options["attend"]
    window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    limits = AttentionLimits(window, options.get("softcap"))
    out = attend(int(module.layer_idx), q_NHD, k_NKD, v_NKD, scaling, limits)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _hook)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    cap: float | None = None,
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if cap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    score = torch.tanh(q @ k.transpose(-1, -2) * (scale / cap)) * cap
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
    weight = torch.softmax(score, -1, dtype=torch.promote_types(score.dtype, torch.float32))
    return weight.to(v.dtype) @ v


class CausalAttention:
    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NKD, v_NKD))
        mask = torch.ones(len(q_NHD), len(q_NHD), dtype=torch.bool, device=q.device).tril()
        if limits.window is not None:
            mask = mask.triu(1 - limits.window)
        return attention(q, k, v, scale, mask, cap=limits.cap)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    layers: int
    heads: int
    key_heads: int
    size: int  # head size
    windows: tuple[int, ...]  # all window sizes that occur
    capped: bool

    def is_plain(self, context: int) -> bool:
        """Whether attention has no limits for contexts of that length."""
        return not self.capped and all(window >= context for window in self.windows)


class InputRecorder:
    """Attention that records the inputs of every layer."""

    def __init__(self, attend: AttentionFunction):
        self.attend = attend
        self.inputs: dict[int, tuple[list[Tensor], float, AttentionLimits]] = {}

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        self.inputs[layer] = ([q_NHD, k_NKD, v_NKD], scale, limits)
        return self.attend(layer, q_NHD, k_NKD, v_NKD, scale, limits)


_layouts: WeakKeyDictionary[PreTrainedModel, AttentionLayout] = WeakKeyDictionary()


def attention_layout(model: PreTrainedModel) -> AttentionLayout:
    """The model's layout, found at the first call by running one token; ValueError if its layers cannot use caches and
    token trees."""
    if model not in _layouts:
        recorder = InputRecorder(CausalAttention())
        with torch.no_grad():
            zero = torch.zeros(1, dtype=torch.long, device=model.device)
            library_hidden_states(model, zero, zero, recorder)
        if set(recorder.inputs) != set(range(model.config.get_text_config().num_hidden_layers)):
            raise ValueError("not all of its layers use attention that can be replaced")
        shapes = {tuple(size for x in qkv for size in x.shape[1:]) for qkv, _, _ in recorder.inputs.values()}
        heads, size, key_heads, *rest = shapes.pop()
        if shapes or rest != [size, key_heads, size]:
            raise ValueError("its layers' keys and values are not all of one size")
        limits = [limits for _, _, limits in recorder.inputs.values()]
        windows = tuple(sorted({window for window, _ in limits if window is not None}))
        capped = any(cap is not None for _, cap in limits)
        _layouts[model] = AttentionLayout(len(recorder.inputs), heads, key_heads, size, windows, capped)
    return _layouts[model]


def use_attention_hook(model: PreTrainedModel) -> None:
    """Make the model's layers call the `AttentionFunction` of a forward pass."""
    if model.config._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)


def library_hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: AttentionFunction
) -> Tensor:
    use_attention_hook(model)
    out = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    return head_logits(model.get_output_embeddings(), logit_cap(model), hidden)


def head_logits(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    out = raw_head_logits(head, cap, hidden)
    return out if out.dtype == torch.float64 else out.float()


def raw_head_logits(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    out: Tensor = head(hidden)
    if cap is None:
        return out
    out = out if out.dtype == torch.float64 else out.float()
    return torch.tanh(out / cap) * cap


def logit_cap(model: PreTrainedModel) -> float | None:
    return getattr(model.config, "final_logit_softcapping", None)
