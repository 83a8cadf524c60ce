"""TRPO's step: the natural gradient, bounded by the policy's KL (Schulman et al., 2015).

With g the gradient of the loss and F the Hessian of the mean KL from the policy before the update, the direction is
s = -(F + damping)^-1 g, computed by conjugate gradients from products F v. The step length makes 1/2 s'Fs the bound;
a line search shortens the step until the loss has fallen and the KL is within the bound.

M terms, V vocabulary, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel

from arborl.config.algorithm_config import AlgorithmArgs
from arborl.errors import ConfigError
from arborl.learner.attention.path_selection import DENSE
from arborl.learner.core.packing import MicroBatch
from arborl.learner.core.tree_forward import log_distributions
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.types import Metrics, Sampling

Product = Callable[[Tensor], Tensor]


def conjugate_gradient(product: Product, target: Tensor, iterations: int, tolerance: float = 1e-16) -> Tensor:
    """Solve A x = target for a symmetric positive A given by its products."""
    x, residual = torch.zeros_like(target), target.clone()
    direction, size = residual.clone(), residual @ residual
    for _ in range(iterations):
        if float(size) <= tolerance * float(target @ target):
            break
        image = product(direction)
        length = size / (direction @ image)
        x, residual = x + length * direction, residual - length * image
        smaller = residual @ residual
        direction, size = residual + smaller / size * direction, smaller
    return x


class PolicyKL:
    """Mean KL(policy at construction || current policy), weighted by the terms' weights. It holds the whole
    distribution of every term, M x V numbers: for small vocabularies and models."""

    def __init__(
        self,
        model: PreTrainedModel,
        parameters: Sequence[nn.Parameter],
        batches: Sequence[MicroBatch],
        sampling: Sampling,
        ranks: RankGroup = SINGLE_RANK,
    ):
        if model.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"model.dtype={model.dtype}: a trust region needs float32 weights. Write model.dtype=float32."
            )
        self.model, self.parameters, self.batches, self.sampling = model, parameters, batches, sampling
        self.ranks = ranks
        weights = [torch.from_numpy(batch.terms.weight).abs() for batch in batches]
        total = sum(ranks.all_gather(float(sum(w.sum() for w in weights))))
        self.shares = [(w / max(total, 1e-300)).to(model.device, model.dtype) for w in weights]
        with torch.no_grad():
            self.old = [self._current(batch) for batch in batches]

    def _current(self, batch: MicroBatch) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            return log_distributions(self.model, batch, self.sampling, DENSE)

    def _part(self, i: int) -> Tensor:
        old_MV, new_MV = self.old[i], self._current(self.batches[i])
        drawn = old_MV > -torch.inf  # truncated tokens contribute 0
        gap_MV = torch.where(drawn, old_MV - new_MV, 0.0)
        return (self.shares[i] * (old_MV.exp() * gap_MV).sum(-1)).sum()

    @torch.no_grad()
    def value(self) -> float:
        return sum(self.ranks.all_gather(sum(float(self._part(i)) for i in range(len(self.batches)))))

    def product(self, vector_P: Tensor) -> Tensor:
        """The KL's Hessian at the current weights, times a vector."""
        out_P = torch.zeros_like(vector_P)
        for i in range(len(self.batches)):
            with sdpa_kernel(SDPBackend.MATH):
                first = torch.autograd.grad(self._part(i), self.parameters, create_graph=True)
                along = torch.cat([g.reshape(-1) for g in first]) @ vector_P
                second = torch.autograd.grad(along, self.parameters)
            out_P += torch.cat([g.reshape(-1) for g in second])
        self.ranks.all_reduce([out_P])
        return out_P


def natural_step(
    parameters: Sequence[nn.Parameter],
    kl: PolicyKL,
    surrogate: Callable[[], float],
    before: float,
    settings: AlgorithmArgs,
) -> Metrics:
    """Move the parameters, whose `grad` is that of the loss; leave them if the line search finds no step."""
    gradient_P = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    norm = float(gradient_P.norm())
    metrics = {"learner/grad_norm": norm, "learner/skipped": 0.0, "learner/kl": 0.0, "learner/step_share": 0.0}
    if not torch.isfinite(gradient_P).all():
        return metrics | {"learner/skipped": 1.0, "learner/skipped/gradient": 1.0}
    if norm == 0.0:
        return metrics

    def damped(vector_P: Tensor) -> Tensor:
        return kl.product(vector_P) + settings.damping * vector_P

    direction_P = -conjugate_gradient(damped, gradient_P, settings.cg_iterations)
    curvature = float(direction_P @ damped(direction_P))
    if not curvature > 0:
        return metrics | {"learner/skipped": 1.0, "learner/skipped/curvature": 1.0}
    full_P = direction_P * (2 * settings.max_kl / curvature) ** 0.5
    start_P = parameters_to_vector(parameters).detach().clone()
    for shortened in range(settings.backtracks + 1):
        share = settings.backtrack_ratio**shortened
        _set_parameters(start_P + share * full_P, parameters)
        now, moved = surrogate(), kl.value()
        if now < before and moved <= settings.max_kl:
            return metrics | {"learner/kl": moved, "learner/step_share": share}
    _set_parameters(start_P, parameters)
    return metrics | {"learner/skipped": 1.0, "learner/skipped/line_search": 1.0}


def _set_parameters(vector_P: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Write into the parameters' own memory, which engines share."""
    taken = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(vector_P[taken : taken + parameter.numel()].view_as(parameter))
            taken += parameter.numel()
