import asyncio

import pytest

from arborl.envs import ENVS
from arborl.envs.checker import assert_env
from arborl.envs.question import Question
from arborl.types import Message, Task

TASK = Task("sum", (Message("system", "Be brief."), Message("user", "6*7?")))


def test_the_task_is_shown_and_the_first_message_ends_it():
    async def play():
        env = Question()
        opening = await env.reset(TASK, 0)
        return env, opening, await env.step(Message("assistant", "42"))

    env, opening, step = asyncio.run(play())
    assert opening.messages == TASK.messages
    assert step.terminated
    assert not step.truncated
    assert step.reward == 0.0
    assert step.observation.messages == ()
    assert env.render() == "Be brief.\n6*7?\n42"


def test_it_keeps_the_contract_of_an_environment():
    assert_env(Question, TASK)


def test_a_task_without_messages_is_an_error():
    with pytest.raises(ValueError, match="task 'empty' has no messages"):
        asyncio.run(Question().reset(Task("empty"), 0))


def test_every_environment_in_the_table_can_be_built():
    for name in ENVS:
        assert ENVS.build(name, {}, "env.args")
