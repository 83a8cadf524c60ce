"""An environment around another: whatever it does not do itself, the inner one does."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image


CALLS = ("reset", "step", "close")


class PassingEnv(Env):
    """Passes everything on. Subclass it and change what should differ."""

    env: Env

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self.env.reset(task, seed)

    async def step(self, action: Message) -> Step:
        return await self.env.step(action)

    async def close(self) -> None:
        await self.env.close()

    def metrics(self) -> Metrics:
        return self.env.metrics()

    def actions(self) -> list[str]:
        return self.env.actions()

    def oracle(self) -> str | None:
        return self.env.oracle()

    def random(self, chance: Generator) -> str | None:
        return self.env.random(chance)

    def state_key(self) -> str:
        return self.env.state_key()

    def snapshot(self) -> Any:
        return self.env.snapshot()

    def restore(self, snapshot: Any) -> None:
        self.env.restore(snapshot)

    def render(self) -> str:
        return self.env.render()

    def picture(self) -> Image | None:
        return self.env.picture()


class Awaited(PassingEnv):
    """An environment of plain functions, to be awaited. They run where they are called, and whoever awaits them waits.

    Example:
        env = awaited(Mine())      # Mine as it is, if it is async
    """

    def __init__(self, env: Env):
        self.env = env

    async def reset(self, task: Task, seed: int) -> Observation:
        return await _settled(self.env.reset(task, seed))  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await _settled(self.env.step(action))  # type: ignore[no-any-return]

    async def close(self) -> None:
        await _settled(self.env.close())


def awaited(env: Env) -> Env:
    """The environment, so that its `reset`, `step` and `close` can be awaited."""
    return env if all(map(inspect.iscoroutinefunction, (env.reset, env.step, env.close))) else Awaited(env)


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def blocks(env: Env) -> bool:
    """Whether an environment's calls may take their time without letting others run: unless it says that they do not.

    That `reset` and `step` are `async` says nothing: what they call may block, and then nobody else plays, no deadline
    is kept and Ctrl-C is not heard. The word of a class is about its own calls: one that overrides them gives its own.
    """
    if "blocking" in getattr(env, "__dict__", ()):
        return bool(vars(env)["blocking"])
    for kind in type(env).__mro__:
        if "blocking" in vars(kind):
            return bool(vars(kind)["blocking"])
        if any(call in vars(kind) for call in CALLS):
            return True
    return True


def word_of(env: Any, name: str, otherwise: Any = None) -> Any:
    """What an environment, or the first one inside it that says anything, says under this name."""
    while env is not None:
        if getattr(env, name, None) is not None:
            return getattr(env, name)
        env = getattr(env, "env", None)
    return otherwise


def kind_of(env: Env) -> str:
    """The name of its class, whatever the library put around it."""
    while isinstance(env, PassingEnv) and type(env).__module__.startswith("arborl."):
        env = env.env
    return type(env).__name__
