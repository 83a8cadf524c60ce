"""The step-wise agent shows the rules, the last steps whole, and what is seen now."""

import asyncio

import pytest

from arborl.agents.chat_agents import StepAgent, merge_user_messages
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.countdown import Countdown
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.types import Message, Task


class Walk(Env):
    """Five steps; says which one it is, and that every second message is no move."""

    def __init__(self, *roles: str):
        self.roles = roles

    async def reset(self, task, seed):
        self.at = 0
        return Observation(tuple(Message(role, f"{role} 0") for role in self.roles))

    async def step(self, action):
        self.at += 1
        valid = "" if self.at % 2 else "Not a move. "
        return Step(Observation((Message("user", f"{valid}user {self.at}"),)), terminated=self.at == 5)


class Model:
    """Remembers what it was shown; says a number."""

    def __init__(self):
        self.shown: list[list[tuple[str, str]]] = []

    async def chat(self, messages, tools=(), *, stop=()):
        self.shown.append([(message.role, message.content) for message in messages])
        return Message("assistant", f"said {len(self.shown)}")

    def count(self, metrics):
        pass


def shown(env: Env, **options) -> list[list[tuple[str, str]]]:
    model = Model()
    asyncio.run(StepAgent(**options).run(Task("t", seed=3, fields={"split": "train"}), env, model))
    return model.shown


def test_the_history_is_the_last_steps_whole_valid_or_not():
    prompts = shown(Walk("system", "user"), history_length=2)
    assert prompts[0] == [("system", "system 0"), ("user", "user 0")]
    assert prompts[2] == [
        ("system", "system 0"),
        ("user", "user 0"),
        ("assistant", "said 1"),
        ("user", "user 1"),
        ("assistant", "said 2"),
        ("user", "Not a move. user 2"),
    ]
    assert prompts[4] == [
        ("system", "system 0"),
        ("user", "Not a move. user 2"),
        ("assistant", "said 3"),
        ("user", "user 3"),
        ("assistant", "said 4"),
        ("user", "Not a move. user 4"),
    ]


def test_prompts_without_history_keep_the_task():
    prompts = shown(Walk("system", "user"), history_length=0)
    assert [prompt[1:] for prompt in prompts[:2]] == [[("user", "user 0")], [("user", "user 1")]]
    assert all(len(prompt) == 2 for prompt in prompts)
    prompts = shown(Walk("user"), history_length=0)
    assert prompts[2] == [("user", "user 0\n\nNot a move. user 2")]
    assert shown(Walk("user"), history_length=0, keep_opening=False)[2] == [("user", "Not a move. user 2")]
    numbers = shown(Countdown(), history_length=0)[0][0][1].split("out of")[1].split(".")[0]
    assert all(numbers in prompt[0][1] for prompt in shown(Countdown(), history_length=0))


@pytest.mark.parametrize("history", range(4))
def test_prompts_have_as_many_steps_as_requested_for_and_begin_with_a_user(history):
    for number, prompt in enumerate(shown(Walk("system", "user"), history_length=history)):
        spoken = [role for role, _ in prompt if role != "system"]
        assert spoken == ["user", "assistant"] * min(history, number) + ["user"]


def test_equal_states_have_equal_prompts():
    class Fixed(Model):
        async def chat(self, messages, tools=(), *, stop=()):
            await super().chat(messages)
            return Message("assistant", "<answer>Up</answer>")

    model = Fixed()
    task = Task("t", seed=5, fields={"split": "train"})
    asyncio.run(StepAgent(history_length=0).run(task, FrozenLake(frozen=1.0), model))
    boards = [prompt[-1][1] for prompt in model.shown]
    assert len(set(boards)) < len(boards)
    assert len({tuple(prompt) for prompt in model.shown}) == len(set(boards))


def test_user_messages_are_merged_and_negative_history_refused():
    user, assistant = Message("user", "a"), Message("assistant", "b")
    assert merge_user_messages([user, user, assistant, user]) == [Message("user", "a\n\na"), assistant, user]
    with pytest.raises(ValueError, match="history_length=-1: give 0 or more"):
        StepAgent(history_length=-1)
