"""Running one step on a device: new tokens in, one sampled token out for each row that asked for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.engines.cache import Array, Cache, Reading, TorchAttend
from arborl.engines.draw_tokens import Draws, Top, draw
from arborl.engines.forward import Forward, TorchOps
from arborl.models.attention import library_hidden_states, logits


@dataclass(frozen=True, slots=True)
class Step:
    """What to run. Rows that bring one token come first."""

    tokens: NDArray[np.int32]
    """The new tokens of all rows, one after the other; below 0 where the host does not know it yet: -1 - i is the i-th
    token sampled by the step before."""
    reading: Reading
    sampled: Array
    """The rows that get a next token, as indices into the reading's."""
    draws: Draws
    """One entry a sampled row."""


class Sampled(Protocol):
    """The outcome of a step, on its way."""

    @property
    def top(self) -> Top | None:
        """The likeliest tokens of the sampled rows, where the draws ask for them."""
        ...

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens and log-probabilities of the sampled rows."""
        ...


class Stored(Protocol):
    """Keys and values of what has been read, in pages."""

    @property
    def lends(self) -> bool:
        """Whether `give_back` gives something."""
        return False

    def give_back(self) -> None:
        """Let others have the memory, and with it all that was read, until `take`."""
        return None

    def take(self) -> None:
        """Have memory again, where it was given back: with zeros."""
        return None

    def copy(self, source: int, target: int, count: int) -> None:
        """Give page `target` the first `count` tokens of `source`."""
        ...

    def clear(self, pages: int | None = None) -> None:
        """Zeros in the first `pages` pages again, or in all."""
        ...


class Executor(Protocol):
    """Owns the cache's tensors and the way through the model."""

    @property
    def cache(self) -> Stored: ...

    ahead: bool
    """Whether the next step may be launched before this one's outcome is known."""
    own_weights: bool
    """Whether it samples from weights of its own, as they were when `weights_changed` was last called; else from the
    model's, which nobody may change meanwhile."""

    def launch(self, step: Step) -> Sampled: ...

    def at_once(self, tokens: int) -> int:
        """New tokens the next step may bring in all, where so many wait to be read; the rest waits for the next."""
        ...

    def weights_changed(self) -> None:
        """Called after the model's weights were replaced or updated."""
        ...

    def warm(self, truncates: bool) -> None:
        """Make now what steps would else make when they first need it; `truncates` as `Sampling` has it."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """An outcome that is there already."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top: Top | None = None

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self.tokens, self.logprobs


class TorchExecutor:
    """With torch operations alone, on any device."""

    ahead = False
    own_weights = False
    many = 4096

    def __init__(self, forward: Forward, pages: int, page_size: int, lends: bool = False):
        self.forward, self.model = forward, forward.model
        self.cache = Cache(self.model, pages, page_size, lends)

    @torch.inference_mode()
    def launch(self, step: Step) -> Sampled:
        device = self.model.device
        tokens = torch.from_numpy(step.tokens.astype(np.int64)).to(device)
        positions = torch.from_numpy(step.reading.positions).to(device)
        hidden_NE = self._hidden(tokens, positions, TorchAttend(self.cache, step.reading))
        if not len(step.sampled):
            return Ready(np.zeros(0, np.int64), np.zeros(0))
        last = np.cumsum(step.reading.counts)[step.sampled] - 1
        if len(last) < len(hidden_NE):
            hidden_NE = hidden_NE[torch.from_numpy(last).to(device)]
        token_B, logprob_B, top = draw(logits(self.model, hidden_NE), step.draws)
        return Ready(token_B.cpu().numpy(), logprob_B.double().cpu().numpy(), top)

    def at_once(self, tokens: int) -> int:
        return self.many

    def ops(self, step: Step, reads: bool) -> TorchOps:
        """What runs between the products of a step, for checks; a prompt is read as tokens are sampled."""
        positions = torch.from_numpy(step.reading.positions).to(self.model.device)
        return TorchOps(self.model, TorchAttend(self.cache, step.reading), positions)

    def _hidden(self, tokens: Tensor, positions: Tensor, attend: TorchAttend) -> Tensor:
        if self.forward.fused:
            return self.forward(tokens, TorchOps(self.model, attend, positions))
        return library_hidden_states(self.model, tokens, positions, attend)

    def weights_changed(self) -> None:
        self.forward.refresh()

    def warm(self, truncates: bool) -> None:
        """There is nothing to make."""
