"""Linear layers that read the same input, run as one product.

Their weights become views of one matrix: still the model's parameters, trained in place, and there is no copy. A large
product is quicker than three small ones, and on a GPU every call saved is time of the host saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from arborl.models.low_rank import through

NAME = "_joined"


class Joined:
    """Some layers as one; each by itself where they are not plain, such as under an adapter."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = list(modules)
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        plain = [m for m in modules if type(m) is nn.Linear]
        if len(plain) == len(modules) and len({m.bias is None for m in plain}) == 1:
            self.weights = [m.weight for m in plain]
            self.biases = [m.bias for m in plain if m.bias is not None]
        self.weight, self.bias = _join(self.weights), _join(self.biases)

    @property
    def moved(self) -> bool:
        """Whether a parameter has been given other memory since."""
        return not (lies_in(self.weight, self.weights) and lies_in(self.bias, self.biases))

    def __call__(self, x: Tensor) -> Tensor:
        """Their outputs side by side."""
        if self.weight is None:
            return torch.cat([through(module, x) for module in self.modules], dim=-1)
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled():
            weight = _AsOne.apply(weight, *self.weights)
            bias = bias if bias is None else _AsOne.apply(bias, *self.biases)
        return linear(x, weight, bias)


def joined(owner: nn.Module, *names: str) -> Joined:
    """These layers of a module as one; made at the first call, and again when they have changed."""
    modules = [getattr(owner, name) for name in names]
    found: Joined | None = owner.__dict__.get(NAME)
    if found is None or found.modules != modules or found.moved:
        found = owner.__dict__[NAME] = Joined(modules)
    return found


def _join(parameters: Sequence[Tensor]) -> Tensor | None:
    """One tensor that the parameters become parts of. It is a parameter too: of those the compiler knows that their
    size never changes."""
    if not parameters:
        return None
    with torch.inference_mode(False), torch.no_grad():
        whole = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=False)
        for p, view in zip(parameters, whole.data.split([len(p) for p in parameters]), strict=True):
            p.data = view
    return whole


def lies_in(whole: Tensor | None, parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are still the parts of the whole, one after the other."""
    place = 0 if whole is None else whole.data_ptr()
    for p in parameters:
        if p.data_ptr() != place:
            return False
        place += p.nbytes
    return True


class _AsOne(torch.autograd.Function):
    """The whole that some parameters are the parts of; its gradient's parts are theirs."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients[0].split(ctx.sizes)
