"""What engines with a copy of the weights are sent at an update, and how the update is verified.

A failed update is silent: sampling continues from the old weights or from half of the new ones, and the run learns
less. After every update the copy therefore samples a few tokens, and its log-probabilities must equal the learner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from arborl.engines.engine import Weights
from arborl.engines.remote.replicas import WeightMismatch
from arborl.models.attention import CausalAttention, library_hidden_states, logits
from arborl.models.sampling import DistributionParams, sampling_logprobs
from arborl.types import Completion, Sampling

PROBE_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
"""Ids that every vocabulary has."""
PROBE_TOKENS = 8
MAX_LOGPROB_GAP = {"float32": 1e-3, "float64": 1e-3}
"""Allowed mean difference of log-probabilities, by the precision of the copy."""
MAX_COARSE_GAP = 0.25
"""The same for other precisions."""


def base_weights(weights: Weights) -> dict[str, Tensor]:
    """The model's weights under the names of its files, each tensor once, without adapters."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if "lora_" in name or (place in seen and tensor.numel()):
            continue
        seen.add(place)
        found[name.replace(".base_layer.", ".")] = tensor
    return found


def adapter_weights(weights: Weights) -> dict[str, Tensor]:
    """The adapters under the names of peft's files."""
    from arborl.models.lora import ADAPTER_NAME, ADAPTER_PREFIX

    return {
        f"{ADAPTER_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}": tensor
        for name, tensor in weights.items()
        if "lora_" in name
    }


class _NextTokenLogits(nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, tokens_N: Tensor) -> Tensor:
        positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
        return logits(self.model, library_hidden_states(self.model, tokens_N, positions_N, CausalAttention()))


@dataclass(slots=True)
class WeightProbe:
    model: PreTrainedModel
    sampling: Sampling
    dtype: str

    @property
    def question(self) -> Sampling:
        """Sampling parameters of the probe, whose prompt is `PROBE_PROMPT`."""
        return replace(self.sampling, max_tokens=PROBE_TOKENS, stop=(), stop_texts=(), seed=7, seconds=None)

    @torch.no_grad()
    def expected(self, tokens: tuple[int, ...], weights: Weights) -> list[float]:
        """Log-probabilities of `tokens` after `PROBE_PROMPT` by the model with these weights."""
        device = self.model.device
        input_N = torch.tensor([*PROBE_PROMPT, *tokens[:-1]], device=device)
        state = self.model.state_dict()
        changed = {f"model.{name}": t for name, t in weights.items() if state[name].data_ptr() != t.data_ptr()}
        scorer = _NextTokenLogits(self.model)  # unchanged tensors are used in place
        logits_NV = functional_call(scorer, changed, (input_N,), tie_weights=False) if changed else scorer(input_N)
        logits_NV = logits_NV[len(PROBE_PROMPT) - 1 :]
        token_N = torch.tensor(tokens, device=device)
        logprob_NV = sampling_logprobs(logits_NV, DistributionParams.of([self.sampling], device), token_N)
        return [float(x) for x in logprob_NV.gather(1, token_N[:, None])[:, 0]]

    def check(self, completion: Completion, weights: Weights, name: str, hint: str = "") -> float:
        """The mean difference of log-probabilities; raises WeightMismatch if it exceeds rounding errors."""
        if not completion.tokens:
            raise WeightMismatch(f"{name} sampled nothing for a request of {PROBE_TOKENS} tokens")
        expected = self.expected(completion.tokens, weights)
        gap = sum(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)) / len(expected)
        allowed = MAX_LOGPROB_GAP.get(self.dtype, MAX_COARSE_GAP)
        if not gap <= allowed:
            raise WeightMismatch(
                f"{name} does not match the learner's model: after an update the log-probabilities of {len(expected)} "
                f"tokens differ by {gap:.2g} on average; {allowed:g} is allowed for {self.dtype}. It samples from "
                f"other weights or from another distribution.{hint}"
            )
        return gap


def token_versions(spans: list[tuple[int, int, int]], count: int) -> list[int]:
    """The version of each of `count` tokens, from (version, begin, end)."""
    return [version for version, begin, end in spans for _ in range(begin, min(end, count))]


def label_version(label: str, run: str) -> int | None:
    """The version in a label `run:version` of this run; None for any other label."""
    prefix, _, version = label.rpartition(":")
    return int(version) if prefix == run and version.lstrip("-").isdigit() else None


def span_versions(spans: list[tuple[str, int, int]], count: int, run: str) -> list[int]:
    """The version of each of `count` tokens, from labelled spans; shorter if some labels are not of this run."""
    labelled = [(label_version(label, run), begin, end) for label, begin, end in spans]
    return token_versions([(v, begin, end) for v, begin, end in labelled if v is not None], count)


def sampling_params(sampling: Sampling, context: int, prompt: int) -> Mapping[str, object]:
    """vLLM's `SamplingParams` as a dict; stop texts are detected by the engine."""
    return {
        "max_tokens": min(sampling.max_tokens, context - prompt),
        "temperature": float(sampling.temperature),
        "top_k": int(sampling.top_k) if 0 < sampling.top_k < 2**31 else 0,
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p),
        "seed": int(sampling.seed) % 2**63,
        "stop_token_ids": [int(token) for token in sampling.stop],
    }
