"""What an agent is, and what it sees of the model."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.types import Message, Metrics, Task, ToolSpec


class Model(Protocol):
    """The model as an agent sees it: messages in, a message out. Every call is recorded, token by token.

    Raises `ContextFull` when the messages leave no room to sample; let it pass, it ends the episode cleanly.
    """

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
    ) -> Message:
        """Sample the assistant's next message. The messages may extend the last call's, or be edited at will; dicts in
        OpenAI's shape (`{"role": "user", "content": "…"}`) will do.

        Texts in `stop`, or the one text, end it as soon as they have been written; they are part of it.

        Calls may overlap (`asyncio.gather`): each draws by its own chance, which does not depend on who answers first.
        """
        ...

    def count(self, metrics: Metrics) -> None:
        """Add these numbers to the episode's metrics (`{"tool/calls": 1}`)."""
        ...


class Agent(Protocol):
    """Any async program that calls the model."""

    async def run(self, task: Task, env: Env, model: Model) -> None:
        """Play one episode. The environment is fresh: the agent resets it.

        Args:
            task: the problem.
            env: `await env.reset(task, task.seed)` opens it. Its steps are recorded.
            model: its calls are recorded.
        """
        ...


SHAPE = "async def {}(task, env, model)"


class FunctionAgent:
    """An async function as an agent.

    Example:
        async def once(task, env, model):
            observation = await env.reset(task, task.seed)
            await env.step(await model.chat(observation.messages))

        arborl.run(agent=once)
    """

    def __init__(self, function: Callable[[Task, Env, Model], Awaitable[None]]):
        self.function = function

    async def run(self, task: Task, env: Env, model: Model) -> None:
        await self.function(task, env, model)


def as_agent(found: Any, where: str) -> Agent:
    """An agent as it is, or an async function as one. ConfigError for what cannot play.

    Args:
        found: what a configuration or a program gave.
        where: the key that gave it, and what it said.
    """
    run = found if is_async(found) else getattr(found, "run", None)
    if run is None and is_async(getattr(found, "__call__", None)):  # noqa: B004
        run = found = found.__call__
    if not callable(run):
        raise ConfigError(
            f"{where}: {type(found).__name__} is no agent. Write `{SHAPE.format('play')}`, or a class with "
            f"`{SHAPE.format('run').replace('(', '(self, ')}`."
        )
    if not is_async(run):
        raise ConfigError(
            f"{where}: its `run` is not async, and an agent waits for the model. Write "
            f"`{SHAPE.format('run').replace('(', '(self, ')}` and `await model.chat(…)`."
        )
    try:
        inspect.signature(run).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(f"{where}: it is called with (task, env, model): {error}.") from error
    return FunctionAgent(found) if run is found else found  # type: ignore[no-any-return]


def is_async(function: Any) -> bool:
    """Whether calling it gives something to await, also behind decorators that say what they wrap."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))


def refuse_plain_function(found: Any, given: Collection[str], where: str) -> None:
    """ConfigError for a function that plays and is not async; one that makes an agent takes what it is given.

    Args:
        found: a function, or anything else.
        given: names of arguments it would be called with.
        where: the key that gave it, and what it said.
    """
    if not inspect.isfunction(found) or is_async(found):
        return
    parameters = inspect.signature(found).parameters.values()
    asks = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if len(asks) == 3:
        kind = "an async generator" if inspect.isasyncgenfunction(found) else "a plain function"
        raise ConfigError(
            f"{where}: {found.__name__} is {kind}, and an agent waits for the model. Write "
            f"`{SHAPE.format(found.__name__)}` and `await model.chat(…)`."
        )
