import asyncio
from importlib.util import find_spec

import pytest

from arborl.envs import ENVS, EXTRAS
from arborl.envs.checker import assert_env
from arborl.envs.games.question import Question
from arborl.errors import ConfigError
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


def test_every_environment_in_the_table_can_be_built_or_says_what_to_install():
    for name in ENVS:
        if name in EXTRAS and find_spec(name) is None:
            with pytest.raises(ConfigError, match=rf"pip install 'arborl\[{name}\]'"):
                ENVS.build(name, {}, "env.args")
        else:
            assert ENVS.build(name, {}, "env.args")


def test_the_oracle_gives_the_rows_answer_where_there_is_one():
    async def say(task):
        env = Question()
        await env.reset(task, 0)
        return env.oracle()

    assert asyncio.run(say(TASK)) is None
    assert asyncio.run(say(Task("sum", TASK.messages, {"answer": 42}))) == "<answer>42</answer>"
