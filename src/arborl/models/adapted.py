"""Linear layers under adapters, run as two products: for sampling, where nothing is differentiated.

The first factors of the layers that read one input stand below these layers' weights in one matrix, so what goes into
the second factors comes out of the layers' own product, in its last columns. The second factors stand block by block in
another matrix, whose product is added in place. The layers' weights are views of the one matrix, as in `joined.py`; the
factors are copies in the model's precision, taken again at every `refresh`: what a recorded graph binds never moves.

N tokens, E inputs, F outputs of all layers, R ranks of all adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from arborl.models.joined import Joined, joined, lies_in
from arborl.models.lora import factors_of

ALIGNED = 16
"""R is a multiple of this, by zeros: rows of the output then begin where wide loads want them to."""


class Place(NamedTuple):
    """Where one layer's factors go."""

    module: nn.Module
    ranks: slice
    columns: slice


class Adapted:
    """Some layers as one, of which some have adapters that `factors_of` knows."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = list(modules)
        bases = [base_of(module) for module in modules]
        self.weights, self.biases = [b.weight for b in bases], [b.bias for b in bases if b.bias is not None]
        self.places: list[Place] = []
        rank = column = 0
        for module, base in zip(modules, bases, strict=True):
            if (found := factors_of(module)) is not None:
                columns = slice(column, column + base.out_features)
                self.places.append(Place(module, slice(rank, rank + len(found.first)), columns))
                rank += len(found.first)
            column += base.out_features
        self.width, self.ranks = column, -(-rank // ALIGNED) * ALIGNED
        with torch.inference_mode(False), torch.no_grad():
            self.weight = self._with_room(self.weights)
            self.bias = self._with_room(self.biases) if self.biases else None
            self.second = self.weight.new_zeros(self.ranks, column)
        self.refresh()

    def _with_room(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one below the other, each now a view of the whole, and zeros for the first factors."""
        whole = torch.cat([*(p.data for p in parts), parts[0].data.new_zeros(self.ranks, *parts[0].shape[1:])])
        for p, view in zip(parts, whole[: self.width].split([len(p) for p in parts]), strict=True):
            p.data = view
        return whole

    @property
    def moved(self) -> bool:
        """Whether a layer's own parameter has been given other memory since, or an adapter is no longer what it was."""
        if any(factors_of(place.module) is None for place in self.places):
            return True
        return not (lies_in(self.weight, self.weights) and lies_in(self.bias, self.biases))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the factors as they are now, scaled."""
        first_RE = self.weight[self.width :]
        for module, ranks, columns in self.places:
            found = factors_of(module)
            assert found is not None
            first_RE[ranks].copy_(found.first)
            self.second[ranks, columns].copy_((found.second * found.scale).T)

    def __call__(self, x_NE: Tensor) -> Tensor:
        """Their outputs side by side, `[N, F]`: the first columns of wider rows."""
        both = linear(x_NE, self.weight, self.bias)
        out_NF, low_NR = both.split([self.width, self.ranks], dim=-1)
        return out_NF.addmm_(low_NR, self.second)


def base_of(module: nn.Module) -> nn.Linear:
    """The layer itself, without its adapter."""
    base: nn.Linear = module if isinstance(module, nn.Linear) else module.base_layer  # type: ignore[assignment]
    return base


_made: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Adapted]] = WeakKeyDictionary()


def product(owner: nn.Module, *names: str) -> Joined | Adapted | nn.Module:
    """These layers of a module, which read the same input, as few products as may be: `Adapted` where there are
    adapters of the known form, else as `joined` has them, and one layer as it is."""
    modules = [getattr(owner, name) for name in names]
    if not _known(modules):
        return joined(owner, *names) if len(names) > 1 else modules[0]
    made = _made.setdefault(owner, {})
    found = made.get(names)
    if found is None or found.modules != modules or found.moved:
        found = made[names] = Adapted(modules)
    return found


def _known(modules: Sequence[nn.Module]) -> bool:
    adapters = [factors_of(module) for module in modules]
    plain = [type(m) is nn.Linear for m, adapter in zip(modules, adapters, strict=True) if adapter is None]
    if not any(adapters) or not all(plain):
        return False
    bases = [base_of(module) for module in modules]
    return len({base.bias is None for base in bases}) == 1 and len({base.weight.dtype for base in bases}) == 1
