"""Engines that sample from a copy of the weights: what they are sent, and how it is known to have arrived.

An update that goes wrong says nothing: sampling goes on, from the old weights or from half of the new ones, and the run
learns less. So after every update a copy is asked to sample a few tokens, and what it says of them must be what the
learner's model says of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from arborl.engines.engine import Weights
from arborl.engines.replicas import OtherWeights
from arborl.models.attention import Causal, library_hidden_states, logits
from arborl.models.sampling import Shape, log_distribution
from arborl.types import Completion, Sampling

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
"""Ids that every vocabulary has; what they mean does not matter."""
TOKENS = 8
"""Sampled for a probe."""
GAP = {"float32": 1e-3, "float64": 1e-3}
"""Mean difference of log-probabilities that rounding explains, by what the copy computes in."""
COARSE_GAP = 0.25


def whole(weights: Weights) -> dict[str, Tensor]:
    """The model's weights under the names that its files have, each once, without adapters."""
    found: dict[str, Tensor] = {}
    places: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if "lora_" in name or (place in places and tensor.numel()):
            continue
        places.add(place)
        found[name.replace(".base_layer.", ".")] = tensor
    return found


def adapters(weights: Weights) -> dict[str, Tensor]:
    """The adapters alone, under the names that peft's files have for them."""
    from arborl.models.lora import ADAPTER, PREFIX

    return {f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": t for name, t in weights.items() if "lora_" in name}


class _Scorer(nn.Module):
    """Next-token logits of every position of one sequence."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_N: Tensor) -> Tensor:
        positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
        return logits(self.model, library_hidden_states(self.model, tokens_N, positions_N, Causal()))


@dataclass(slots=True)
class Probe:
    """Compares a copy with the learner's model.

    Args:
        model: the learner's.
        sampling: how the run draws; log-probabilities must be those of that distribution.
        dtype: what the copy computes in.
    """

    model: PreTrainedModel
    sampling: Sampling
    dtype: str

    @property
    def question(self) -> Sampling:
        """What a copy is asked, after `PROMPT`."""
        return replace(self.sampling, max_tokens=TOKENS, stop=(), stop_texts=(), seed=7, seconds=None)

    @torch.no_grad()
    def expected(self, tokens: tuple[int, ...], weights: Weights) -> list[float]:
        """What the model with these weights says of tokens that follow `PROMPT`."""
        device = self.model.device
        read_N = torch.tensor([*PROMPT, *tokens[:-1]], device=device)
        own = self.model.state_dict()
        given = {f"model.{name}": t for name, t in weights.items() if own[name].data_ptr() != t.data_ptr()}
        scorer = _Scorer(self.model)  # and the model as it is, where these are its own: others may be using it
        said_NV = functional_call(scorer, given, (read_N,), tie_weights=False) if given else scorer(read_N)
        said_NV = said_NV[len(PROMPT) - 1 :]
        token_N = torch.tensor(tokens, device=device)
        scores_NV = log_distribution(said_NV, Shape.of([self.sampling], device), token_N)
        return [float(x) for x in scores_NV.gather(1, token_N[:, None])[:, 0]]

    def check(self, said: Completion, weights: Weights, whose: str, hint: str = "") -> float:
        """The mean difference; OtherWeights where it is more than rounding explains."""
        if not said.tokens:
            raise OtherWeights(f"{whose} sampled nothing when it was asked for {TOKENS} tokens")
        expected = self.expected(said.tokens, weights)
        gap = sum(abs(a - b) for a, b in zip(said.logprobs, expected, strict=True)) / len(expected)
        allowed = GAP.get(self.dtype, COARSE_GAP)
        if not gap <= allowed:
            raise OtherWeights(
                f"{whose} does not say what the learner's model says: after an update, the log-probabilities of "
                f"{len(expected)} tokens differ by {gap:.2g} on average, where {allowed:g} is allowed for "
                f"{self.dtype}. It samples from other weights, or from another distribution.{hint}"
            )
        return gap


def versions_of(spans: list[tuple[int, int, int]], count: int) -> list[int]:
    """The version of each of `count` tokens, from (version, begin, end).

    Example:
        versions_of([(3, 0, 2), (4, 2, 5)], 4)      # [3, 3, 4, 4]
    """
    return [version for version, begin, end in spans for _ in range(begin, min(end, count))]


def label_of(label: str, run: str) -> int | None:
    """The version in a label that this engine has given (`run:version`); None in any other."""
    mine, _, version = label.rpartition(":")
    return int(version) if mine == run and version.lstrip("-").isdigit() else None


def params(sampling: Sampling, context: int, prompt: int) -> Mapping[str, object]:
    """How to draw, in the words that vLLM has for it; stop texts are ours to find."""
    return {
        "max_tokens": min(sampling.max_tokens, context - prompt),
        "temperature": float(sampling.temperature),
        "top_k": int(sampling.top_k) if 0 < sampling.top_k < 2**31 else 0,
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p),
        "seed": int(sampling.seed) % 2**63,
        "stop_token_ids": [int(token) for token in sampling.stop],
    }
