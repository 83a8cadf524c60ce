"""What may be given as an agent, and what is reported to who gives something else."""

import functools
import inspect

import pytest

from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.training_run.part_factory import RunPartFactory
from arborl.types import Task


class Good:
    async def run(self, task, env, model):
        return None


class Plain:
    def run(self, task, env, model):
        return None


class Few:
    async def run(self, task):
        return None


class Called:
    async def __call__(self, task, env, model):
        return None


async def plays(task, env, model):
    return None


async def plays_by(rule, task, env, model):
    return None


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def makes(size=3):
    return Good()


def makes_nothing():
    return None


def plain(task, env, model):
    return None


async def yields(task, env, model):
    yield 1


def episode_factories(agent):
    return RunPartFactory(load(None, ["agent=mine"]), {"mine": agent}).episode_factories()


@pytest.mark.parametrize(
    "agent",
    [Good, Good(), plays, makes, Called(), Good().run, functools.partial(plays_by, 1), decorated(plays)],
    ids=["class", "object", "function", "maker", "callable", "method", "partial", "decorated"],
)
def test_whatever_is_async_and_takes_three_things_is_an_agent(agent):
    made = episode_factories(agent).agent(Task("t"))
    playing = made.run(Task("t"), None, None)
    assert inspect.iscoroutine(playing)
    playing.close()


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        (plain, "agent=mine: plain is a plain function, .* Write `async def plain\\(task, env, model\\)`"),
        (yields, "yields is an async generator"),
        (lambda task, env, model: None, "is a plain function"),
        (Plain, "`run` is not async.* Write `async def run\\(self, task, env, model\\)`"),
        (Plain(), "`run` is not async"),
        (Few(), "called with \\(task, env, model\\)"),
        (makes_nothing, "NoneType is not an agent"),
        (object(), "object is not an agent"),
    ],
    ids=["function", "generator", "lambda", "class", "object", "too few", "maker", "nothing"],
)
def test_what_is_not_is_refused_when_the_run_is_built_and_reported_what_to_write(agent, complaint):
    with pytest.raises(ConfigError, match=complaint):
        episode_factories(agent)
