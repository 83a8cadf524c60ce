"""Run the model once over a micro-batch of trees and read off the log-probability of every term.

N tokens, M terms. The language-model head runs at predicting positions only, in chunks, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arborl.learner.attend import attend_over
from arborl.learner.batch import MicroBatch
from arborl.models.attention import logits
from arborl.models.distribution import Shape, log_distribution
from arborl.models.lean import hidden_states
from arborl.types import Sampling

HEAD_CHUNK = 4096
"""Terms whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says about each term."""

    logprob_M: Tensor
    entropy_M: Tensor
    """Of the distribution each token was drawn from; no gradient."""


def score(model: PreTrainedModel, batch: MicroBatch, sampling: Sampling) -> Scores:
    """Log-probabilities under the distribution that was sampled from."""
    device = model.device
    shape = Shape.of([sampling], device)
    tokens, depth, position, token = (
        torch.from_numpy(column).to(device)
        for column in (batch.tokens, batch.depth, batch.terms.position, batch.terms.token)
    )
    hidden_NE = hidden_states(model, tokens, depth, attend_over(batch, device))
    logprobs, entropies = [], []
    for places, targets in zip(position.split(HEAD_CHUNK), token.split(HEAD_CHUNK), strict=True):
        logprob, entropy = checkpoint(_head, model, hidden_NE[places], targets, shape, use_reentrant=False)
        logprobs.append(logprob)
        entropies.append(entropy)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _head(model: PreTrainedModel, hidden_ME: Tensor, token_M: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    log_MV = log_distribution(logits(model, hidden_ME), shape, token_M)
    with torch.no_grad():
        entropy_M = -(log_MV.exp() * log_MV.clamp(min=-1e4)).sum(-1)  # a token that cannot be drawn adds nothing
    return log_MV.gather(1, token_M[:, None])[:, 0], entropy_M
