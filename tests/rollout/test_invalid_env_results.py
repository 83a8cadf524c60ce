"""An environment that answers in the wrong shape is refused, and reported which field and what to return."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Task

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
        ({"reset": "hello"}, "reset() returned 'hello' (str) as observation: return an Observation"),
        ({"reset": ("hello", {})}, "(tuple) as observation: return an Observation"),
        ({"reset": Observation([Message("user", "hi")])}, "returned messages as list: return a tuple of Message"),
        ({"reset": Observation(("hello",))}, "returned 'hello' (str) among messages"),
        ({"reset": Observation((Message("user", 7),))}, "a message whose content is 7 (int): return a str"),
        ({"reset": Observation((Message("robot", "hi"),))}, "a message of role 'robot'"),
        ({"reset": Observation((), state_key=3)}, "state_key=3 (int)"),
        ({"step": (HELLO, 1.0, True, False, {})}, "(tuple): return a Step"),
        (step(observation="hi"), "step() returned 'hi' (str) as observation"),
        (step(reward=float("nan")), "reward=nan (float): return a finite float"),
        (step(reward=float("inf")), "reward=inf"),
        (step(reward="1"), "reward='1'"),
        (step(reward=None), "reward=None"),
        (step(terminated="yes"), "terminated='yes' (str): return True or False"),
        (step(truncated=1), "truncated=1 (int): return True or False"),
        (step(terminated=True, truncated=True), "both terminated and truncated"),
        (step(info=[1]), "info=[1] (list): return a dict"),
        (step(info={"valid": float("nan")}), "info['valid']=nan"),
        ({"metrics": {"success": "1"}}, "metrics['success']='1' (str): return a finite number"),
        ({"metrics": [1.0]}, "metrics=[1.0] (list)"),
    ],
)
def test_the_field_is_named(make_rollout, answers, words, workers):
    run = make_rollout(lambda task: Answers(**answers), workers=workers)
    ((episode,),) = [group.episodes for group in asyncio.run(run.collect([Task("t", env="mine")], 0, 1))]
    assert episode.failure.where == "environment 'mine'"
    assert words in episode.failure.message


def test_numbers_and_flags_may_be_numpys(make_rollout):
    given = Step(HELLO, np.float32(0.5), terminated=np.True_, truncated=np.False_, info={"valid": np.bool_(True)})
    run = make_rollout(lambda task: Answers(step=given, metrics={"success": np.int64(1)}), workers="none")
    ((episode,),) = [group.episodes for group in asyncio.run(run.collect([Task("t", env="mine")], 0, 1))]
    assert episode.failure is None
    assert (episode.turns[0].reward, episode.metrics["success"]) == (0.5, 1.0)
