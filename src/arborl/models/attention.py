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

ATTENTION_NAME = "arbor"
"""Name of the hook in transformers' table of attention implementations."""


class AttentionLimits(NamedTuple):
    """Limits of a layer's attention."""

    window: int | None = None
    """A token sees itself and the tokens less than this many positions before it; all without a window."""
    cap: float | None = None
    """Soft cap of the scores: `cap * tanh(score / cap)`."""


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
    """Attention with torch, `[rows, heads, tokens, size]`.

    Args:
        mask: true where a query sees a key, or numbers to add to the scores.
        causal: a causal mask, for equal queries and keys.
        cap: soft cap of the scores, which fused kernels do not support.
    """
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
    """Causal attention over one short sequence, for checks."""

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
    """Shape of a model's attention."""

    layers: int
    heads: int
    key_heads: int
    size: int
    """Head size."""
    windows: tuple[int, ...]
    """All window sizes that occur."""
    capped: bool

    def is_plain(self, context: int) -> bool:
        """Whether attention has no limits for contexts of that length."""
        return not self.capped and all(window >= context for window in self.windows)


class _LayoutRecorder(CausalAttention):
    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.windows: set[int] = set()
        self.capped = False

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, limits: AttentionLimits = NO_LIMITS
    ) -> Tensor:
        self.shapes[layer] = (*q_NHD.shape[1:], *k_NKD.shape[1:], *v_NKD.shape[1:])
        self.windows |= set() if limits.window is None else {limits.window}
        self.capped |= limits.cap is not None
        return super().__call__(layer, q_NHD, k_NKD, v_NKD, scale, limits)


_layouts: WeakKeyDictionary[PreTrainedModel, AttentionLayout] = WeakKeyDictionary()


def attention_layout(model: PreTrainedModel) -> AttentionLayout:
    """The model's layout, found at the first call by running one token; ValueError if its layers cannot use caches and
    token trees."""
    if model not in _layouts:
        recorder = _LayoutRecorder()
        with torch.no_grad():
            zero = torch.zeros(1, dtype=torch.long, device=model.device)
            library_hidden_states(model, zero, zero, recorder)
        shapes = set(recorder.shapes.values())
        if set(recorder.shapes) != set(range(model.config.get_text_config().num_hidden_layers)):
            raise ValueError("not all of its layers use attention that can be replaced")
        heads, size, key_heads, *rest = shapes.pop()
        if shapes or rest != [size, key_heads, size]:
            raise ValueError("its layers' keys and values are not all of one size")
        windows = tuple(sorted(recorder.windows))
        _layouts[model] = AttentionLayout(len(recorder.shapes), heads, key_heads, size, windows, recorder.capped)
    return _layouts[model]


def use_attention_hook(model: PreTrainedModel) -> None:
    """Make the model's layers call the `AttentionFunction` of a forward pass."""
    if model.config._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)


def library_hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: AttentionFunction
) -> Tensor:
    """Hidden states of the last layer, `[N, hidden]`, by the library's code."""
    use_attention_hook(model)
    out = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Next-token logits of hidden states, in float32 or float64."""
    return head_logits(model.get_output_embeddings(), logit_cap(model), hidden)


def head_logits(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    """Logits of a head, in float32 or float64."""
    out = raw_head_logits(head, cap, hidden)
    return out if out.dtype == torch.float64 else out.float()


def raw_head_logits(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    """Logits of a head, in its precision if there is no cap."""
    out: Tensor = head(hidden)
    if cap is None:
        return out
    out = out if out.dtype == torch.float64 else out.float()
    return torch.tanh(out / cap) * cap


def logit_cap(model: PreTrainedModel) -> float | None:
    """Soft cap of the model's logits, if any."""
    return getattr(model.config, "final_logit_softcapping", None)
