"""Drawing tokens. A token depends on its request's seed and its position, and on nothing its neighbours do.

B requests, V tokens of the vocabulary. One uniform number per request and position comes from hashing (seed, position);
the token is where the cumulative probability passes it. No state, so a request can be paused, moved or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arborl.errors import EngineError
from arborl.types import Sampling


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by two rounds of the splitmix64 mixer (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seeds, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = _mix(state) + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(
    logits_BV: Tensor, temperatures: Sequence[float], uniform_B: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """A token for each row and its log-probability under the distribution it was drawn from.

    Temperature 0 takes the likeliest token, and reports its probability at temperature 1.
    """
    heat = torch.tensor([t or 1.0 for t in temperatures], dtype=logits_BV.dtype, device=logits_BV.device)
    log_BV = torch.log_softmax(logits_BV / heat[:, None], dim=-1)
    total_BV = log_BV.double().exp().cumsum(-1)
    point_B1 = torch.from_numpy(uniform_B).to(total_BV.device)[:, None] * total_BV[:, -1:]
    token_B = torch.searchsorted(total_BV, point_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits_BV.device)
        token_B = torch.where(greedy, log_BV.argmax(-1), token_B)
    return token_B.tolist(), log_BV.gather(1, token_B[:, None])[:, 0].tolist()


def check_request(prompt: Sequence[int], sampling: Sampling, vocabulary: int, context: int) -> None:
    """Refuse what cannot be sampled, with a reason; other requests do not notice."""
    if not prompt:
        raise EngineError("the prompt is empty; give at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocabulary:
        raise EngineError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
    if len(prompt) >= context:
        raise EngineError(f"the prompt has {len(prompt)} tokens and the context {context}: no room to sample")
    if sampling.temperature < 0:
        raise EngineError(f"temperature={sampling.temperature} is negative; give 0 (likeliest token) or more")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens={sampling.max_tokens}; give at least 1")
