"""Validation of requests before they enter an engine, and detection of stop texts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborl.errors import EngineError, SchemaError
from arborl.tokens import Tokens
from arborl.types import Sampling

LARGEST_ID = 2**31 - 1
MIN_TEMPERATURE = 1e-6
"""Smallest temperature above 0: logits divided by a smaller one may overflow."""


def read_prompt(prompt: Sequence[int], vocabulary: int | None = None, context: int | None = None) -> NDArray[np.int32]:
    """The prompt as an array, checked against the vocabulary and the context. `Tokens` are not copied."""
    largest = LARGEST_ID if vocabulary is None else vocabulary - 1
    if isinstance(prompt, Tokens) and 0 <= prompt.bound <= largest and 0 < len(prompt) < (context or math.inf):
        return prompt.array
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise EngineError(f"the prompt is no list of token ids: {error}") from error
    if ids.ndim != 1:
        raise EngineError(f"the prompt has {ids.ndim} dimensions; give a flat list of token ids")
    if not len(ids):
        raise EngineError("the prompt is empty; give at least one token")
    if ids.dtype.kind not in "iu":
        invalid = next((token for token in ids.tolist() if not _is_integer(token)), ids[0])
        raise EngineError(f"the prompt holds {invalid!r}, which is no token id; give whole numbers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > largest:
        raise EngineError(f"token id {low if low < 0 else high} is outside the vocabulary of {largest + 1}")
    if context is not None and len(ids) >= context:
        raise EngineError(f"the prompt has {len(ids)} tokens and the context {context}: no room to sample")
    return ids.astype(np.int32, copy=False)


def check_sampling(sampling: Sampling, edits: bool = False) -> None:
    """Raise EngineError for an invalid request. `edits`: whether the engine supports schemas and penalties."""
    if not (_is_integer(sampling.max_tokens) and sampling.max_tokens >= 1):
        raise EngineError(f"max_tokens={sampling.max_tokens!r}; give a whole number, at least 1")
    if not _is_integer(sampling.seed):
        raise EngineError(f"seed={sampling.seed!r}; give a whole number")
    parameters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seconds)
    try:
        _check_distribution(*parameters)
    except TypeError:  # not hashable
        _check_distribution.__wrapped__(*parameters)
    _check_stops(sampling.stop, sampling.stop_texts)
    if sampling.edits_logits:
        _check_edits(sampling, edits)


@lru_cache(256, typed=True)
def _check_distribution(temperature: Any, top_k: Any, top_p: Any, min_p: Any, seconds: Any) -> None:
    """Cached: nearly all requests of a run share these parameters."""
    if not (_is_finite(temperature) and (temperature == 0 or temperature >= MIN_TEMPERATURE)):
        raise EngineError(
            f"temperature={temperature!r}; give 0 (the likeliest token), or a number from {MIN_TEMPERATURE:g} up"
        )
    if not (_is_integer(top_k) and top_k >= 0):
        raise EngineError(f"top_k={top_k!r}; give a whole number, 0 (all tokens) or more")
    if not (_is_finite(top_p) and 0 < top_p <= 1):
        raise EngineError(f"top_p={top_p!r}; give a number above 0 and up to 1")
    if not (_is_finite(min_p) and 0 <= min_p <= 1):
        raise EngineError(f"min_p={min_p!r}; give a number from 0 to 1")
    if seconds is not None and not (_is_finite(seconds) and seconds > 0):
        raise EngineError(f"seconds={seconds!r}; give a number above 0, or None for no deadline")


def _check_edits(sampling: Sampling, supported: bool) -> None:
    if not isinstance(sampling.schema, str):
        raise SchemaError(f"schema={sampling.schema!r}; give a JSON schema as text (json.dumps)")
    for name in ("frequency_penalty", "presence_penalty"):
        if not _is_finite(value := getattr(sampling, name)):
            raise EngineError(f"{name}={value!r}; give a number")
        if value and not supported:
            raise EngineError(f"{name} is not supported by this engine; use engine=local")
    if sampling.schema and not supported:
        raise SchemaError("JSON schemas are not supported by this engine; use engine=local")


def _check_stops(stop: Any, stop_texts: Any) -> None:
    for name, value in (("stop", stop), ("stop_texts", stop_texts)):
        if type(value) is not tuple and (isinstance(value, str | bytes) or not isinstance(value, Sequence)):
            raise EngineError(f"{name}={value!r}; give a tuple: stop of token ids, stop_texts of texts")
    for token in stop:
        if not (_is_integer(token) and 0 <= token <= LARGEST_ID):
            raise EngineError(f"stop holds {token!r}, which is no token id; texts that end a completion are stop_texts")
    for text in stop_texts:
        if not isinstance(text, str):
            raise EngineError(f"stop_texts holds {text!r}; give texts")
        if not text:
            raise EngineError("an empty stop text would end every completion; leave it out")


def _is_integer(value: Any) -> bool:
    if type(value) is int:
        return True
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_finite(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    if isinstance(value, bool | np.bool_ | str | bytes):
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


class StopTextMatcher:
    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]):
        self.decode, self.texts = decode, tuple(texts)
        self.window = 4 * max(map(len, self.texts)) + 4  # in tokens: a character has at most four

    @classmethod
    def make(cls, decode: Callable[[Sequence[int]], str] | None, sampling: Sampling) -> StopTextMatcher | None:
        """The matcher of a request; None without stop texts."""
        if not sampling.stop_texts:
            return None
        if decode is None:
            raise EngineError("stop_texts need an engine with `decode`")
        return cls(decode, sampling.stop_texts)

    def reached(self, sampled: Sequence[int]) -> bool:
        """Whether the last token completed a stop text. Called after every token, so it decodes only the end. Errors of
        `decode` are EngineErrors of this request."""
        try:
            tail = self.decode(sampled[-self.window :])
        except Exception as error:
            raise EngineError(f"decode failed on its tokens: {type(error).__name__}: {error}") from error
        return any(text in tail for text in self.texts)
