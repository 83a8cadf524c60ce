"""What an environment is: `reset` opens an episode, `step` answers one message of the agent."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from arborl.fast_init import fast_init
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image


@fast_init
@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is shown."""

    messages: tuple[Message, ...]
    state_key: str = ""
    """Equal for equal states of the same task; algorithms that compare states (GiGPO) group by it."""


@fast_init
@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one message."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    """The task is over: solved, lost, or answered."""
    truncated: bool = False
    """Cut short by a limit; the state itself was not final."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers about this step, kept with the turn. `valid` (0 or 1) says whether the message was a move at all."""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class Env(Protocol):
    """Answers messages. One object plays one episode at a time; `reset` starts the next.

    `reset` and `step` are yours to write; subclass `Env` to inherit the rest. The start state must depend on
    `task` alone (all attempts of a group begin alike), chance during the episode on `seed` alone. A message that is no
    move is answered, never an exception: models say all sorts of things.

    `reset`, `step` and `close` run in a thread, plain or async: they may take their time without holding other episodes
    up. Those of a class that says `blocking = False` run in the event loop, which is faster; they must never block it.

    A class that says `tagged = True` reads moves between `<answer>` and `</answer>`: an action that
    `env.prompt.action_pattern` found in a reply reaches it in these, and any other class as it is. Where there is an
    attribute `max_steps`, prompts may tell how many are left.
    """

    async def reset(self, task: Task, seed: int) -> Observation:
        """Begin an episode."""
        ...

    async def step(self, action: Message) -> Step:
        """Answer the agent's message."""
        ...

    async def close(self) -> None:
        """Release what the episode holds. Called once, also after a failure."""
        return None

    def metrics(self) -> Metrics:
        """Numbers about the episode so far. `success` (0 or 1) is what success rates are made of."""
        return {}

    def actions(self) -> list[str]:
        """Texts that are valid moves now; empty when any text is, or when they are too many to list."""
        return []

    def oracle(self) -> str | None:
        """The text a perfect player would say now, if one is known."""
        return None

    def random(self, chance: Generator) -> str | None:
        """The text a random player would say now: any of `actions()`; None where the environment cannot tell."""
        legal = self.actions()
        return legal[int(chance.integers(len(legal)))] if legal else None

    def state_key(self) -> str:
        """Names the present state: what `Observation.state_key` says. Equal states of a task have equal names."""
        return ""

    def snapshot(self) -> Any:
        """The episode as it stands, to come back to with `restore`, any number of times; None where that cannot be."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: Any) -> None:
        """Go on from there, in this object or in another of the same kind. Chance goes on from there too."""
        vars(self).clear()
        vars(self).update(copy.deepcopy(snapshot))

    def render(self) -> str:
        """The state as text, for people."""
        return ""

    def picture(self) -> Image | None:
        """The state as a picture, for people."""
        return None
