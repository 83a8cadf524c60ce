"""What an environment tells its agents, they are told in training too."""

from __future__ import annotations

import asyncio

import pytest

from arborl import Environment, EnvironmentState
from arborl.types import Task


class Told(Environment):
    system = "Be brief."

    def __init__(self, *opening):
        self.opening = opening

    async def reset(self, scenario=None):
        return EnvironmentState(self.opening)

    async def step(self, state, action):
        return state, None, 0.0, True


@pytest.mark.parametrize(
    ("opening", "shown"),
    [
        ((), [("system", "Be brief.")]),
        (({"role": "user", "content": "Hello!"},), [("system", "Be brief."), ("user", "Hello!")]),
        (({"role": "system", "content": "Be kind."},), [("system", "Be kind.")]),
    ],
)
def test_the_environments_system_prompt_is_shown_unless_reset_gives_another(opening, shown):
    observation = asyncio.run(Told(*opening).as_env().reset(Task("one"), 0))
    assert [(message.role, message.content) for message in observation.messages] == shown
