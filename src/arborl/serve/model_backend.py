"""The protocol between the HTTP routes and a model: messages or token ids in, sampled tokens out as a stream.

`EngineBackend` samples from an engine; `RecordingBackend` records the calls of one training episode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from arborl.chat.renderer import Renderer
from arborl.errors import ArborError
from arborl.types import FinishReason, Message, Sampling, ToolSpec

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions of a chat template that does not support the given messages."""
TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position with their log-probabilities, most likely first."""


class RequestError(ArborError):
    """The request is wrong: an HTTP status 4xx, with the parameter and an error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class ServiceUnavailable(ArborError):
    """The request is valid and cannot be answered now; `retry_seconds` becomes the header Retry-After."""

    def __init__(self, message: str, retry_seconds: float = 1.0, status: int = 503, code: str | None = None):
        super().__init__(message)
        self.retry_seconds, self.status, self.code = retry_seconds, status, code


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """How one completion is sampled."""

    sampling: Sampling  # A backend lowers `max_tokens` to the room that the prompt leaves in the context
    top_logprobs: int = 0  # number of most likely tokens to return for each position
    prefix: str = ""  # First text of the answer. It is part of the prompt and is not sampled.
    session: str = ""  # requests of one session tend to share a prefix


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Sampled tokens of a completion, in order."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()  # one entry for each token if `top_logprobs` was requested
    finish: FinishReason | None = None
    version: int = 0


class TokenStream(Protocol):
    """One completion. Sampling starts with the first iteration and is cancelled when the iterator is closed."""

    prompt: tuple[int, ...]

    def __aiter__(self) -> AsyncIterator[TokenChunk]: ...


class ReplyCache:
    """Sampled messages with tool calls, by the id of their first call; the oldest are evicted first. A client sends
    back parsed tool calls, and the template would write them in its own form. If the calls are unchanged, the model is
    shown the text that it sampled, as in training."""

    def __init__(self, max_messages: int = 4096):
        self.max_messages = max_messages
        self._messages: OrderedDict[str, Message] = OrderedDict()

    def add(self, message: Message) -> None:
        if message.tool_calls:
            self._messages[message.tool_calls[0].id] = message
            while len(self._messages) > self.max_messages:
                self._messages.popitem(last=False)

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with cached ones in place of those that have the same tool calls."""
        return [self._cached(message) or message for message in messages]

    def _cached(self, message: Message) -> Message | None:
        cached = self._messages.get(message.tool_calls[0].id) if message.tool_calls else None
        return cached if cached is not None and cached.tool_calls == message.tool_calls else None


class ModelBackend(Protocol):
    """A model behind the routes. `RequestError` and `ServiceUnavailable` are raised before the first chunk."""

    name: str
    renderer: Renderer
    max_context: int
    sampling: Sampling  # defaults for fields that a request leaves out
    version: int
    reply_cache: ReplyCache

    def accepts_model(self, model: str) -> bool: ...

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], requests: Sequence[GenerationRequest]
    ) -> Sequence[TokenStream]:
        """One completion of the conversation for each request. Called from several threads."""
        ...

    def complete(self, prompt: Sequence[int], request: GenerationRequest) -> TokenStream:
        """A completion of token ids. Called from several threads."""
        ...
