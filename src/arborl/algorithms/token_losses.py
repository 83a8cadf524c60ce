"""Token-level losses, and estimators of the KL. Each function returns the loss of every term.

M terms. `new_M` carries the gradient; all other inputs are data. Examples write log-probabilities as logs of ratios:
with `old = log 1`, a new log-probability of `log 1.5` is a ratio of 1.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """The current outputs of the models for each term."""

    logprob_M: Tensor
    """With gradient."""
    entropy_M: Tensor
    """Of the distribution the token was sampled from; with gradient only if the algorithm needs it."""
    value_M: Tensor | None = None
    """The critic's estimate, with gradient; None without a critic."""


@dataclass(frozen=True, slots=True)
class TermBatch:
    """The columns of `Terms` that losses read, as tensors; None for unknown columns."""

    old_M: Tensor
    """Log-probability under the policy that sampled the token."""
    advantage_M: Tensor
    weight_M: Tensor
    episode_M: Tensor
    call_M: Tensor
    turn_M: Tensor
    group_M: Tensor
    version_M: Tensor
    proximal_M: Tensor | None = None
    """Log-probability under the weights at the start of the update."""
    reference_M: Tensor | None = None
    """Log-probability under the frozen reference policy."""
    value_M: Tensor | None = None
    """The critic's estimate before the update."""
    target_M: Tensor | None = None
    """The critic's target, or KTO's reference point."""
    teacher_M: Tensor | None = None
    """Log-probability under the teacher."""
    sequence_M: Tensor | None = None
    """The result of `Algorithm.prepare`: two detached numbers per term."""


MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: larger ones would overflow."""


def ratio(difference_M: Tensor) -> Tensor:
    """The probability ratio from a difference of log-probabilities, which is clamped to ±20.

    >>> [round(x, 4) for x in ratio(torch.tensor([0.0, 300.0]).double()).log().tolist()]
    [0.0, 20.0]
    """
    return difference_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


LossParts = tuple[Tensor, dict[str, Tensor]]
"""The loss of every term, and vectors whose means are logged."""


def ppo_clip(
    new_M: Tensor,
    old_M: Tensor,
    advantage_M: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossParts:
    """PPO's clipped surrogate: no gain for moving a token's ratio beyond [1 - clip_low, 1 + clip_high].

    -min(r A, clip(r) A), r = new / old (arXiv 1707.06347). A larger `clip_high` is DAPO's clip-higher (2503.14476).
    `dual_clip` bounds what a bad token can cost, at most dual_clip |A| (1912.09729).

    >>> ratio, good = torch.tensor([1.5, 0.5]).double(), torch.ones(2).double()
    >>> [round(x, 6) for x in ppo_clip(ratio.log(), good.log(), good)[0].tolist()]
    [-1.2, -0.5]
    """
    return _clipped(ratio(new_M - old_M), advantage_M, clip_low, clip_high, dual_clip)


def gspo(
    new_M: Tensor, gap_M: Tensor, advantage_M: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossParts:
    """PPO's clip on one ratio a sequence, the geometric mean of its tokens' (GSPO, arXiv 2507.18071).

    Every token carries s = exp(gap + new - new.detach()): the value of its sequence's ratio, and its own gradient, so
    the mean over a sequence's tokens has the gradient of the sequence's clipped surrogate.

    Args:
        gap_M: mean of new - old over the term's sequence, without gradient (`sequence_mean`).

    >>> gap, good = torch.tensor([1.5, 1.5]).double().log(), torch.ones(2).double()
    >>> [round(x, 6) for x in gspo(good.log(), gap, good, 0.2, 0.2)[0].tolist()]
    [-1.2, -1.2]
    """
    return _clipped(ratio(gap_M + new_M - new_M.detach()), advantage_M, clip_low, clip_high, None)


def _clipped(ratio_M: Tensor, advantage_M: Tensor, low: float, high: float, dual: float | None) -> LossParts:
    clipped_M = ratio_M.clamp(1 - low, 1 + high)
    free_M, bound_M = ratio_M * advantage_M, clipped_M * advantage_M
    gain_M = torch.minimum(free_M, bound_M)
    if dual is not None:
        gain_M = torch.where(advantage_M < 0, torch.maximum(gain_M, dual * advantage_M), gain_M)
    return -gain_M, {
        "policy/ratio": ratio_M.detach(),
        "policy/clipped": (bound_M < free_M).detach().float(),
    }


def cispo(new_M: Tensor, old_M: Tensor, advantage_M: Tensor, clip_high: float = 4.0) -> LossParts:
    """Policy gradient weighted by the capped ratio: no token's gradient is dropped, as clipping would.

    -min(r, 1 + clip_high).detach() A new (CISPO, MiniMax-M1, arXiv 2506.13585).

    >>> new, ratio = torch.tensor([-1.0, -1.0]).double(), torch.tensor([2.0, 9.0]).double()
    >>> cispo(new, new - ratio.log(), torch.ones(2).double())[0].tolist()
    [2.0, 5.0]
    """
    ratio_M = ratio(new_M - old_M).detach()
    clipped_M = ratio_M.clamp(max=1 + clip_high)
    return -clipped_M * advantage_M * new_M, {
        "policy/ratio": ratio_M,
        "policy/clipped": (clipped_M < ratio_M).float(),
    }


def sapo(
    new_M: Tensor, old_M: Tensor, advantage_M: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossParts:
    """A soft gate instead of the clip: gradients fade as the ratio leaves 1, faster for negative advantages.

    -4 / tau sigmoid(tau (r - 1)) A, with one tau per sign of A (SAPO, arXiv 2511.20347).

    >>> one = torch.ones(1).double()
    >>> sapo(one.log(), one.log(), one)[0].tolist()     # 4 * sigmoid(0)
    [-2.0]
    """
    ratio_M = ratio(new_M - old_M)
    tau_M = torch.where(advantage_M > 0, torch.full_like(ratio_M, tau_positive), torch.full_like(ratio_M, tau_negative))
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return -gate_M * advantage_M, {"policy/ratio": ratio_M.detach()}


def topr(new_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> LossParts:
    """Tapered off-policy REINFORCE: positive advantages as in supervised learning, negative ones by their ratio, at
    most 1.

    -A new where A >= 0, else -min(r, 1).detach() A new (TOPR, arXiv 2503.14286).

    >>> new, old = torch.tensor([-1.0, -1.0, -1.0]).double(), torch.tensor([-2.0, -2.0, 0.0]).double()
    >>> [round(x, 4) for x in topr(new, old, torch.tensor([1.0, -1.0, -1.0]).double())[0].tolist()]
    [1.0, -1.0, -0.3679]
    """
    ratio_M = ratio(new_M - old_M).detach()
    weight_M = torch.where(advantage_M >= 0, torch.ones_like(ratio_M), ratio_M.clamp(max=1.0))
    return -weight_M * advantage_M * new_M, {"policy/ratio": ratio_M}


def policy_gradient(new_M: Tensor, advantage_M: Tensor) -> LossParts:
    """-A new (Williams 1992); with a critic's advantage it is the actor of A2C (arXiv 1602.01783).

    >>> policy_gradient(torch.tensor([-0.5, -2.0]), torch.tensor([2.0, -1.0]))[0].tolist()
    [1.0, -2.0]
    """
    return -advantage_M * new_M, {}


def decoupled_ppo(
    new_M: Tensor,
    proximal_M: Tensor,
    old_M: Tensor,
    advantage_M: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float | None = 5.0,
) -> LossParts:
    """Decoupled PPO: clip around the policy at the start of the update, weighted by its ratio to the policy that
    sampled.

    (proximal / old) * ppo(new / proximal), 0 where the first factor is above `cap` (arXiv 2110.00641; AReaL,
    2505.24298).

    >>> new, proximal = torch.tensor([3.0, 9.0]).double().log(), torch.tensor([2.0, 6.0]).double().log()
    >>> loss, _ = decoupled_ppo(new, proximal, torch.zeros(2).double(), torch.ones(2).double())
    >>> [round(x, 6) + 0.0 for x in loss.tolist()]     # 2 * -min(1.5, 1.2), and 6 > 5
    [-2.4, 0.0]
    """
    loss_M, logged = ppo_clip(new_M, proximal_M, advantage_M, clip_low, clip_high)
    behaviour_M = ratio(proximal_M - old_M)
    weight_M = behaviour_M if cap is None else torch.where(behaviour_M > cap, 0.0, behaviour_M)
    return weight_M * loss_M, logged | {"policy/behaviour": behaviour_M}


def surrogate(new_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> LossParts:
    """-r A, whose step TRPO bounds by the KL instead of a clip (arXiv 1502.05477).

    >>> [round(x, 6) for x in surrogate(torch.tensor([1.5]).double().log(), torch.zeros(1), torch.ones(1))[0].tolist()]
    [-1.5]
    """
    ratio_M = ratio(new_M - old_M)
    return -ratio_M * advantage_M, {"policy/ratio": ratio_M.detach()}


def likelihood(new_M: Tensor) -> LossParts:
    """-new: the negative log-likelihood of the tokens.

    >>> likelihood(torch.tensor([-0.5]))[0].tolist()
    [0.5]
    """
    return -new_M, {}


def distillation(new_M: Tensor, old_M: Tensor, teacher_M: Tensor) -> LossParts:
    """On-policy distillation: the reverse KL to the teacher, token by token.

    r (new - teacher).detach(), r = new / old: the policy gradient with advantage teacher - new (GKD, arXiv 2306.13649).

    >>> new, teacher = torch.tensor([-1.0]), torch.tensor([-0.25])
    >>> distillation(new, new, teacher)[0].tolist()
    [-0.75]
    """
    gap_M = (new_M - teacher_M).detach()
    return ratio(new_M - old_M) * gap_M, {"policy/teacher_kl": gap_M}


def value_loss(now_M: Tensor, before_M: Tensor, target_M: Tensor, clip: float | None = None) -> Tensor:
    """(V - target)^2 / 2; with `clip`, the maximum of that and the same with V clipped to within `clip` of its old
    value.

    >>> now, before, target = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0])
    >>> value_loss(now, before, target, clip=0.5).tolist()     # (0.5 - 2)^2 / 2
    [1.125]
    """
    free_M = (now_M - target_M).square()
    if clip is None:
        return 0.5 * free_M
    clipped_M = before_M + (now_M - before_M).clamp(-clip, clip)
    return 0.5 * torch.maximum(free_M, (clipped_M - target_M).square())


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The mean over each term's sequence.

    >>> sequence_mean(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([4, 4, 9])).tolist()
    [2.0, 2.0, 5.0]
    """
    _, index_M = torch.unique(sequence_M, return_inverse=True)
    size = int(index_M.max()) + 1 if len(index_M) else 0
    total = torch.zeros(size, dtype=torch.float64, device=value_M.device).index_add(0, index_M, value_M.double())
    count = torch.zeros_like(total).index_add(0, index_M, torch.ones_like(value_M, dtype=torch.float64))
    return (total / count)[index_M].to(value_M.dtype)


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """-log r: unbiased, may be negative.

    >>> k1(torch.tensor(-1.0), torch.tensor(-1.5)).item()
    0.5
    """
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, smooth.

    >>> k2(torch.tensor(-1.0), torch.tensor(-1.5)).item()
    0.125
    """
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, never negative.

    >>> round(k3(torch.tensor(-1.0), torch.tensor(-1.5)).item(), 4)     # exp(-0.5) - 1 + 0.5
    0.1065
    """
    difference = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def distance(policy: Tensor, reference: Tensor) -> Tensor:
    """|log r|.

    >>> distance(torch.tensor(-1.5), torch.tensor(-1.0)).item()
    0.5
    """
    return (policy - reference).abs()


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "mse": k2, "abs": distance}
"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With r = reference(token) / policy(token): k1 = -log r is unbiased and may be negative; k2 = (log r)^2 / 2 is biased and
smooth (also called `mse`); k3 = r - 1 - log r is unbiased and never negative; abs = |log r|.
"""


def adapt_kl_coef(coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """The next KL coefficient: larger if the KL is above its target, smaller if below.

    coef (1 + clip(kl / target - 1, ±0.2) episodes / horizon), the controller of Ziegler et al. 2019 (arXiv 1909.08593).

    >>> round(adapt_kl_coef(0.1, kl=9.0, target=6.0, episodes=100, horizon=1000), 6)     # 1.5 - 1, clipped to 0.2
    0.102
    """
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * min(episodes / horizon, 1.0))
