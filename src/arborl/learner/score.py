"""Run the model once over a micro-batch of trees and read off the log-probability of every term.

N tokens, M terms. The language-model head runs at predicting positions only, in chunks, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arborl.learner.batch import MicroBatch
from arborl.models.attention import hidden_states, logits

HEAD_CHUNK = 4096
"""Terms whose logits are held at once."""


class TreeAttend:
    """Attention over trees: token q sees token k exactly when k <= q < end[k], within its own tree."""

    def __init__(self, lengths: tuple[int, ...], end_N: Tensor):
        self.lengths = lengths
        self.masks = []
        start = 0
        for length in lengths:
            end = end_N[start : start + length] - start
            place = torch.arange(length, device=end_N.device)
            self.masks.append((place[None] <= place[:, None]) & (place[:, None] < end[None]))
            start += length

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        outs = []
        parts = zip(*(x.split(self.lengths) for x in (q_NHD, k_NKD, v_NKD)), self.masks, strict=True)
        for q, k, v, mask in parts:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model says about each term."""

    logprob_M: Tensor
    entropy_M: Tensor
    """Of the distribution each token was drawn from; no gradient."""


def score(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Scores:
    """Log-probabilities under the distribution that was sampled from: logits divided by the temperature."""
    device = model.device
    tokens, depth, end, position, token = (
        torch.from_numpy(column).to(device)
        for column in (batch.tokens, batch.depth, batch.end, batch.terms.position, batch.terms.token)
    )
    hidden_NE = hidden_states(model, tokens, depth, TreeAttend(batch.lengths, end))
    logprobs, entropies = [], []
    for places, targets in zip(position.split(HEAD_CHUNK), token.split(HEAD_CHUNK), strict=True):
        logprob, entropy = checkpoint(_head, model, hidden_NE[places], targets, temperature, use_reentrant=False)
        logprobs.append(logprob)
        entropies.append(entropy)
    return Scores(torch.cat(logprobs), torch.cat(entropies))


def _head(model: PreTrainedModel, hidden_ME: Tensor, token_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_MV = torch.log_softmax(logits(model, hidden_ME) / temperature, dim=-1)
    with torch.no_grad():
        entropy_M = -(log_MV.exp() * log_MV).sum(-1)
    return log_MV.gather(1, token_M[:, None])[:, 0], entropy_M
