"""What an engine refuses at its door, with a sentence: past it, nothing about a request can fail but that request."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborl.errors import EngineError
from arborl.tokens import Tokens
from arborl.types import Sampling

LARGEST_ID = 2**31 - 1
COLDEST = 1e-6
"""Temperature, above 0, below which logits divided by it may overflow."""


def read_prompt(prompt: Sequence[int], vocabulary: int | None = None, context: int | None = None) -> NDArray[np.int32]:
    """The prompt as an array, where it is token ids of this vocabulary and leaves room in this context.

    `Tokens` are such an array already, and are not copied.
    """
    most = LARGEST_ID if vocabulary is None else vocabulary - 1
    if isinstance(prompt, Tokens) and 0 <= prompt.bound <= most and 0 < len(prompt) < (context or math.inf):
        return prompt.array
    try:
        found = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise EngineError(f"the prompt is no list of token ids: {error}") from error
    if found.ndim != 1:
        raise EngineError(f"the prompt has {found.ndim} dimensions; give a flat list of token ids")
    if not len(found):
        raise EngineError("the prompt is empty; give at least one token")
    if found.dtype.kind not in "iu":
        odd = next((token for token in found.tolist() if not _is_whole(token)), found[0])
        raise EngineError(f"the prompt holds {odd!r}, which is no token id; give whole numbers")
    low, high = int(found.min()), int(found.max())
    if low < 0 or high > most:
        raise EngineError(f"token id {low if low < 0 else high} is outside the vocabulary of {most + 1}")
    if context is not None and len(found) >= context:
        raise EngineError(f"the prompt has {len(found)} tokens and the context {context}: no room to sample")
    return found.astype(np.int32, copy=False)


def check_sampling(sampling: Sampling) -> None:
    """Refuse what cannot be sampled."""
    if not (_is_whole(sampling.max_tokens) and sampling.max_tokens >= 1):
        raise EngineError(f"max_tokens={sampling.max_tokens!r}; give a whole number, at least 1")
    if not _is_whole(sampling.seed):
        raise EngineError(f"seed={sampling.seed!r}; give a whole number")
    same = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seconds)
    try:
        _check_drawing(*same)
    except TypeError:  # it cannot be hashed
        _check_drawing.__wrapped__(*same)
    _check_stops(sampling.stop, sampling.stop_texts)


@lru_cache(256, typed=True)
def _check_drawing(temperature: Any, top_k: Any, top_p: Any, min_p: Any, seconds: Any) -> None:
    """The same for nearly all requests of a run, so each combination is checked once."""
    if not (_is_number(temperature) and (temperature == 0 or temperature >= COLDEST)):
        raise EngineError(f"temperature={temperature!r}; give 0 (the likeliest token), or a number from {COLDEST:g} up")
    if not (_is_whole(top_k) and top_k >= 0):
        raise EngineError(f"top_k={top_k!r}; give a whole number, 0 (all tokens) or more")
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise EngineError(f"top_p={top_p!r}; give a number above 0 and up to 1")
    if not (_is_number(min_p) and 0 <= min_p <= 1):
        raise EngineError(f"min_p={min_p!r}; give a number from 0 to 1")
    if seconds is not None and not (_is_number(seconds) and seconds > 0):
        raise EngineError(f"seconds={seconds!r}; give a number above 0, or None for no deadline")


def _check_stops(stop: Any, stop_texts: Any) -> None:
    for name, given in (("stop", stop), ("stop_texts", stop_texts)):
        if type(given) is not tuple and (isinstance(given, str | bytes) or not isinstance(given, Sequence)):
            raise EngineError(f"{name}={given!r}; give a tuple: stop of token ids, stop_texts of texts")
    for token in stop:
        if not (_is_whole(token) and 0 <= token <= LARGEST_ID):
            raise EngineError(f"stop holds {token!r}, which is no token id; texts that end a completion are stop_texts")
    for text in stop_texts:
        if not isinstance(text, str):
            raise EngineError(f"stop_texts holds {text!r}; give texts")
        if not text:
            raise EngineError("an empty stop text would end every completion; leave it out")


def _is_whole(value: Any) -> bool:
    """A whole number of any kind and size; what is true or false is none."""
    if type(value) is int:
        return True
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    """A finite number of any kind."""
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, bool | np.bool_ | str | bytes):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
