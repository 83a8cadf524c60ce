"""The forward pass over a micro-batch of trees: log-probability, entropy and value of every term.

M terms, E model size, V vocabulary. The language-model head runs only at predicting positions, in float32 and in
chunks; with several chunks the logits are computed again in the backward pass instead of kept.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arborl.algorithms.token_losses import ModelOutputs
from arborl.config.training_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.attention.fused_layers import fused_head
from arborl.learner.attention.path_selection import ATTENTION_BACKENDS, ExecutionPath, hidden_states
from arborl.learner.core.memory_forecast import logit_rows
from arborl.learner.core.packing import (
    ForwardCosts,
    MicroBatch,
    Trees,
    padding_micro_batch,
    prune_tree,
    rows_are_cheaper,
    split,
    upload,
)
from arborl.learner.distributed.rank_group import SINGLE_RANK, RankGroup
from arborl.models.attention import head_logits, logit_cap
from arborl.models.model_loading import compute_device
from arborl.models.output_heads import CriticInit, ValueHead
from arborl.models.sampling import DistributionParams, processed_logits, sampling_logprobs
from arborl.types import Floats, Sampling, Terms, TokenTree

log = logging.getLogger(__name__)

MAX_CPU_LOGITS = 2**26  # logits in memory at once on a CPU: 256 MiB in float32
MAX_CPU_ROWS = 4096
MAX_SQUARE_TOKENS = 16_384
"""Tokens of a micro-batch whose attention keeps a square per tree, which the memory forecast does not count."""


def compute_outputs(
    model: PreTrainedModel,
    batch: MicroBatch,
    sampling: Sampling,
    path: ExecutionPath,
    critic: Critic | None = None,
    entropy: bool = False,
) -> ModelOutputs:
    """Log-probabilities under the distribution that was sampled from; `sampling` is for terms that carry none of their
    own. The entropy has a gradient if `entropy`."""
    hidden_ME = hidden_states(model, batch, path)
    head = _fused_head if path.fused else _unfused_head
    logprobs, entropies = [], []
    for part_ME, token_M, shape in _chunks(model, hidden_ME, batch, sampling, path):
        args = (model.get_output_embeddings(), logit_cap(model), part_ME, token_M, shape, entropy)
        single = len(token_M) == len(batch.terms)  # recomputing the logits of a single chunk would save nothing
        logprob_M, entropy_M = head(*args) if single else checkpoint(head, *args, use_reentrant=False)
        logprobs.append(logprob_M)
        entropies.append(entropy_M)
    value_M = critic(hidden_ME, batch, path) if critic is not None else None
    return ModelOutputs(torch.cat(logprobs), torch.cat(entropies), value_M)


def log_distributions(model: PreTrainedModel, batch: MicroBatch, sampling: Sampling, path: ExecutionPath) -> Tensor:
    return torch.cat(
        [
            sampling_logprobs(head_logits(model.get_output_embeddings(), logit_cap(model), part_ME), shape, token_M)
            for part_ME, token_M, shape in _chunks(model, hidden_states(model, batch, path), batch, sampling, path)
        ]
    )


@cache
def _shape(sampling: Sampling, device: torch.device) -> DistributionParams:
    return DistributionParams.of([sampling], device)


def max_logit_rows(device: torch.device, vocabulary: int, fused: bool) -> int:
    if device.type == "cuda":
        return logit_rows(torch.cuda.get_device_properties(device).total_memory, vocabulary, fused)
    return max(1, min(MAX_CPU_ROWS, MAX_CPU_LOGITS // vocabulary))


def _chunks(
    model: PreTrainedModel, hidden_ME: Tensor, batch: MicroBatch, sampling: Sampling, path: ExecutionPath
) -> Iterator[tuple[Tensor, Tensor, DistributionParams]]:
    """Hidden states, tokens and sampling shape in chunks; the shape has one row per term if terms carry their own."""
    rows = max_logit_rows(hidden_ME.device, model.config.vocab_size, path.fused)
    (token,) = upload(hidden_ME.device, batch.terms.token)
    if batch.terms.drawn is None and batch.terms.allowed is None:
        shapes: Iterator[DistributionParams] = repeat(_shape(sampling, hidden_ME.device))
    else:
        shapes = DistributionParams.from_terms(batch.terms, sampling, hidden_ME.device).split(rows)
    yield from zip(hidden_ME.split(rows), token.split(rows), shapes, strict=False)


def _unfused_head(
    head: Any, cap: float | None, hidden_ME: Tensor, token_M: Tensor, shape: DistributionParams, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy from sums over the logits, without materializing all log-probabilities."""
    logit_MV = processed_logits(head_logits(head, cap, hidden_ME), shape, token_M)
    lse_M = logit_MV.logsumexp(-1)
    logprob_M = logit_MV.gather(1, token_M[:, None])[:, 0] - lse_M
    if not entropy:
        logit_MV, lse_M = logit_MV.detach(), lse_M.detach()
    finite_MV = logit_MV.clamp(min=-1e30) if shape.excludes else logit_MV  # excluded tokens contribute 0
    return logprob_M, lse_M - ((logit_MV - lse_M[:, None]).exp() * finite_MV).sum(-1)


def _fused_head(
    head: Any, cap: float | None, hidden_ME: Tensor, token_M: Tensor, shape: DistributionParams, entropy: bool
) -> tuple[Tensor, Tensor]:
    if cap is not None:
        return _unfused_head(head, cap, hidden_ME, token_M, shape, entropy)
    return fused_head(head, hidden_ME, token_M, shape, entropy)


def check_critic(config: LearnerConfig, needed: bool) -> None:
    if needed and config.critic == "none":
        raise ConfigError("learner.critic=none: the advantage needs values. Write learner.critic=shared or separate.")
    if not needed and (config.critic in ("shared", "detached", "separate") or config.critic_from is not None):
        raise ConfigError("learner.critic: the advantage uses no values. Write learner.critic=auto.")


class Critic(nn.Module):
    """Predicts a value at each predicting position: a head on the policy's hidden states (`detach`: without gradient
    into the policy), or a separate model, initially the policy's or `origin`'s. The initial value is 0, unless it
    starts from a reward model."""

    def __init__(self, model: PreTrainedModel, separate: bool, detach: bool = False, origin: CriticInit | None = None):
        super().__init__()
        self.trunk: PreTrainedModel | None = None
        if origin is not None:
            self.trunk, self.head = origin.trunk, ValueHead(origin.trunk, origin.weight, origin.bias)
        else:
            self.trunk = copy.deepcopy(model) if separate else None
            self.head = ValueHead(model)
        self.detach = detach

    def forward(self, hidden_ME: Tensor, batch: MicroBatch, path: ExecutionPath) -> Tensor:
        """One value per term; `hidden_ME` are the policy's hidden states at the predicting positions."""
        if self.trunk is not None:
            hidden_ME = hidden_states(self.trunk, batch, path)
        elif self.detach:
            hidden_ME = hidden_ME.detach()
        return self.head(hidden_ME)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The critic's own parameters that its value depends on; a checkpoint holds these."""
        used = {id(p) for p in self.head.parameters()}
        if self.trunk is not None:
            used |= {id(p) for p in self.trunk.base_model.parameters()}
        return {name: p for name, p in self.named_parameters() if p.requires_grad and id(p) in used}

    def load(self, saved: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained_parameters().items():
                parameter.copy_(saved[name])


class PolicyWithCritic(nn.Module):
    """A model and its critic as one module, so that sharding libraries can hook into its call."""

    def __init__(self, policy: PreTrainedModel, critic: Critic | None = None):
        super().__init__()
        self.policy, self.critic = policy, critic
        self.train(policy.training)

    def forward(
        self, batch: MicroBatch, sampling: Sampling, path: ExecutionPath, value: bool = False, entropy: bool = False
    ) -> tuple[Tensor, ...]:
        """Log-probabilities, entropies and with `value` values; a tuple of tensors, as hooks expect."""
        outputs = compute_outputs(self.policy, batch, sampling, path, self.critic if value else None, entropy)
        both = (outputs.logprob_M, outputs.entropy_M)
        return both if outputs.value_M is None else (*both, outputs.value_M)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    model: PreTrainedModel
    call: Callable[..., Any]  # a `PolicyWithCritic`, or an engine around one

    @classmethod
    def local(cls, model: PreTrainedModel) -> PlacedModel:
        return cls(model, PolicyWithCritic(model))

    def __call__(
        self, batch: MicroBatch, sampling: Sampling, path: ExecutionPath, value: bool = False, entropy: bool = False
    ) -> ModelOutputs:
        logprob_M, entropy_M, *rest = self.call(batch, sampling, path, value, entropy)
        return ModelOutputs(logprob_M, entropy_M, rest[0] if rest else None)


ScoreTerms = Callable[[Trees, Terms], tuple[Floats, Floats]]
"""Two numbers per term: log-probability and value."""


def score_separately(run: ScoreTerms, trees: Trees, terms: Terms) -> tuple[Floats, Floats]:
    """The result of `run`, repeated tree by tree and episode by episode where numbers are not finite: a NaN spreads
    to all tokens in the same attention call."""
    logprob, value = run(trees, terms)
    bad = np.unique(terms.tree[~np.isfinite(logprob + value)])
    if len(np.unique(terms.tree)) > 1:
        for number in bad:
            rows = np.flatnonzero(terms.tree == number)
            logprob[rows], value[rows] = score_separately(run, trees, terms.pick(rows))
    elif len(bad) and len(np.unique(terms.episode)) > 1:
        for number in np.unique(terms.episode):
            rows = np.flatnonzero(terms.episode == number)
            tree, position = prune_tree(trees[int(bad[0])], terms.position[rows])
            episode = dataclasses.replace(terms.pick(rows), tree=np.zeros_like(rows), position=position)
            logprob[rows], value[rows] = score_separately(run, [tree], episode)
    return logprob, value


T = TypeVar("T")


class MicroBatcher:
    """Splits batches and remembers the size that fits."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, lockstep: RankGroup = SINGLE_RANK):
        self.attention, self.lockstep = config.attention, lockstep
        self.cuda, self.costs = compute_device(model).device.type == "cuda", model_costs(model)
        self.kernel = self.attention in ("auto", "kernel") and ATTENTION_BACKENDS["kernel"].supports(model)
        self.budget = config.micro_batch_tokens or (16_384 if self.cuda else 4_096)
        """Tokens per micro-batch; smaller than the setting after an out-of-memory error."""

    def split(self, trees: Trees, terms: Terms, square: bool = False) -> list[MicroBatch]:
        """The batch in micro-batches; `square`: attention costs the square of each tree, so trees are not merged."""
        merge = self.kernel and not square  # the kernels skip pairs of tokens that do not see each other
        as_rows: Callable[[TokenTree], bool] | None = None
        if self.attention == "causal":
            as_rows = lambda tree: True  # noqa: E731
        elif self.attention == "auto" and not merge and not self.cuda:  # on a GPU a row costs as much as a tree
            as_rows = lambda tree: rows_are_cheaper(tree, self.costs)  # noqa: E731
        budget = min(self.budget, MAX_SQUARE_TOKENS) if square else self.budget
        batches = split(trees, terms, budget, as_rows, merge)
        if self.lockstep.is_distributed:
            batches += [padding_micro_batch()] * (max(self.lockstep.all_gather(len(batches))) - len(batches))
        return batches

    def run(self, trees: Trees, terms: Terms, work: Callable[[list[MicroBatch]], T], undo: Callable[[], None]) -> T:
        """Call `work` with the micro-batches. After an out-of-memory error, reduce the size and call it again."""
        failed = 0
        while True:
            batches = self.split(trees, terms)
            largest = max((len(batch) for batch in batches), default=0)
            if failed and largest >= failed:
                raise torch.OutOfMemoryError(
                    f"a single branch of {largest} tokens does not fit into the GPU's memory. Write "
                    "learner.recompute=true, or a smaller sampling.max_context."
                )
            try:
                return work(batches)
            except torch.OutOfMemoryError as error:
                if self.lockstep.is_distributed:  # the other ranks wait inside a collective operation
                    raise torch.OutOfMemoryError(
                        f"rank {self.lockstep.rank} has no memory for micro-batches of {self.budget} tokens. Write "
                        f"learner.micro_batch_tokens={max(1, self.budget // 2)}, or learner.recompute=true."
                    ) from error
                reason = str(error).splitlines()[0] if str(error) else "out of memory"
            failed, self.budget = largest, max(1, min(self.budget, largest) // 2)
            log.warning("%s; the run continues with learner.micro_batch_tokens=%d", reason, self.budget)
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def model_costs(model: PreTrainedModel) -> ForwardCosts:
    """Multiplications per layer: about one per weight and token, and 2 × hidden size per pair of tokens."""
    layers = model.config.num_hidden_layers
    inside = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    return ForwardCosts(inside / layers, 2.0 * model.config.hidden_size)
