"""What the API is made over: messages or token ids in, tokens out as they are sampled.

The routes know a `Source` and nothing behind it. A model at work is one (`speaker.py`); whatever else turns messages,
tools and a way of drawing into tokens can be another, a recorder of somebody's episode for instance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from arborl.chat.renderer import Renderer
from arborl.errors import ArborError
from arborl.serve.memory import Memory
from arborl.types import FinishReason, Message, Sampling, ToolSpec

TOO_LONG = "context_length_exceeded"
Likely = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place, likeliest first, with their log-probabilities."""


class Refused(ArborError):
    """What was asked cannot be done, and it is the caller's to mend."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class Unavailable(ArborError):
    """What was asked could be done, but not now."""

    def __init__(self, message: str, seconds: float = 1.0, status: int = 503, code: str | None = None):
        super().__init__(message)
        self.seconds, self.status, self.code = seconds, status, code


@dataclass(frozen=True, slots=True)
class Asked:
    """How to answer."""

    sampling: Sampling
    """`max_tokens` is the most that is wanted; a source takes less where its context has less room."""
    top: int = 0
    """Likeliest tokens to tell of, beside each sampled one."""
    begins: str = ""
    """What the answer begins with: it is given to the model, and not sampled."""
    session: str = ""
    """Who asks; requests of one tend to extend each other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a completion, in the order they were sampled."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Likely, ...] = ()
    """One entry a token, where they were asked for."""
    finish: FinishReason | None = None
    """Why it ended; of the last piece."""
    version: int = 0
    """Of the weights that sampled the last of them."""


class Saying(Protocol):
    """One completion on its way: begun when it is first iterated, given up when the iterator is closed."""

    prompt: tuple[int, ...]

    def __aiter__(self) -> AsyncIterator[Piece]: ...


class Source(Protocol):
    """Whoever answers. `Refused` and `Unavailable` are raised here, or before the first piece."""

    name: str
    """What clients call the model."""
    renderer: Renderer
    context: int
    """Prompt and completion together, in tokens."""
    sampling: Sampling
    """How tokens are drawn where a request says nothing."""
    version: int
    """Of the weights."""
    memory: Memory
    """What it wrote, for when a client sends it back."""

    def answers_to(self, model: str) -> bool:
        """Whether a client that asks for this model means this one."""
        ...

    def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec], asked: Sequence[Asked]) -> Sequence[Saying]:
        """Answers to these messages, one for each of `asked`. Called from several threads at once."""
        ...

    def complete(self, prompt: Sequence[int], asked: Asked) -> Saying:
        """What follows these ids. Called from several threads at once."""
        ...
