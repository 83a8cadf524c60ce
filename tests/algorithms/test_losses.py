"""Losses by token: golden values, and value and gradient against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborl.algorithms import token_losses
from arborl.algorithms.token_losses import KL, adapt_kl_coef, k1, k2, k3

PROBABILITY = st.floats(-3.0, -0.01)
ROWS = st.lists(
    st.tuples(PROBABILITY, PROBABILITY, PROBABILITY, st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=6
)


def clipped(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Value, and derivative by the log of the ratio, of PPO's clipped surrogate."""
    held = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= held * advantage:
        return -ratio * advantage, -ratio * advantage
    return -held * advantage, 0.0


def ppo_row(new, old, proximal, a, gap):
    return clipped(math.exp(new - old), a, 0.2, 0.3)


def dual_row(new, old, proximal, a, gap):
    ratio = math.exp(new - old)
    if a < 0 and ratio > 3.0:
        return -3.0 * a, 0.0
    return clipped(ratio, a, 0.2, 0.3)


def gspo_row(new, old, proximal, a, gap):
    return clipped(math.exp(gap), a, 0.2, 0.3)


def gmpo_row(new, old, proximal, a, gap):
    held = min(new - old, 0.3) if a > 0 else max(new - old, -0.2)
    return -math.exp(gap) * a, -math.exp(gap) * a * (held == new - old)


def cispo_row(new, old, proximal, a, gap):
    held = min(math.exp(new - old), 3.0)
    return -held * a * new, -held * a


def sapo_row(new, old, proximal, a, gap):
    ratio, tau = math.exp(new - old), 1.5 if a > 0 else 2.5
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a


def topr_row(new, old, proximal, a, gap):
    weight = 1.0 if a >= 0 else min(math.exp(new - old), 1.0)
    return -weight * a * new, -weight * a


def decoupled_row(new, old, proximal, a, gap):
    behaviour = math.exp(proximal - old)
    value, slope = clipped(math.exp(new - proximal), a, 0.2, 0.3)
    return (behaviour * value, behaviour * slope) if behaviour <= 2.0 else (0.0, 0.0)


def distill_row(new, old, proximal, a, gap):
    ratio = math.exp(new - old)
    return ratio * (new - proximal), ratio * (new - proximal)


CASES = {
    "ppo": (lambda new, old, prox, a, gap: token_losses.ppo_clip(new, old, a, 0.2, 0.3), ppo_row),
    "dual_clip": (lambda new, old, prox, a, gap: token_losses.ppo_clip(new, old, a, 0.2, 0.3, 3.0), dual_row),
    "gspo": (lambda new, old, prox, a, gap: token_losses.gspo(new, gap, a, 0.2, 0.3), gspo_row),
    "gmpo": (lambda new, old, prox, a, gap: token_losses.gmpo(new, old, gap, a, 0.2, 0.3), gmpo_row),
    "cispo": (lambda new, old, prox, a, gap: token_losses.cispo(new, old, a, 2.0), cispo_row),
    "sapo": (lambda new, old, prox, a, gap: token_losses.sapo(new, old, a, 1.5, 2.5), sapo_row),
    "topr": (lambda new, old, prox, a, gap: token_losses.topr(new, old, a), topr_row),
    "pg": (lambda new, old, prox, a, gap: token_losses.policy_gradient(new, a), lambda n, o, p, a, g: (-a * n, -a)),
    "decoupled_ppo": (
        lambda new, old, prox, a, gap: token_losses.decoupled_ppo(new, prox, old, a, 0.2, 0.3, 2.0),
        decoupled_row,
    ),
    "trpo": (
        lambda new, old, prox, a, gap: token_losses.surrogate(new, old, a),
        lambda n, o, p, a, g: (-math.exp(n - o) * a, -math.exp(n - o) * a),
    ),
    "sft": (lambda new, old, prox, a, gap: token_losses.likelihood(new), lambda n, o, p, a, g: (-n, -1.0)),
    "distill": (lambda new, old, prox, a, gap: token_losses.distillation(new, old, prox), distill_row),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
@given(rows=ROWS)
def test_value_and_gradient_equal_a_loop(name, rows):
    call, by_hand = CASES[name]
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    new = columns[0].requires_grad_()
    loss, _ = call(new, *columns[1:])
    loss.sum().backward()
    values, slopes = zip(*(by_hand(*row) for row in rows), strict=True)
    assert loss.tolist() == pytest.approx(values, abs=1e-9)
    assert new.grad.tolist() == pytest.approx(slopes, abs=1e-9)


def test_ppo_clip_golden_values():
    # ratios 1.5 and 0.5 with clip 0.2: gains beyond 1.2 (or below 0.8 for a bad token) are not rewarded
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).double().log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    loss, seen = token_losses.ppo_clip(new, torch.zeros(4).double(), advantage, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert seen["policy/clipped"].tolist() == [1.0, 0.0, 0.0, 1.0]
    dual, _ = token_losses.ppo_clip(
        torch.tensor([9.0]).log(), torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2, dual_clip=3.0
    )
    assert dual.tolist() == pytest.approx([3.0])


def test_every_loss_over_advantages_is_proportional_to_them():
    # so a guard's factor may be folded into the advantage
    random = np.random.default_rng(0)
    new, old, proximal, gap = (torch.from_numpy(-random.exponential(size=20)) for _ in range(4))
    advantage, factor = torch.from_numpy(random.normal(size=20)), torch.from_numpy(random.exponential(size=20))
    for name in sorted(set(CASES) - {"sft", "distill"}):
        call = CASES[name][0]
        assert torch.allclose(call(new, old, proximal, factor * advantage, gap)[0],
                              factor * call(new, old, proximal, advantage, gap)[0], atol=1e-12), name  # fmt: skip


def test_gspo_tokens_together_have_the_gradient_of_their_sequence():
    new, old = torch.tensor([-1.0, -0.5, -2.0]).double().requires_grad_(), torch.tensor([-1.1, -0.6, -1.8]).double()
    direct = -((new - old).mean().exp() * 0.7)
    (expected,) = torch.autograd.grad(direct, new)
    gap = token_losses.sequence_mean((new - old).detach(), torch.zeros(3, dtype=torch.int64))
    loss, _ = token_losses.gspo(new, gap, torch.full((3,), 0.7).double(), 0.5, 0.5)
    (found,) = torch.autograd.grad(loss.mean(), new)
    assert loss.mean().item() == pytest.approx(direct.item())
    assert found.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_gmpo_tokens_together_have_the_gradient_of_the_papers_objective(advantage):
    """Equation 4 of arXiv 2507.20673: sgn(A) min over the power mean of |ratio^sgn(A)|, written with products."""
    new = torch.tensor([-1.0, -0.5, -2.0, -0.2]).double().requires_grad_()
    old = torch.tensor([-1.1, -1.5, -1.2, -0.3]).double()
    low, high = 0.4, 0.4
    sign = math.copysign(1.0, advantage)
    ratio = (new - old).exp()
    bounded = torch.minimum(ratio**sign, ratio.clamp(math.exp(-low), math.exp(high)) ** sign) ** sign
    direct = -(bounded.prod() ** (1 / len(new))) * advantage
    (expected,) = torch.autograd.grad(direct, new)
    a = torch.full((4,), advantage).double()
    gap = token_losses.sequence_mean(
        token_losses.gmpo_log_ratio(new.detach(), old, a, low, high), torch.zeros(4, dtype=torch.int64)
    )
    loss, seen = token_losses.gmpo(new, old, gap, a, low, high)
    (found,) = torch.autograd.grad(loss.mean(), new)
    assert loss.mean().item() == pytest.approx(direct.item())
    assert found.tolist() == pytest.approx(expected.tolist())
    assert sum(seen["policy/clipped"].tolist()) == 1.0


def test_value_loss_golden_values():
    now, before = torch.tensor([1.0, 1.0]).double().requires_grad_(), torch.tensor([0.0, 0.0]).double()
    target = torch.tensor([2.0, 0.0]).double()
    assert token_losses.value_loss(now, before, target).tolist() == [0.5, 0.5]
    clipped_loss = token_losses.value_loss(now, before, target, clip=0.5)
    assert clipped_loss.tolist() == [1.125, 0.5]  # held at 0.5: (0.5 - 2)^2 / 2 is larger, (0.5 - 0)^2 / 2 is not
    clipped_loss.sum().backward()
    assert now.grad.tolist() == [0.0, 1.0]  # a held estimate earns nothing for moving on


def test_kl_estimators_golden_values():
    policy, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    assert k1(policy, reference).tolist() == pytest.approx([0.5, -1.0])
    assert k2(policy, reference).tolist() == pytest.approx([0.125, 0.5])
    assert k3(policy, reference).tolist() == pytest.approx([np.exp(-0.5) - 1 + 0.5, np.exp(1) - 1 - 1])
    assert KL["mse"](policy, reference).tolist() == pytest.approx([0.125, 0.5])
    assert KL["abs"](policy, reference).tolist() == pytest.approx([0.5, 1.0])


def test_k1_and_k3_are_unbiased_over_a_whole_distribution():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    exact = float((p * (p / q).log()).sum())
    assert float((p * k1(p.log(), q.log())).sum()) == pytest.approx(exact)
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(exact)


def test_the_kl_controller_leads_to_its_target_and_never_below_zero():
    coef = 0.01
    for _ in range(500):  # a policy whose KL falls as the penalty rises
        coef = adapt_kl_coef(coef, kl=1.0 / (1 + 10 * coef), target=0.25, episodes=100, horizon=1000)
    assert 1.0 / (1 + 10 * coef) == pytest.approx(0.25, rel=0.02)
    assert adapt_kl_coef(0.1, kl=0.0, target=1.0, episodes=10**9, horizon=1) == pytest.approx(0.08)
