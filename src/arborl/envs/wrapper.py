"""Wrappers around an environment, and helpers that look through them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Metrics, Task

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.Image import Image


class EnvWrapper(Env):
    """Delegates every call to `env`. Subclass it and override what differs."""

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

    def random(self, rng: Generator) -> str | None:
        return self.env.random(rng)

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


class AsyncEnvWrapper(EnvWrapper):
    """Makes plain `reset`, `step` and `close` awaitable. They run, and block, in the calling thread."""

    def __init__(self, env: Env):
        self.env = env

    async def reset(self, task: Task, seed: int) -> Observation:
        return await await_if_needed(self.env.reset(task, seed))  # type: ignore[no-any-return]

    async def step(self, action: Message) -> Step:
        return await await_if_needed(self.env.step(action))  # type: ignore[no-any-return]

    async def close(self) -> None:
        await await_if_needed(self.env.close())


def as_async_env(env: Env) -> Env:
    return env if all(map(inspect.iscoroutinefunction, (env.reset, env.step, env.close))) else AsyncEnvWrapper(env)


async def await_if_needed(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def is_blocking(env: Env) -> bool:
    """Whether the environment's calls may block: True unless it declares `blocking = False`.

    `async def` is no evidence: a coroutine that blocks stops all other episodes, deadlines and Ctrl-C. A declaration
    covers the calls of its own class only: a subclass that overrides one of them must declare `blocking` again.
    """
    if "blocking" in getattr(env, "__dict__", ()):
        return bool(vars(env)["blocking"])
    for kind in type(env).__mro__:
        if "blocking" in vars(kind):
            return bool(vars(kind)["blocking"])
        if any(call in vars(kind) for call in ("reset", "step", "close")):
            return True
    return True


def inner_attribute(env: Any, name: str, default: Any = None) -> Any:
    """The attribute of the environment, or of the outermost wrapped environment where it is not None."""
    while env is not None:
        if getattr(env, name, None) is not None:
            return getattr(env, name)
        env = getattr(env, "env", None)
    return default


def env_class_name(env: Env) -> str:
    """Class name of the environment below this library's wrappers."""
    while isinstance(env, EnvWrapper) and type(env).__module__.startswith("arborl."):
        env = env.env
    return type(env).__name__
