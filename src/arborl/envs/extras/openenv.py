"""An environment that lives behind an OpenEnv server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from arborl.envs.env import Env, Observation, Step
from arborl.envs.extras import package
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task


class OpenEnv(Env):
    """An environment behind an OpenEnv server.

    The start is asked for with the task's seed; whether the server heeds it, and where chance comes from later, is the
    server's affair. An episode cannot be copied, so there are no snapshots.

    Args:
        url: of the server, `http://…` or `ws://…`.
        action_field: the action is `{action_field: the agent's message}`.
        observation_field: the observation's field that is shown; without it, all of them as JSON.
        client: makes the client, for one that is not OpenEnv's `GenericEnvClient(url)`.
        max_steps: the episode is truncated after this many.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        action_field: str = "message",
        observation_field: str = "",
        client: Callable[[], Any] | None = None,
        max_steps: int = 32,
    ):
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: give at least 1")
        if client is None:
            package("openenv", "openenv")
        self.url, self.make, self.max_steps = url, client, max_steps
        self.action_field, self.observation_field = action_field, observation_field
        self.client: Any = None

    async def reset(self, task: Task, seed: int) -> Observation:
        if self.client is None:
            self.client = self.make() if self.make else package("openenv.core", "openenv").GenericEnvClient(self.url)
        result = await _settled(self.client.reset(seed=derive(task.seed, "openenv") % 2**31))
        self.total, self.steps, self.text = 0.0, 0, self._read(result.observation)
        return Observation((Message("user", self.text),), state_key=self.text)

    async def step(self, action: Message) -> Step:
        result = await _settled(self.client.step({self.action_field: action.content}))
        self.text, self.steps = self._read(result.observation), self.steps + 1
        reward = 0.0 if result.reward is None else float(result.reward)
        self.total += reward
        return Step(
            Observation((Message("user", self.text),), state_key=self.text),
            reward=reward,
            terminated=bool(result.done),
            truncated=not result.done and self.steps >= self.max_steps,
        )

    def _read(self, observation: Any) -> str:
        fields = observation if isinstance(observation, Mapping) else vars(observation)
        if not self.observation_field:
            return json.dumps(dict(fields), default=str, sort_keys=True)
        if self.observation_field not in fields:
            raise ValueError(
                f"observation_field={self.observation_field!r}: the server's observation has {', '.join(fields)}"
            )
        return str(fields[self.observation_field])

    def metrics(self) -> Metrics:
        return {"return": self.total}

    def snapshot(self) -> None:
        return None

    def state_key(self) -> str:
        return self.text

    def render(self) -> str:
        return self.text

    async def close(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await _settled(client.close())


async def _settled(result: Any) -> Any:
    """OpenEnv has async clients and plain ones."""
    return await result if inspect.isawaitable(result) else result
