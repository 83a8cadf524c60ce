"""Token-level losses, and estimators of the KL. Each function returns the loss of every term.

M terms. `new_M` carries the gradient; all other inputs are data. Examples write log-probabilities as logs of ratios:
with `old = log 1`, a new log-probability of `log 1.5` is a ratio of 1.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    logprob_M: Tensor  # with gradient
    entropy_M: Tensor  # of the distribution the token was sampled from; with gradient only if the algorithm needs it
    value_M: Tensor | None = None  # the critic's estimate, with gradient; None without a critic


@dataclass(frozen=True, slots=True)
class TermBatch:
    """The columns of `Terms` that losses read, as tensors; None for unknown columns."""

    old_M: Tensor  # log-probability under the policy that sampled the token
    advantage_M: Tensor
    weight_M: Tensor
    episode_M: Tensor
    call_M: Tensor
    turn_M: Tensor
    group_M: Tensor
    version_M: Tensor
    proximal_M: Tensor | None = None  # log-probability under the weights at the start of the update
    reference_M: Tensor | None = None  # log-probability under the frozen reference policy
    value_M: Tensor | None = None  # the critic's estimate before the update
    target_M: Tensor | None = None  # the critic's target, or KTO's reference point
    teacher_M: Tensor | None = None  # log-probability under the teacher
    sequence_M: Tensor | None = None  # the result of `Algorithm.prepare`: two detached numbers per term


Record = TypeVar("Record", ModelOutputs, TermBatch)


def pick_rows(record: Record, rows: Tensor) -> Record:
    columns: dict[str, Any] = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    picked: dict[str, Any] = {name: None if column is None else column[rows] for name, column in columns.items()}
    return type(record)(**picked)


MAX_LOG_RATIO = 20.0  # bound of log-ratios: larger ones would overflow


def ratio(difference_M: Tensor) -> Tensor:
    """The probability ratio from a difference of log-probabilities, which is clamped to ±20."""
    return difference_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


LossParts = tuple[Tensor, dict[str, Tensor]]  # the loss of every term, and vectors whose means are logged


def ppo_clip(
    new_M: Tensor,
    old_M: Tensor,
    advantage_M: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossParts:
    """-min(r A, clip(r) A), r = new / old in [1 - clip_low, 1 + clip_high] (arXiv 1707.06347). A larger `clip_high` is
    DAPO's clip-higher (2503.14476). `dual_clip` bounds what a bad token can cost, at most dual_clip |A|
    (1912.09729)."""
    return _clipped(ratio(new_M - old_M), advantage_M, clip_low, clip_high, dual_clip)


def gspo(
    new_M: Tensor, gap_M: Tensor, advantage_M: Tensor, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossParts:
    """PPO's clip on one ratio a sequence (GSPO, arXiv 2507.18071), with `gap_M` the mean of new - old over it. Every
    token carries s = exp(gap + new - new.detach()): the value of its sequence's ratio, and its own gradient."""
    return _clipped(ratio(gap_M + new_M - new_M.detach()), advantage_M, clip_low, clip_high, None)


def gmpo_log_ratio(
    new_M: Tensor, old_M: Tensor, advantage_M: Tensor, clip_low: float = 0.4, clip_high: float = 0.4
) -> Tensor:
    """GMPO's clipped log-ratio of a token: at most clip_high where A > 0, else at least -clip_low."""
    difference_M = (new_M - old_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(advantage_M > 0, difference_M.clamp(max=clip_high), difference_M.clamp(min=-clip_low))


def gmpo(
    new_M: Tensor,
    old_M: Tensor,
    gap_M: Tensor,
    advantage_M: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossParts:
    """-A s, s the geometric mean of a sequence's ratios, each clipped (GMPO, arXiv 2507.20673); `gap_M` is the mean of
    the clipped log-ratios over the sequence. Every token carries the value of its sequence's s and, unless it is
    clipped, its own gradient. The clip range is that of log r: the paper's (e^-0.4, e^0.4) is 0.4 and 0.4."""
    free_M = (new_M - old_M).detach()
    held_M = gmpo_log_ratio(new_M, old_M, advantage_M, clip_low, clip_high)
    ratio_M = ratio(gap_M + held_M - held_M.detach())
    return -ratio_M * advantage_M, {
        "policy/ratio": ratio_M.detach(),
        "policy/clipped": (held_M.detach() != free_M).float(),
    }


def _clipped(ratio_M: Tensor, advantage_M: Tensor, low: float, high: float, dual: float | None) -> LossParts:
    clipped_M = ratio_M.clamp(1 - low, 1 + high)
    free_M, bound_M = ratio_M * advantage_M, clipped_M * advantage_M
    gain_M = torch.minimum(free_M, bound_M)
    if dual is not None:
        gain_M = torch.where(advantage_M < 0, torch.maximum(gain_M, dual * advantage_M), gain_M)
    return -gain_M, {"policy/ratio": ratio_M.detach(), "policy/clipped": (bound_M < free_M).detach().float()}


def cispo(new_M: Tensor, old_M: Tensor, advantage_M: Tensor, clip_high: float = 4.0) -> LossParts:
    """-min(r, 1 + clip_high).detach() A new: no token's gradient is dropped (CISPO, MiniMax-M1, arXiv 2506.13585)."""
    ratio_M = ratio(new_M - old_M).detach()
    clipped_M = ratio_M.clamp(max=1 + clip_high)
    return -clipped_M * advantage_M * new_M, {"policy/ratio": ratio_M, "policy/clipped": (clipped_M < ratio_M).float()}


def sapo(
    new_M: Tensor, old_M: Tensor, advantage_M: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossParts:
    """-4 / tau sigmoid(tau (r - 1)) A, with one tau per sign of A: a soft gate instead of the clip (SAPO, arXiv
    2511.20347)."""
    ratio_M = ratio(new_M - old_M)
    tau_M = torch.where(advantage_M > 0, torch.full_like(ratio_M, tau_positive), torch.full_like(ratio_M, tau_negative))
    gate_M = torch.sigmoid(tau_M * (ratio_M - 1)) * 4 / tau_M
    return -gate_M * advantage_M, {"policy/ratio": ratio_M.detach()}


def topr(new_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> LossParts:
    """-A new where A >= 0, else -min(r, 1).detach() A new (tapered off-policy REINFORCE, arXiv 2503.14286)."""
    ratio_M = ratio(new_M - old_M).detach()
    weight_M = torch.where(advantage_M >= 0, torch.ones_like(ratio_M), ratio_M.clamp(max=1.0))
    return -weight_M * advantage_M * new_M, {"policy/ratio": ratio_M}


def policy_gradient(new_M: Tensor, advantage_M: Tensor) -> LossParts:
    """-A new (Williams 1992); with a critic's advantage it is the actor of A2C (arXiv 1602.01783)."""
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
    """(proximal / old) ppo(new / proximal), 0 where the first factor is above `cap`: clips around the policy at the
    start of the update (arXiv 2110.00641; AReaL, 2505.24298)."""
    loss_M, logged = ppo_clip(new_M, proximal_M, advantage_M, clip_low, clip_high)
    behaviour_M = ratio(proximal_M - old_M)
    weight_M = behaviour_M if cap is None else torch.where(behaviour_M > cap, 0.0, behaviour_M)
    return weight_M * loss_M, logged | {"policy/behaviour": behaviour_M}


def surrogate(new_M: Tensor, old_M: Tensor, advantage_M: Tensor) -> LossParts:
    """-r A, whose step TRPO bounds by the KL instead of a clip (arXiv 1502.05477)."""
    ratio_M = ratio(new_M - old_M)
    return -ratio_M * advantage_M, {"policy/ratio": ratio_M.detach()}


def likelihood(new_M: Tensor) -> LossParts:
    return -new_M, {}


def distillation(new_M: Tensor, old_M: Tensor, teacher_M: Tensor) -> LossParts:
    """r (new - teacher).detach(), r = new / old: the policy gradient with advantage teacher - new (GKD, arXiv
    2306.13649)."""
    gap_M = (new_M - teacher_M).detach()
    return ratio(new_M - old_M) * gap_M, {"policy/teacher_kl": gap_M}


def value_loss(now_M: Tensor, before_M: Tensor, target_M: Tensor, clip: float | None = None) -> Tensor:
    """(V - target)^2 / 2; with `clip`, the maximum of that and the same with V within `clip` of its old value."""
    free_M = (now_M - target_M).square()
    if clip is None:
        return 0.5 * free_M
    clipped_M = before_M + (now_M - before_M).clamp(-clip, clip)
    return 0.5 * torch.maximum(free_M, (clipped_M - target_M).square())


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    _, index_M = torch.unique(sequence_M, return_inverse=True)
    size = int(index_M.max()) + 1 if len(index_M) else 0
    total = torch.zeros(size, dtype=torch.float64, device=value_M.device).index_add(0, index_M, value_M.double())
    count = torch.zeros_like(total).index_add(0, index_M, torch.ones_like(value_M, dtype=torch.float64))
    return (total / count)[index_M].to(value_M.dtype)


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    difference = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def distance(policy: Tensor, reference: Tensor) -> Tensor:
    return (policy - reference).abs()


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "mse": k2, "abs": distance}
"""Estimators of KL(policy || reference) from one sampled token (Schulman, "Approximating KL Divergence", 2020).

With r = reference(token) / policy(token): k1 = -log r is unbiased and may be negative; k2 = (log r)^2 / 2 is biased and
smooth (also called `mse`); k3 = r - 1 - log r is unbiased and never negative; abs = |log r|.
"""


def adapt_kl_coef(coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, ±0.2) episodes / horizon): the controller of Ziegler et al. 2019 (arXiv
    1909.08593)."""
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * min(episodes / horizon, 1.0))
