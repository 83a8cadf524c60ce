"""The environment protocol, `<answer>` tags, and the held-out split of generated problems."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from arborl.fast_init import fast_init
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image


@fast_init
@dataclass(frozen=True, slots=True)
class Observation:
    """Messages that the agent receives."""

    messages: tuple[Message, ...]
    state_key: str = ""
    """Equal for equal states of the same task; state-based algorithms (GiGPO) group by it."""


@fast_init
@dataclass(frozen=True, slots=True)
class Step:
    """Result of `Env.step`."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    """The task ended: solved, lost, or answered."""
    truncated: bool = False
    """A limit ended the episode in a non-final state."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this step, stored with the turn. `valid` (0 or 1): whether the message was a legal action."""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class Env(Protocol):
    """An environment. One object runs one episode at a time; `reset` starts the next.

    Implement `reset` and `step`; subclass `Env` to inherit the rest. The start state depends on `task` alone (all
    episodes of a group start equal), randomness during the episode on `seed` alone. An illegal message gets an
    observation, never an exception.

    `reset`, `step` and `close` may be plain or async and run in a thread, so they may block. Those of a class with
    `blocking = False` run in the event loop, which is faster; they must not block. Those of a class with
    `isolated = True` run in processes: for packages that are not safe in threads, or that can hang or crash.

    A class with `tagged = True` reads actions between `<answer>` and `</answer>`: an action found by
    `env.prompt.action_pattern` is passed to it inside these tags, and to any other class without tags. With an
    attribute `max_steps`, prompt templates can state the steps that remain.
    """

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode."""
        ...

    async def step(self, action: Message) -> Step:
        """Apply the agent's message."""
        ...

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after a failure."""
        return None

    def metrics(self) -> Metrics:
        """Numbers of the episode so far. Success rates use `success` (0 or 1)."""
        return {}

    def actions(self) -> list[str]:
        """Texts that are legal actions now; empty when any text is legal, or when there are too many to list."""
        return []

    def oracle(self) -> str | None:
        """The message of an optimal policy in this state, if known."""
        return None

    def random(self, rng: Generator) -> str | None:
        """The message of a random policy: one of `actions()`; None where the environment cannot draw one."""
        legal = self.actions()
        return legal[int(rng.integers(len(legal)))] if legal else None

    def state_key(self) -> str:
        """Key of the current state, as in `Observation.state_key`. Equal states of a task have equal keys."""
        return ""

    def snapshot(self) -> Any:
        """The current episode, for `restore`, any number of times; None where the environment cannot be copied."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: Any) -> None:
        """Continue from a snapshot, in this object or another one of the same class, random state included."""
        vars(self).clear()
        vars(self).update(copy.deepcopy(snapshot))

    def render(self) -> str:
        """The state as text, for people."""
        return ""

    def picture(self) -> Image | None:
        """The state as an image, for people."""
        return None


# ------------------------------------------------------------------------------------------------ answer tags


def parse_answer(text: str) -> str | None:
    """The stripped text in the first `<answer>…</answer>`; None without one."""
    _, opening, rest = text.partition("<answer>")
    inside, closing, _ = rest.partition("</answer>")
    return inside.strip() if opening and closing else None


def parse_choice(text: str, choices: Iterable[str]) -> str | None:
    """The choice in the first answer, ignoring case; None without a match."""
    found = parse_answer(text)
    return None if found is None else _by_lower_case(tuple(choices)).get(found.lower())


@lru_cache(maxsize=256)
def _by_lower_case(choices: tuple[str, ...]) -> dict[str, str]:
    return {choice.lower(): choice for choice in choices}


def format_answer(text: str) -> str:
    return f"<answer>{text}</answer>"


# ------------------------------------------------------------------------------------------------ splits

SPLITS = ("train", "held_out")


def split_of(problem: Any) -> str:
    """`held_out` for one problem in ten, by a hash of the problem, else `train`.

    A held-out problem is never trained on, whatever seed drew it. Equal problems of plain values have the same split on
    every machine.
    """
    digest = hashlib.blake2b(repr(problem).encode(), digest_size=2).digest()
    return "held_out" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def task_split(task: Task, env: str) -> str:
    """The task's field `split`; `train` by default."""
    return check_split(str(task.fields.get("split", "train")), env)


def check_split(split: str, env: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: {env} has 'train' and 'held_out'")
    return split
