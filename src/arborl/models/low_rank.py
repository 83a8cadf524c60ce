"""A linear layer under an adapter, differentiated: what it keeps for its gradient is its input, once and as it came.

peft's own module casts the input to the factors' float32 for each layer that reads it, and keeps every copy; its layers
would take twice the memory of layers without adapters. Here the factors are rounded to the model's precision instead,
as the engine rounds them (`adapted.py`), so rollout and learner compute the same thing, and their gradients are those
of the float32 factors.

N tokens, E inputs, F outputs, R rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from arborl.models.lora import factors_of


def through(module: nn.Module, x_NE: Tensor) -> Tensor:
    """The module's output: with its adapter as below where it is plain and drops nothing, else by the module itself."""
    found = factors_of(module)
    if found is None or _drops(module) or module.base_layer.weight.requires_grad:  # type: ignore[union-attr]
        out: Tensor = module(x_NE)
        return out
    base: Any = module.base_layer
    return _LowRank.apply(x_NE, base.weight, base.bias, *found)


def _drops(module: nn.Module) -> bool:
    dropouts: Any = module.lora_dropout
    return any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in dropouts.values())


class _LowRank(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, weight_FE: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: float
    ) -> Tensor:
        first_RE, second_FR = first.to(x_NE.dtype), (second * scale).to(x_NE.dtype)
        low_NR = linear(x_NE, first_RE)
        ctx.save_for_backward(x_NE, weight_FE, first_RE, second_FR, low_NR)
        ctx.scale, ctx.kinds = scale, (first.dtype, second.dtype)
        return linear(x_NE, weight_FE, bias).addmm_(low_NR, second_FR.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (to_out_NF,) = gradients
        x_NE, weight_FE, first_RE, second_FR, low_NR = ctx.saved_tensors
        to_low_NR = to_out_NF @ second_FR
        to_x_NE = (to_out_NF @ weight_FE).addmm_(to_low_NR, first_RE) if ctx.needs_input_grad[0] else None
        to_first = (to_low_NR.T @ x_NE).to(ctx.kinds[0])
        to_second = (to_out_NF.T @ low_NR).to(ctx.kinds[1]) * ctx.scale
        return to_x_NE, None, None, to_first, to_second, None
