"""The engine interface: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from arborl.engines.engine_requests import check_sampling
from arborl.types import Completion, FinishReason, Message, Metrics, Sampling

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, "torch.Tensor"]
"""Parameters by name. A tensor that is already the engine's own costs nothing."""
ChatFunction = Callable[..., Awaitable[tuple[Message, FinishReason]]]
"""`chat(messages, tools, sampling, *, session)`: the next message and its finish reason."""
PROBE_SESSION = "probe"
"""Session of the requests that verify new weights: they run while the engine is paused."""
MEMORY_SHARE = {"cpu": 0.1, "cuda": 0.3}
"""Default size of the KV cache, as a share of the host's memory or of a GPU's free memory."""
MAX_SEQUENCES = {"cpu": 128, "cuda": 1024}
"""Upper bound of the default size, in sequences of full length."""


class TokenListener(Protocol):
    """Receives each token of a completion once, in order, in the engine's thread."""

    top: int
    """Number of likeliest tokens to report at each position; 0 for none."""

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None: ...


class Engine(ABC):
    """Samples token ids from the policy. A subclass implements `generate` and overrides the capabilities it has."""

    follows_weights: bool = True
    """Whether samples depend on the weights given to `load`."""
    verifies_weights: bool = False
    """Whether `load` compares the engine's copy with the learner's weights and raises on a mismatch."""
    shares_weights: bool = True
    """Whether weights or device are the learner's too: the engine is paused and put to sleep during an update."""
    shares_threads: bool = False
    """Whether sampling during an update uses torch's CPU threads: learner and engine then get half of them each."""
    can_pause: bool = False
    can_stream: bool = False
    chat: ChatFunction | None = None
    """For servers that take messages and no token ids; such an engine can be evaluated and not trained."""

    @property
    def is_saturated(self) -> bool:
        """Whether requests wait for memory: no new episodes start meanwhile."""
        return False

    @property
    def capacity(self) -> int:
        """Requests served at once, which is the number of episodes started together; 0 if unknown."""
        return 0

    @abstractmethod
    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        """Sample a continuation of `prompt`. Calls of one `session` usually extend each other. Raises EngineError for
        an invalid request and after `close`. An error of one request affects no other."""

    async def load(self, weights: Weights, version: int) -> None:  # noqa: B027
        """Sample from these weights from now on and label tokens with `version`. A running completion keeps its tokens,
        each with the version that sampled it (`Completion.versions`), unless the engine is configured to finish or to
        restart it."""

    async def close(self) -> None:  # noqa: B027
        """Free memory and threads. Pending requests raise EngineError."""

    def check_request(self, sampling: Sampling) -> None:
        """Raise EngineError if it cannot sample with these parameters. May be called from any thread."""
        check_sampling(sampling)

    def metrics(self) -> Metrics:
        return {}

    def warm_up(self, sampling: Sampling) -> None:  # noqa: B027
        """Compile and record before the first step what this kind of sampling needs."""

    async def pause(self) -> None:  # noqa: B027
        """Sample nothing until `resume`; requests wait. Only `PROBE_SESSION` is served, once weights are loaded."""

    def resume(self) -> None:  # noqa: B027
        """Continue the waiting requests."""

    async def sleep(self) -> None:  # noqa: B027
        """Free device memory; called while paused. The next call is `load`."""


def completion_versions(versions: Sequence[int], default: int) -> tuple[int, tuple[int, ...]]:
    """`version` and `versions` of a completion from the versions of its tokens; `default` without tokens."""
    last = int(versions[-1]) if len(versions) else default
    return last, () if versions.count(last) == len(versions) else tuple(map(int, versions))


def default_cache_tokens(device: str, memory: int, token_bytes: int, context: int) -> int:
    """Default KV cache size in tokens: a share of the memory, at most `MAX_SEQUENCES` full sequences."""
    share = int(memory * MEMORY_SHARE.get(device, 0.1)) // token_bytes
    return max(context, min(share, MAX_SEQUENCES.get(device, 128) * context))
