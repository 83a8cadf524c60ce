import asyncio
from contextlib import suppress
from importlib.util import find_spec

import pytest

from arborl.envs import ENVS, EXTRAS
from arborl.envs.adapters.other_packages import MissingRequirementError
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
    assert_env(lambda: Question(attempts=2), Task("sum", TASK.messages, {"answer": "42"}))


@pytest.mark.parametrize(
    ("replies", "over"),
    [
        (["#### 41", "so #### 42"], [False, True]),
        (["<answer>42.0</answer>"], [True]),
        ([r"it is \boxed{42}"], [True]),
        (["#### 42 no, #### 41", "I give up", "42"], [False, False, True]),
    ],
)
def test_a_wrong_answer_may_be_corrected_as_often_as_the_attempts_say(replies, over):
    async def play():
        env = Question(attempts=3, feedback="Think again.")
        await env.reset(Task("sum", TASK.messages, {"answer": "42"}), 0)
        return [await env.step(Message("assistant", reply)) for reply in replies]

    steps = asyncio.run(play())
    assert [step.terminated for step in steps] == over
    assert [bool(step.observation.messages) for step in steps] == [not done for done in over]
    assert all(step.observation.messages[0].content == "Think again." for step in steps[:-1])


def test_attempts_need_an_answer_and_a_pattern_that_can_be_read():
    with pytest.raises(ValueError, match="task 'sum' has no field `answer`"):
        asyncio.run(Question(attempts=2).reset(TASK, 0))
    with pytest.raises(ValueError, match="not a regular expression"):
        Question(pattern="(")
    with pytest.raises(ValueError, match="give 1 or more"):
        Question(attempts=0)


def test_a_task_without_messages_is_an_error():
    with pytest.raises(ValueError, match="task 'empty' has no messages"):
        asyncio.run(Question().reset(Task("empty"), 0))


def test_every_environment_in_the_table_can_be_built_or_says_what_to_install():
    for name in ENVS:
        if name in EXTRAS and find_spec(name) is None:
            with pytest.raises(ConfigError, match=rf"pip install 'arborl\[{name}\]'"):
                ENVS.build(name, {}, "env.args")
        elif name in ("alfworld", "scienceworld"):  # these also need data, or Java
            with suppress(MissingRequirementError):
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
