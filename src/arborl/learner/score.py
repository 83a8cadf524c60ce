"""Run the model once over a micro-batch of trees and read off what it says about every term.

M terms, V tokens of the vocabulary. The language-model head runs at predicting positions only, in chunks
whose logits are not kept for the gradient where there are several, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arborl.algorithms.token_losses import Said
from arborl.learner.critic import Critic
from arborl.learner.executor import Way, hidden
from arborl.learner.forecast import logit_rows
from arborl.learner.fused_layers import fused_head
from arborl.learner.packing import MicroBatch
from arborl.learner.upload import upload
from arborl.models.attention import head_logits, logit_cap
from arborl.models.sampling import DistributionParams, processed_logits, sampling_logprobs
from arborl.types import Sampling

LOGITS_AT_ONCE = 2**26
"""Logits held at a time on a CPU: a quarter of a gigabyte in float32."""
ROWS_AT_ONCE = 4096


def score(
    model: PreTrainedModel,
    batch: MicroBatch,
    sampling: Sampling,
    way: Way,
    critic: Critic | None = None,
    entropy: bool = False,
) -> Said:
    """Log-probabilities under the distribution that was sampled from.

    Args:
        sampling: how the rollout draws tokens whose terms say nothing else.
        way: see `executor.Ways`.
        critic: asked for a value at each predicting position.
        entropy: whether the entropy carries a gradient.
    """
    hidden_ME = hidden(model, batch, way)
    run = _fused_head if way.fused else _head
    logprobs, entropies = [], []
    for some_ME, token_M, shape in _chunks(model, hidden_ME, batch, sampling, way):
        given = (model.get_output_embeddings(), logit_cap(model), some_ME, token_M, shape, entropy)
        alone = len(token_M) == len(batch.terms)  # then nothing is gained by letting its logits go
        logprob, spread = run(*given) if alone else checkpoint(run, *given, use_reentrant=False)
        logprobs.append(logprob)
        entropies.append(spread)
    value = None
    if critic is not None:
        value = critic(hidden_ME, batch, way)
    return Said(torch.cat(logprobs), torch.cat(entropies), value)


def distributions(model: PreTrainedModel, batch: MicroBatch, sampling: Sampling, way: Way) -> Tensor:
    """The whole log-distribution each term was drawn from, `[M, V]`; it may be differentiated twice."""
    return torch.cat(
        [
            sampling_logprobs(head_logits(model.get_output_embeddings(), logit_cap(model), some_ME), shape, token_M)
            for some_ME, token_M, shape in _chunks(model, hidden(model, batch, way), batch, sampling, way)
        ]
    )


@cache
def _shape(sampling: Sampling, device: torch.device) -> DistributionParams:
    return DistributionParams.of([sampling], device)


def rows_at_once(device: torch.device, vocabulary: int, fused: bool) -> int:
    """Terms whose logits are there at a time."""
    if device.type == "cuda":
        return logit_rows(torch.cuda.get_device_properties(device).total_memory, vocabulary, fused)
    return max(1, min(ROWS_AT_ONCE, LOGITS_AT_ONCE // vocabulary))


def _chunks(
    model: PreTrainedModel, hidden_ME: Tensor, batch: MicroBatch, sampling: Sampling, way: Way
) -> Iterator[tuple[Tensor, Tensor, DistributionParams]]:
    """The terms in parts: what the model says, the token, and what it was drawn from: one shape where it is the run's
    for all, one row a term else."""
    rows = rows_at_once(hidden_ME.device, model.config.vocab_size, way.fused)
    (token,) = upload(hidden_ME.device, batch.terms.token)
    if batch.terms.drawn is None:
        shapes: Iterator[DistributionParams] = repeat(_shape(sampling, hidden_ME.device))
    else:
        shapes = DistributionParams.from_terms(batch.terms.drawn, sampling, hidden_ME.device).split(rows)
    yield from zip(hidden_ME.split(rows), token.split(rows), shapes, strict=False)


def _head(
    head: Any, cap: float | None, hidden_ME: Tensor, token_M: Tensor, shape: DistributionParams, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Not by way of all log-probabilities: what is needed of them are sums over the logits, and few passes do."""
    logit_MV = processed_logits(head_logits(head, cap, hidden_ME), shape, token_M)
    total_M = logit_MV.logsumexp(-1)
    logprob_M = logit_MV.gather(1, token_M[:, None])[:, 0] - total_M
    if not entropy:
        logit_MV, total_M = logit_MV.detach(), total_M.detach()
    finite_MV = logit_MV.clamp(min=-1e30) if shape.truncates else logit_MV  # what cannot be drawn adds nothing
    return logprob_M, total_M - ((logit_MV - total_M[:, None]).exp() * finite_MV).sum(-1)


def _fused_head(
    head: Any, cap: float | None, hidden_ME: Tensor, token_M: Tensor, shape: DistributionParams, entropy: bool
) -> tuple[Tensor, Tensor]:
    if cap is not None or shape.truncates:
        return _head(head, cap, hidden_ME, token_M, shape, entropy)
    return fused_head(head, hidden_ME, token_M, shape, entropy)
