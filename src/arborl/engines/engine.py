"""What an engine is: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from arborl.types import Completion, Metrics, Sampling

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, "torch.Tensor"]
"""Parameters by name. A tensor that already is the engine's own is recognised and costs nothing."""
PROBE = "probe"
"""The session of calls that ask whether new weights have arrived: they come through while everything else is held."""


class Listener(Protocol):
    """Hears a completion's tokens while it is sampled, each once and in order; called where the engine works."""

    top: int
    """Likeliest tokens it wants to hear of beside each one; 0 for none."""

    def __call__(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """A token, its log-probability, and the likeliest tokens there with theirs."""
        ...


class Engine(Protocol):
    """Sees only tokens.

    One that also has a property `crowded` says with it that requests wait which it has no room for: no further
    episodes are begun while that is so. One that has a property `capacity` says how many requests it can serve at
    once: so many episodes are begun together. One that has a method `warm` is told with it, before a run's first step,
    how tokens will be drawn (a `Sampling`), and makes what it needs for that. One whose `proves_weights` is true
    compares its copy with the learner's at every `load`, and raises. One whose `chat` is not None is given messages
    instead of tokens, and can be measured only.

    One that has `hold` and `release` samples nothing between them: requests wait, new ones too, and go on afterwards.
    Only those of the session `PROBE` are answered, once new weights are loaded. It is held while it is given weights;
    and, unless it says `shared = False`, while the learner computes, since weights or device are the learner's too:
    then one that has an async method `sleep` is told with it that nothing will be sampled until it is given weights.
    One that is not held meanwhile, and says `threaded = True`, shares this process's threads with the learner: each
    has half of them.

    One that says `streams = True` takes a `Listener` as `generate(…, heard=…)` and tells it every token as it is
    sampled.
    """

    follows_weights: bool
    """Whether what it samples depends on the weights it is given; a script's does not."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt`. Calls of one `session` tend to extend each other.

        Raises `EngineError` for what cannot be sampled, and after `close`. What is wrong with one request, or a caller
        that goes, never reaches another.
        """
        ...

    async def load(self, weights: Weights, version: int) -> None:
        """Sample from these weights from now on, and stamp tokens with `version`.

        A completion that is under way loses no token and repeats none: each keeps the version that sampled it
        (`Completion.versions`), unless the engine was told to finish it first or to begin it again.
        """
        ...

    async def close(self) -> None:
        """Release memory and threads; whoever still waits gets an `EngineError`."""
        ...

    def metrics(self) -> Metrics:
        """Counters since the last call: sampled and prefilled tokens, cache hits, …"""
        ...


def told(versions: Sequence[int], otherwise: int) -> tuple[int, tuple[int, ...]]:
    """`version` and `versions` of a completion whose tokens were sampled by these; of no tokens, `otherwise`."""
    last = int(versions[-1]) if len(versions) else otherwise
    return last, tuple(map(int, versions)) if any(one != last for one in versions) else ()
