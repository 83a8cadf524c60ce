"""What is known of an agent or an environment is worked out once per run; each episode has objects of its own."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from arborl.config.load_config import load
from arborl.envs import Env
from arborl.errors import ConfigError
from arborl.rewards import Rewards, reward
from arborl.training_run.part_factory import RunPartFactory
from arborl.types import Episode, Group, Message, Task


class Board(Env):
    """An environment that changes what it was given."""

    blocking = False

    def __init__(self, cells=(), size=2):
        if size < 2:
            raise ValueError(f"size={size}: give 2 or more")
        self.cells = cells

    async def reset(self, task, seed):
        raise NotImplementedError

    async def step(self, action):
        raise NotImplementedError


class Counted:
    async def run(self, task, env, model):
        return None


class Changing:
    """An agent that is sound the first time only."""

    made = 0

    def __init__(self):
        Changing.made += 1
        if Changing.made > 1:
            self.run = lambda task, env, model: None


def episode_factories(objects=None, *settings):
    return RunPartFactory(load(None, list(settings)), objects or {}).episode_factories()


def test_classes_are_inspected_once_per_run(monkeypatch):
    made = episode_factories()
    requests = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda *args, **more: requests.append(args) or signature(*args, **more))
    for seed in range(5):
        made.env(Task("task", seed=seed))
        made.agent(Task("task", seed=seed))
    assert requests == []


def test_every_episode_has_an_agent_and_an_environment_of_its_own():
    made = episode_factories({"object:counted": Counted}, "agent=object:counted")
    assert made.env(Task("one")) is not made.env(Task("two"))
    assert made.agent(Task("one")) is not made.agent(Task("two"))


@pytest.mark.parametrize("given", [Board, Board([[1]]), lambda: SHARED], ids=["class", "object", "function"])
def test_no_two_environments_share_what_the_user_handed_in(given):
    settings = ["env=object:board", *(["env.args.cells=[[1]]"] if given is Board else [])]
    made = episode_factories({"object:board": given}, *settings)
    one, other = made.env(Task("one")), made.env(Task("two"))
    one.cells[0].append(2)
    assert other.cells == made.env(Task("three")).cells == [[1]]


SHARED = Board([[1]])


def test_what_a_class_refuses_is_stated_with_the_key_of_its_arguments():
    with pytest.raises(ConfigError, match=r"env\.args: size=1"):
        episode_factories({"object:board": Board}, "env=object:board", "env.args.size=1")


def test_an_agent_that_differs_from_the_one_that_was_checked_is_checked():
    Changing.made, Changing.run = 0, Counted.run
    made = episode_factories({"object:changing": Changing}, "agent=object:changing")
    with pytest.raises(ConfigError, match="not async"):
        made.agent(Task("second"))


def test_tasks_may_name_other_environments_and_agents():
    made = episode_factories()
    assert type(made.env(Task("a"))) is not type(made.env(Task("b", (Message("user", "?"),), env="question")))
    assert type(made.agent(Task("a"))) is not type(made.agent(Task("b", agent="react")))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no environment is called 'nowhere'"):
            made.env(Task("c", env="nowhere"))


async def test_rewards_that_do_not_block_are_computed_without_a_task_each():
    tasks = []
    loop = asyncio.get_running_loop()
    long = reward(name="long", blocking=False)(lambda episode: float(episode.sampled))
    rewards = Rewards([("long", long, 1.0)], seconds=1.0)
    groups = [Group(Task("task"), [Episode(f"{n}", Task("task")) for n in range(8)])]
    create = loop.create_task
    loop.create_task = lambda *args, **more: tasks.append(args) or create(*args, **more)
    await rewards.score(groups)
    assert [episode.rewards for episode in groups[0].episodes] == [{"long": 0.0}] * 8
    assert len(tasks) < 8


async def test_a_plain_function_may_return_something_to_await():
    async def later(episode):
        return 2.0

    rewards = Rewards([("later", lambda episode: later(episode), 0.5)], seconds=1.0)
    group = Group(Task("task"), [Episode("0", Task("task"))])
    await rewards.score([group])
    assert group.episodes[0].rewards == {"later": 1.0}
