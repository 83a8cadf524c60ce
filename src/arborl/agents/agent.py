"""What an agent is, and what it sees of the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from arborl.envs.env import Env
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
