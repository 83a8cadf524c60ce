"""The interface of one forward pass on a device: new tokens in, one sampled token out per selected sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.engines.local.fused_forward import FusedForward, TorchLayerOps
from arborl.engines.local.kv_cache import Array, AttentionMetadata, KVCache, TorchAttention
from arborl.engines.local.sampler import SamplingBatch, TopTokens, sample_tokens
from arborl.models.attention import library_hidden_states, logits


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The input of one step. Sequences with one new token come first."""

    tokens: NDArray[np.int32]
    """New tokens of all sequences, concatenated; -1 - i stands for the i-th token sampled by the previous step."""
    metadata: AttentionMetadata
    sampled: Array
    """Indices of the sequences that get a next token."""
    sampling: SamplingBatch


class StepOutput(Protocol):
    @property
    def top(self) -> TopTokens | None:
        """The likeliest tokens of the sampled sequences, if requested."""
        ...

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...


class CacheStorage(Protocol):
    """Keys and values in blocks."""

    @property
    def can_sleep(self) -> bool:
        return False

    def sleep(self) -> None:
        return None

    def wake_up(self) -> None:
        return None

    def copy(self, source: int, target: int, count: int) -> None: ...

    def clear(self, num_blocks: int | None = None) -> None: ...


class ModelRunner(Protocol):
    """Runs steps on a device; owns the KV cache."""

    @property
    def cache(self) -> CacheStorage: ...

    runs_ahead: bool
    """Whether the next step may be launched before this one's output is known."""
    copies_weights: bool
    """Whether it samples from a copy of the weights, made by `weights_changed`; otherwise from the model's own, which
    must not change during a step."""

    def launch(self, step: ModelStep) -> StepOutput: ...

    def token_budget(self, tokens: int) -> int:
        """Maximum new tokens of the next step when `tokens` wait; the rest waits for the following step."""
        ...

    def weights_changed(self) -> None: ...

    def warm_up(self, truncates: bool) -> None:
        """Compile and record what steps need; `truncates` as in `Sampling`."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top: TopTokens | None = None

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self.tokens, self.logprobs


class TorchModelRunner:
    runs_ahead = False
    copies_weights = False
    max_tokens = 4096

    def __init__(self, forward: FusedForward, num_blocks: int, block_size: int, sleep_mode: bool = False):
        self.forward, self.model = forward, forward.model
        self.cache = KVCache(self.model, num_blocks, block_size, sleep_mode)

    @torch.inference_mode()
    def launch(self, step: ModelStep) -> StepOutput:
        device = self.model.device
        tokens = torch.from_numpy(step.tokens.astype(np.int64)).to(device)
        positions = torch.from_numpy(step.metadata.positions).to(device)
        hidden_NE = self._hidden_states(tokens, positions, TorchAttention(self.cache, step.metadata))
        if not len(step.sampled):
            return FinishedOutput(np.zeros(0, np.int64), np.zeros(0))
        last = np.cumsum(step.metadata.counts)[step.sampled] - 1
        if len(last) < len(hidden_NE):
            hidden_NE = hidden_NE[torch.from_numpy(last).to(device)]
        token_B, logprob_B, top = sample_tokens(logits(self.model, hidden_NE), step.sampling)
        return FinishedOutput(token_B.cpu().numpy(), logprob_B.double().cpu().numpy(), top)

    def token_budget(self, tokens: int) -> int:
        return self.max_tokens

    def layer_ops(self, step: ModelStep, prefill: bool) -> TorchLayerOps:
        positions = torch.from_numpy(step.metadata.positions).to(self.model.device)
        return TorchLayerOps(self.model, TorchAttention(self.cache, step.metadata), positions)

    def _hidden_states(self, tokens: Tensor, positions: Tensor, attend: TorchAttention) -> Tensor:
        if self.forward.is_fused:
            return self.forward(tokens, TorchLayerOps(self.model, attend, positions))
        return library_hidden_states(self.model, tokens, positions, attend)

    def weights_changed(self) -> None:
        self.forward.refresh()

    def warm_up(self, truncates: bool) -> None:
        """Nothing to compile."""
