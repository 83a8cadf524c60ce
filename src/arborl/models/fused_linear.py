"""Linear layers fused to fewer matrix products: layers of the same input, and layers with LoRA adapters.

`FusedLinear` makes the weights of several layers views of one matrix; they stay parameters and are trained in place.
`LoraProduct` does the same for sampling with adapters: the first LoRA factors are further rows of that matrix, the
second factors form a block matrix whose product is added in place. `lora_linear` is for training: it saves its input
once, in the model's precision, where peft's module keeps a float32 copy for each layer. Rounding the factors to the
model's precision makes rollout and learner compute the same values; gradients are those of the float32 factors.

N tokens, E inputs, F outputs of all layers, R ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from arborl.models.lora import lora_factors

FUSED_ATTRIBUTE = "_fused"
RANK_ALIGNMENT = 16  # R is padded to a multiple of this, so that rows of the output are aligned


class FusedLinear:
    """Several linear layers as one; each by itself if they are not plain, such as with an adapter."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = list(modules)
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        plain = [m for m in modules if type(m) is nn.Linear]
        if len(plain) == len(modules) and len({m.bias is None for m in plain}) == 1:
            self.weights = [m.weight for m in plain]
            self.biases = [m.bias for m in plain if m.bias is not None]
        self.weight, self.bias = _fuse(self.weights), _fuse(self.biases)

    @property
    def has_moved(self) -> bool:
        return not (are_views_of(self.weight, self.weights) and are_views_of(self.bias, self.biases))

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return torch.cat([lora_linear(module, x) for module in self.modules], dim=-1)
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled():
            weight = _FusedParameter.apply(weight, *self.weights)
            bias = bias if bias is None else _FusedParameter.apply(bias, *self.biases)
        return linear(x, weight, bias)


def fuse_linear(owner: nn.Module, *names: str) -> FusedLinear:
    """These layers of a module as one; made at the first call, and again after they changed."""
    modules = [getattr(owner, name) for name in names]
    found: FusedLinear | None = owner.__dict__.get(FUSED_ATTRIBUTE)
    if found is None or found.modules != modules or found.has_moved:
        found = owner.__dict__[FUSED_ATTRIBUTE] = FusedLinear(modules)
    return found


def _fuse(parameters: Sequence[Tensor], padding: int = 0) -> Tensor | None:
    """One tensor of which the parameters become views, followed by rows of zeros. It is a parameter too, so
    torch.compile treats its size as static."""
    if not parameters:
        return None
    with torch.inference_mode(False), torch.no_grad():
        zeros = parameters[0].data.new_zeros(padding, *parameters[0].shape[1:])
        fused = nn.Parameter(torch.cat([*(p.data for p in parameters), zeros]), requires_grad=False)
        for p, view in zip(parameters, fused.data.split([*(len(p) for p in parameters), padding]), strict=False):
            p.data = view
    return fused


def are_views_of(fused: Tensor | None, parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters are consecutive views of the fused tensor."""
    address = 0 if fused is None else fused.data_ptr()
    for p in parameters:
        if p.data_ptr() != address:
            return False
        address += p.nbytes
    return True


class _FusedParameter(Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return fused.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients[0].split(ctx.sizes)


class FactorSlices(NamedTuple):
    module: nn.Module
    ranks: slice
    columns: slice


class LoraProduct:
    """Several layers as one, some with adapters, for sampling. The factors are copies in the model's precision, renewed
    by `refresh`, so the addresses bound by CUDA graphs never change."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = list(modules)
        bases = [base_layer(module) for module in modules]
        self.weights, self.biases = [b.weight for b in bases], [b.bias for b in bases if b.bias is not None]
        self.slices: list[FactorSlices] = []
        rank = column = 0
        for module, base in zip(modules, bases, strict=True):
            if (factors := lora_factors(module)) is not None:
                columns = slice(column, column + base.out_features)
                self.slices.append(FactorSlices(module, slice(rank, rank + len(factors.first)), columns))
                rank += len(factors.first)
            column += base.out_features
        self.width, self.ranks = column, -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT
        fused = _fuse(self.weights, self.ranks)
        assert fused is not None
        self.weight, self.bias = fused, _fuse(self.biases, self.ranks)
        with torch.inference_mode(False), torch.no_grad():
            self.second = self.weight.new_zeros(self.ranks, column)
        self.refresh()

    @property
    def has_moved(self) -> bool:
        """Whether a parameter was given other memory, or an adapter is of another form now."""
        if any(lora_factors(part.module) is None for part in self.slices):
            return True
        return not (are_views_of(self.weight, self.weights) and are_views_of(self.bias, self.biases))

    @torch.no_grad()
    def refresh(self) -> None:
        first_RE = self.weight[self.width :]
        for module, ranks, columns in self.slices:
            factors = lora_factors(module)
            assert factors is not None
            first_RE[ranks].copy_(factors.first)
            self.second[ranks, columns].copy_((factors.second * factors.scale).T)

    def __call__(self, x_NE: Tensor) -> Tensor:
        """The outputs, concatenated: `[N, F]`, the first columns of wider rows."""
        both = linear(x_NE, self.weight, self.bias)
        out_NF, low_NR = both.split([self.width, self.ranks], dim=-1)
        return out_NF.addmm_(low_NR, self.second)


def base_layer(module: nn.Module) -> nn.Linear:
    base: nn.Linear = module if isinstance(module, nn.Linear) else module.base_layer  # type: ignore[assignment]
    return base


_products: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], LoraProduct]] = WeakKeyDictionary()


def make_product(owner: nn.Module, *names: str) -> FusedLinear | LoraProduct | nn.Module:
    """These layers of a module, which have the same input, as few products: `LoraProduct` with adapters of the known
    form, else `FusedLinear`; a single plain layer is returned as it is."""
    modules = [getattr(owner, name) for name in names]
    if not _has_known_adapters(modules):
        return fuse_linear(owner, *names) if len(names) > 1 else modules[0]
    products = _products.setdefault(owner, {})
    found = products.get(names)
    if found is None or found.modules != modules or found.has_moved:
        found = products[names] = LoraProduct(modules)
    return found


def _has_known_adapters(modules: Sequence[nn.Module]) -> bool:
    adapters = [lora_factors(module) for module in modules]
    plain = [type(m) is nn.Linear for m, adapter in zip(modules, adapters, strict=True) if adapter is None]
    if not any(adapters) or not all(plain):
        return False
    bases = [base_layer(module) for module in modules]
    return len({base.bias is None for base in bases}) == 1 and len({base.weight.dtype for base in bases}) == 1


def lora_linear(module: nn.Module, x_NE: Tensor) -> Tensor:
    """Output of a layer for training; a plain adapter without active dropout uses `_LoraLinear`."""
    factors = lora_factors(module)
    base: Any = getattr(module, "base_layer", None)
    dropouts: Any = module.lora_dropout if factors is not None else {}
    drops = any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in dropouts.values())
    if factors is None or drops or base.weight.requires_grad:
        out: Tensor = module(x_NE)
        return out
    return _LoraLinear.apply(x_NE, base.weight, base.bias, *factors)


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, weight_FE: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: float
    ) -> Tensor:
        first_RE, second_FR = first.to(x_NE.dtype), (second * scale).to(x_NE.dtype)
        low_NR = linear(x_NE, first_RE)
        ctx.save_for_backward(x_NE, weight_FE, first_RE, second_FR, low_NR)
        ctx.scale, ctx.dtypes = scale, (first.dtype, second.dtype)
        return linear(x_NE, weight_FE, bias).addmm_(low_NR, second_FR.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (to_out_NF,) = gradients
        x_NE, weight_FE, first_RE, second_FR, low_NR = ctx.saved_tensors
        to_low_NR = to_out_NF @ second_FR
        to_x_NE = (to_out_NF @ weight_FE).addmm_(to_low_NR, first_RE) if ctx.needs_input_grad[0] else None
        to_first = (to_low_NR.T @ x_NE).to(ctx.dtypes[0])
        to_second = (to_out_NF.T @ low_NR).to(ctx.dtypes[1]) * ctx.scale
        return to_x_NE, None, None, to_first, to_second, None
