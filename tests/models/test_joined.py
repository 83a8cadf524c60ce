"""Layers that read the same input are one product, and everything else about them stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from arborl.models.fused_linear import fuse_linear

NAMES = ("a", "b", "c")


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layers(request) -> nn.Module:
    torch.manual_seed(0)
    holder = nn.Module()
    for name, size in zip(NAMES, (4, 2, 3), strict=True):
        setattr(holder, name, nn.Linear(5, size, request.param, dtype=torch.float64))
    return holder


def apart(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([getattr(layers, name)(x) for name in NAMES], dim=-1)


def test_outputs_and_gradients_are_those_of_the_layers_apart(layers):
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 9, dtype=torch.float64)
    expected = apart(layers, x)
    wanted = torch.autograd.grad((expected.tanh() * weight).sum(), [x, *layers.parameters()])
    found = fuse_linear(layers, *NAMES)(x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad((found.tanh() * weight).sum(), [x, *layers.parameters()]), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_gradients_reach_the_weights(layers):
    x = torch.randn(7, 5, dtype=torch.float64)
    both = []
    for run in (lambda: apart(layers, x), lambda: fuse_linear(layers, *NAMES)(x)):
        first = torch.autograd.grad(run().tanh().square().sum(), list(layers.parameters()), create_graph=True)
        both.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(layers.parameters())))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


def test_parameters_stay_the_same_objects_and_are_updated_in_place(layers):
    before = list(layers.parameters())
    whole = fuse_linear(layers, *NAMES)
    assert [id(p) for p in layers.parameters()] == [id(p) for p in before]
    assert set(layers.state_dict()) == {name for name, _ in layers.named_parameters()}
    with torch.no_grad():
        layers.b.weight.fill_(3.0)
    assert (whole.weight[4:6] == 3.0).all()
    assert fuse_linear(layers, *NAMES) is whole


def test_weights_given_other_memory_are_joined_again(layers):
    whole = fuse_linear(layers, *NAMES)
    layers.c.weight.data = torch.ones_like(layers.c.weight)
    assert whole.has_moved
    x = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(fuse_linear(layers, *NAMES)(x), apart(layers, x))
    assert fuse_linear(layers, *NAMES) is not whole


def test_a_copy_has_weights_of_its_own(layers):
    fuse_linear(layers, *NAMES)
    other = copy.deepcopy(layers)
    with torch.no_grad():
        other.a.weight.zero_()
    x = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(fuse_linear(other, *NAMES)(x), apart(other, x))
    torch.testing.assert_close(fuse_linear(layers, *NAMES)(x), apart(layers, x))
    assert not torch.equal(layers.a.weight, other.a.weight)


def test_a_layer_with_a_custom_forward_is_called_itself(layers):
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    fuse_linear(layers, *NAMES)
    layers.b = Doubled(5, 2).double()
    x = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(fuse_linear(layers, *NAMES)(x), apart(layers, x))
    assert fuse_linear(layers, *NAMES).weight is None
