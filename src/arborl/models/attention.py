"""One hook into every Hugging Face causal language model: who attends to whom is decided by the caller.

Models run on flat, unpadded rows of tokens (`[1, N]`). At each layer the hook hands queries, keys and values to the
`Attend` object of the call: the learner's knows trees, the engine's knows caches. Weights and modules stay unmodified.
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

NAME = "arbor"


class Bounds(NamedTuple):
    """What a layer's attention is held within."""

    window: int | None = None
    """A token sees itself and those before it that are fewer positions away than this; without one, all."""
    cap: float | None = None
    """What scores are softly held below."""


FREE = Bounds()


class Attend(Protocol):
    """Attention for one forward pass. N tokens, H query heads, K key heads (H a multiple of K), D head size."""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        """The attended values, `[N, H, D]`."""
        ...


def _hook(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    if given.get("s_aux") is not None:
        raise ValueError("its attention has sinks (s_aux)")
    if "attend" not in given:
        raise ValueError("its layers do not pass on what attention is to be given")
    attend: Attend = given["attend"]
    window = given["sliding_window"] if "sliding_window" in given else getattr(module, "sliding_window", None)
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = Bounds(window, given.get("softcap"))
    out = attend(int(module.layer_idx), q_NHD, k_NKD, v_NKD, scaling, bounds)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _hook)


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
        mask: true where a query sees a key, or numbers to be added to the scores.
        causal: in place of a mask, where queries and keys are the same tokens.
        cap: what scores are softly held below; the fused kernels cannot.
    """
    shared = q.shape[1] != k.shape[1]
    if cap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared)
    if shared:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    score = torch.tanh(q @ k.transpose(-1, -2) * (scale / cap)) * cap
    if causal:
        mask = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).tril()
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
    weight = torch.softmax(score, -1, dtype=torch.promote_types(score.dtype, torch.float32))
    return weight.to(v.dtype) @ v


class Causal:
    """Plain attention over one short sequence, for checks."""

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NKD, v_NKD))
        sees = torch.ones(len(q_NHD), len(q_NHD), dtype=torch.bool, device=q.device).tril()
        if bounds.window is not None:
            sees = sees.triu(1 - bounds.window)
        return attention(q, k, v, scale, sees, cap=bounds.cap)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model's layers hand to attention."""

    layers: int
    heads: int
    key_heads: int
    size: int
    """Of a head."""
    windows: tuple[int, ...]
    """All that occur, each once."""
    capped: bool

    def plain(self, context: int) -> bool:
        """Whether attention is plain for contexts of that length: no window is shorter, and no score is capped."""
        return not self.capped and all(window >= context for window in self.windows)


class _Recorder(Causal):
    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, ...]] = {}
        self.windows: set[int] = set()
        self.capped = False

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float, bounds: Bounds = FREE
    ) -> Tensor:
        self.seen[layer] = (*q_NHD.shape[1:], *k_NKD.shape[1:], *v_NKD.shape[1:])
        self.windows |= set() if bounds.window is None else {bounds.window}
        self.capped |= bounds.cap is not None
        return super().__call__(layer, q_NHD, k_NKD, v_NKD, scale, bounds)


_layouts: WeakKeyDictionary[PreTrainedModel, Layout] = WeakKeyDictionary()


def layout(model: PreTrainedModel) -> Layout:
    """What this model's layers are, found by running one token through it the first time; ValueError where a cache or a
    tree cannot be made of them."""
    if model not in _layouts:
        recorder = _Recorder()
        with torch.no_grad():
            one = torch.zeros(1, dtype=torch.long, device=model.device)
            library_hidden_states(model, one, one, recorder)
        shapes = set(recorder.seen.values())
        if set(recorder.seen) != set(range(model.config.get_text_config().num_hidden_layers)):
            raise ValueError("not all of its layers are attention that can be taken over")
        heads, size, key_heads, *rest = shapes.pop()
        if shapes or rest != [size, key_heads, size]:
            raise ValueError("its layers' keys and values are not all of one size")
        windows = tuple(sorted(recorder.windows))
        _layouts[model] = Layout(len(recorder.seen), heads, key_heads, size, windows, recorder.capped)
    return _layouts[model]


def use_hook(model: PreTrainedModel) -> None:
    """Have the model's layers hand queries, keys and values to the `Attend` object of a call."""
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def library_hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """The last layer's output for each token, `[N, hidden]`, by the library's own code."""
    use_hook(model)
    out = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, attend=attend)
    return out.last_hidden_state[0]


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Next-token logits in float32 (float64 stays) for rows of hidden states."""
    return read_out(model.get_output_embeddings(), logit_cap(model), hidden)


def read_out(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    """The same for a head by itself."""
    out = raw_read_out(head, cap, hidden)
    return out if out.dtype == torch.float64 else out.float()


def raw_read_out(head: nn.Module, cap: float | None, hidden: Tensor) -> Tensor:
    """The same in the precision the head gives, where nothing caps it."""
    out: Tensor = head(hidden)
    if cap is None:
        return out
    out = out if out.dtype == torch.float64 else out.float()
    return torch.tanh(out / cap) * cap


def logit_cap(model: PreTrainedModel) -> float | None:
    """What the model's logits are softly held below, if anything."""
    return getattr(model.config, "final_logit_softcapping", None)
