"""The interfaces of agents and of the model that an agent calls."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.types import Message, Metrics, Task, ToolSpec


class Model(Protocol):
    """The model as an agent sees it: messages in, a message out. Token ids of every call are recorded. Raises
    `ContextFull` if the messages leave no room to sample. Do not catch it: it ends the episode normally."""

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec] = (),
        *,
        stop: str | Sequence[str] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> Message:
        """Sample the next assistant message. The messages may extend those of the last call or be edited freely. Dicts
        in OpenAI's format (`{"role": "user", "content": "…"}`) are accepted. Sampling ends after a text in `stop`,
        which stays part of the message. With a JSON `schema` the message is JSON that satisfies it, unless the limit of
        tokens ends it in the middle; this needs `engine=local`. Calls may be concurrent (`asyncio.gather`): each has
        its own seed, independent of timing."""
        ...

    def count(self, metrics: Metrics) -> None:
        """Add these numbers to the episode's metrics (`{"tool/calls": 1}`)."""
        ...


class Agent(Protocol):
    """Any async program that calls the model."""

    async def run(self, task: Task, env: Env, model: Model) -> None:
        """Run one episode. The environment is new: the agent resets it."""
        ...


SIGNATURE = "async def {}(task, env, model)"
METHOD_SIGNATURE = SIGNATURE.format("run").replace("(", "(self, ")


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


def agent_name(agent: Agent) -> str:
    """The name of its class or function."""
    return agent.function.__name__ if isinstance(agent, FunctionAgent) else type(agent).__name__


def as_agent(candidate: Any, where: str) -> Agent:
    """The agent itself, or an async function wrapped as an agent. ConfigError for anything else."""
    run = candidate if is_async(candidate) else getattr(candidate, "run", None)
    if run is None and is_async(getattr(candidate, "__call__", None)):  # noqa: B004
        run = candidate = candidate.__call__
    if not callable(run):
        raise ConfigError(
            f"{where}: {type(candidate).__name__} is not an agent. Write `{SIGNATURE.format('play')}`, or a class with "
            f"`{METHOD_SIGNATURE}`."
        )
    if not is_async(run):
        raise ConfigError(f"{where}: its `run` is not async. Write `{METHOD_SIGNATURE}` and `await model.chat(…)`.")
    try:
        inspect.signature(run).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(f"{where}: it is called with (task, env, model): {error}.") from error
    return FunctionAgent(candidate) if run is candidate else candidate  # type: ignore[no-any-return]


def is_async(function: Any) -> bool:
    """Whether a call returns an awaitable; decorators that set `__wrapped__` are unwrapped."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))


def refuse_plain_function(candidate: Any, arguments: Collection[str], where: str) -> None:
    """ConfigError for a sync function with the signature of an agent. Functions that make agents are accepted."""
    if not inspect.isfunction(candidate) or is_async(candidate):
        return
    parameters = inspect.signature(candidate).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.name not in arguments]
    if len(required) == 3:
        kind = "an async generator" if inspect.isasyncgenfunction(candidate) else "a plain function"
        raise ConfigError(
            f"{where}: {candidate.__name__} is {kind}, and an agent must be async. Write "
            f"`{SIGNATURE.format(candidate.__name__)}` and `await model.chat(…)`."
        )
