"""Drawing tokens. A token depends on its request's seed and its position, and on nothing its neighbours do.

B requests, V tokens of the vocabulary. One uniform number per request and position comes from hashing (seed, position);
the token is where the cumulative probability passes it. No state, so a request can be paused, moved or repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from arborl.models.sampling import Shape, log_distribution
from arborl.types import Sampling


def uniforms(seeds: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by two rounds of the splitmix64 mixer (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seeds, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Draws:
    """How the next token of each of B requests is to be drawn, as columns."""

    temperature_B: NDArray[np.float64]
    """0 takes the likeliest token, and reports its probability at temperature 1."""
    top_k_B: NDArray[np.int64]
    top_p_B: NDArray[np.float64]
    min_p_B: NDArray[np.float64]
    uniform_B: NDArray[np.float64]
    top: int = 0
    """Likeliest tokens to tell of, beside the drawn one; the most that any request wants."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], counts: Sequence[int]) -> Draws:
        """Of requests that have sampled `counts` tokens so far."""
        columns = zip(*((s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings), strict=True)
        heat, top_k, top_p, min_p = (np.asarray(column) for column in columns)
        return cls(heat, top_k, top_p, min_p, uniforms([s.seed for s in samplings], counts))

    @property
    def truncated_B(self) -> NDArray[np.bool_]:
        """Of which requests some tokens cannot be drawn."""
        return (self.top_k_B != 0) | (self.top_p_B < 1) | (self.min_p_B != 0)

    @property
    def truncates(self) -> bool:
        """Whether some tokens of some request cannot be drawn."""
        return bool(self.truncated_B.any())

    def some(self, rows: NDArray[np.int64]) -> Draws:
        """Those of some of the requests."""
        heat, top_k, top_p, min_p = self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B
        return Draws(heat[rows], top_k[rows], top_p[rows], min_p[rows], self.uniform_B[rows], self.top)

    @property
    def apart(self) -> bool:
        """Whether tokens are drawn from the logits by `draw`, for more is asked than a step on a GPU does by itself."""
        return self.truncates or self.top > 0

    def shape(self, device: torch.device) -> Shape:
        heat = np.where(self.temperature_B == 0, 1.0, self.temperature_B)
        temperature, top_k, top_p, min_p = (
            torch.from_numpy(x).to(device) for x in (heat, self.top_k_B, self.top_p_B, self.min_p_B)
        )
        return Shape(temperature, top_k, top_p, min_p, self.truncates)


Top = tuple[NDArray[np.int64], NDArray[np.float64]]
"""The likeliest tokens of each row, likeliest first, and their log-probabilities."""


def draw(logits_BV: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Top | None]:
    """A token for each row and its log-probability under the distribution it was drawn from; and the likeliest tokens
    under it, where they are asked for."""
    device = logits_BV.device
    log_BV = log_distribution(logits_BV, draws.shape(device))
    total_BV = log_BV.exp().cumsum(-1, dtype=torch.float64)
    point_B1 = torch.from_numpy(draws.uniform_B).to(device)[:, None] * total_BV[:, -1:]
    token_B = torch.searchsorted(total_BV, point_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    greedy = draws.temperature_B == 0
    if greedy.any():
        token_B = torch.where(torch.from_numpy(greedy).to(device), log_BV.argmax(-1), token_B)
    return token_B, log_BV.gather(1, token_B[:, None])[:, 0], _top(log_BV, draws.top)


def _top(log_BV: Tensor, count: int) -> Top | None:
    if not count:
        return None
    log_BT, token_BT = log_BV.topk(min(count, log_BV.shape[1]))
    return token_BT.cpu().numpy(), log_BT.double().cpu().numpy()


class StopTexts:
    """Notices when one of some texts has been written.

    Example:
        stops = StopTexts(tokenizer.decode, ("</answer>",))
        stops.reached([…])      # True as soon as the last token completed it
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]):
        self.decode, self.texts = decode, tuple(texts)
        self.window = 4 * max(map(len, self.texts)) + 4  # in tokens: a character takes at most four

    def reached(self, sampled: Sequence[int]) -> bool:
        """Asked after every token, so only the end needs looking at."""
        tail = self.decode(sampled[-self.window :])
        return any(text in tail for text in self.texts)
