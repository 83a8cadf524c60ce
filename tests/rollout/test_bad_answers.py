"""An environment that answers in the wrong shape is refused, and told which field and what to return."""

from __future__ import annotations

import asyncio

import pytest

from arborl.agents.chat import ChatAgent
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.rollout.workers import Workers
from arborl.types import Message, Sampling, Task

HELLO = Observation((Message("user", "hello"),))


class Answers(Env):
    def __init__(self, reset=HELLO, step=None, metrics=None):
        self.answers = {"reset": reset, "step": step or Step(HELLO, terminated=True), "metrics": metrics or {}}

    async def reset(self, task, seed):
        return self.answers["reset"]

    async def step(self, action):
        return self.answers["step"]

    def metrics(self):
        return self.answers["metrics"]


def step(**fields):
    return {"step": Step(**{"observation": HELLO, "terminated": True} | fields)}


@pytest.mark.parametrize("workers", ["none", "thread"])
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"reset": "hello"}, "reset() returned str as observation; return arborl.Observation"),
        ({"reset": ("hello", {})}, "reset() returned tuple as observation"),
        ({"reset": Observation([Message("user", "hi")])}, "observation.messages is list"),
        ({"reset": Observation(("hello",))}, "observation.messages holds str"),
        ({"reset": Observation((Message("user", 7),))}, "a message's content is int; return text"),
        ({"reset": Observation((Message("robot", "hi"),))}, "a message's role is 'robot'"),
        ({"reset": Observation((), state_key=3)}, "observation.state_key is int"),
        ({"step": (HELLO, 1.0, True, False, {})}, "step() returned tuple; return arborl.Step"),
        (step(observation="hi"), "step() returned str as observation"),
        (step(reward=float("nan")), "reward is nan; return a finite number"),
        (step(reward=float("inf")), "reward is inf"),
        (step(reward="1"), "reward is '1'"),
        (step(reward=None), "reward is None"),
        (step(terminated="yes"), "terminated is 'yes'; return True or False"),
        (step(truncated=1), "truncated is 1; return True or False"),
        (step(info=[1]), "info is list; return a dict"),
        (step(info={"valid": float("nan")}), "info['valid'] is nan"),
        ({"metrics": {"success": "1"}}, "metrics()['success'] is '1'; return a finite number"),
        ({"metrics": [1.0]}, "metrics() is list"),
    ],
)
def test_the_field_is_named(seedling, answers, words, workers):
    _, renderer = seedling
    engine = ScriptedEngine([[*renderer.tokenizer.encode("yes"), renderer.stop[0]]])
    cast = Cast(lambda task: ChatAgent(), lambda task: Answers(**answers))
    run = Rollout(engine, renderer, cast, Sampling(8), Limits(), 4, Workers(workers))
    ((episode,),) = [group.episodes for group in asyncio.run(run.collect([Task("t", env="mine")], 0, 1))]
    assert episode.failure.where == "environment 'mine'"
    assert words in episode.failure.message
