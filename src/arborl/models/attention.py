"""One hook into every Hugging Face causal language model: who attends to whom is decided by the caller.

Models run on flat, unpadded rows of tokens (`[1, N]`). At each layer the hook hands queries, keys and values to the
`Attend` object of the call: the learner's knows trees, the engine's knows caches. Weights and modules stay unmodified.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "arbor"


class Attend(Protocol):
    """Attention for one forward pass. N tokens, H query heads, K key heads (H a multiple of K), D head size."""

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        """The attended values, `[N, H, D]`."""
        ...


def _hook(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    for feature in ("sliding_window", "softcap", "s_aux"):
        if given.get(feature) is not None:
            raise ValueError(f"this model's attention uses {feature}, which is not supported")
    attend: Attend = given["attend"]
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(int(module.layer_idx), q_NHD, k_NKD, v_NKD, scaling)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _hook)


def library_hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """The last layer's output for each token, `[N, hidden]`, by the library's own code."""
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
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
