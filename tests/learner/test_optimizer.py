"""Float32 masters of bfloat16 weights, and rates of their own for policy and critic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arborl.config.run_config import LearnerConfig
from arborl.learner.core.optimizer import Optimizer

RATES = (1e-3, 1e-3)


def one(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((4, 4), 1.0, dtype=dtype))


def descend(optimizer: Optimizer, parameter: nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step(1.0)


@pytest.mark.parametrize(("master", "moves"), [("float32", True), ("none", False)])
def test_small_updates_of_a_bfloat16_weight_add_up_only_in_a_float32_master(master, moves):
    parameter = one(torch.bfloat16)
    optimizer = Optimizer([parameter], (), LearnerConfig(master=master), (1e-4, 0.0))
    descend(optimizer, parameter, 60)  # each step 1e-4, below the 1/256 that bfloat16 can tell from 1
    assert (float(parameter.detach()[0, 0]) < 1.0) == moves


def test_a_bfloat16_weight_is_its_master_rounded_and_follows_the_float32_run():
    coarse, fine = one(torch.bfloat16), one(torch.float32)
    config = LearnerConfig()
    optimizers = [Optimizer([p], (), config, RATES) for p in (coarse, fine)]
    for optimizer, parameter in zip(optimizers, (coarse, fine), strict=True):
        descend(optimizer, parameter, 20)
    (master,) = optimizers[0].parts["policy"].copies()
    torch.testing.assert_close(master, fine.detach())
    assert torch.equal(coarse.detach(), master.bfloat16())
    assert optimizers[1].parts["policy"].copies() == []  # a float32 weight is its own master


def test_gradients_of_several_passes_add_up_in_float32():
    parameter = one(torch.bfloat16)
    optimizer = Optimizer([parameter], (), LearnerConfig(), RATES)
    for _ in range(300):  # in bfloat16 the sum would stop at 256
        parameter.sum().backward()
    (gradient,) = optimizer.gradients()
    assert parameter.grad is None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 4), 300.0))


def test_policy_and_critic_have_their_own_rate_and_are_clipped_apart():
    policy, critic = one(torch.float32), one(torch.float32)
    optimizer = Optimizer([policy], [critic], LearnerConfig(max_grad_norm=1.0), (1e-3, 1e-2))
    (policy.sum() * 1e-3 + critic.sum() * 1e6).backward()
    metrics = optimizer.step(0.5)
    assert metrics["learner/grad_norm"] == pytest.approx(4e-3)
    assert metrics["learner/critic_grad_norm"] == pytest.approx(4e6)
    assert float(policy.grad[0, 0]) == pytest.approx(1e-3)  # the critic's size did not shrink it
    assert float(1 - policy.detach()[0, 0]) == pytest.approx(5e-4, rel=1e-3)
    assert float(1 - critic.detach()[0, 0]) == pytest.approx(5e-3, rel=1e-3)
