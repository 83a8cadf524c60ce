"""Heads beside the language model's own: what a state is worth, and next-token logits in full precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """One number from a hidden state. It starts at 0 everywhere, or at the weights given, in float32 or the model's
    precision where finer."""

    def __init__(self, model: PreTrainedModel, weight: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        size = model.get_output_embeddings().weight.shape[-1]
        self.weight = nn.Parameter(torch.zeros(1, int(size), dtype=dtype, device=model.device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=model.device))
        with torch.no_grad():
            for own, given in ((self.weight, weight), (self.bias, bias)):
                if given is not None:
                    own.copy_(given)

    def forward(self, hidden_ME: Tensor) -> Tensor:
        return linear(hidden_ME.to(self.weight.dtype), self.weight, self.bias)[:, 0].clone()  # hooks want no view


class Float32Linear(nn.Linear):
    """The same weights, multiplied in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def float32_head(model: PreTrainedModel) -> None:
    """Have the model's logits computed in float32 from now on, by engine and learner alike; names and ties stay."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"the output head is a {type(head).__name__} and not a plain linear layer")
    if head.weight.dtype in (torch.bfloat16, torch.float16):
        head.__class__ = Float32Linear
