from __future__ import annotations

import asyncio

import pytest

from arborl.envs import ENVS
from arborl.envs.checker import check_env
from arborl.envs.env import Env
from arborl.envs.games.documents_env import Documents, episode_document, is_right
from arborl.types import Message, Task


def opened(task, **args):
    env = Documents(**{"tokens": 300, "distractors": 3, **args})
    return env, asyncio.run(env.reset(task, 0))


def test_it_keeps_the_contract():
    for kind in ("short", "choice"):
        for seed, split in ((0, "train"), (5, "held_out")):
            task = Task("t", seed=seed, fields={"split": split})
            assert check_env(lambda kind=kind: ENVS["documents"](tokens=300, kind=kind), task) == []


def test_the_document_is_beside_the_prompt_and_never_in_it():
    env, observation = opened(Task("t", seed=1), tokens=(200, 400))
    text = "\n".join(message.content for message in observation.messages)
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert env.document not in text
    assert all(hop.fact in env.document for hop in env.problem.hops)
    assert all(hop.fact not in text for hop in env.problem.hops)


def test_the_oracle_is_right_and_others_are_not():
    for kind in ("short", "choice"):
        for seed in range(20):
            env, _ = opened(Task("t", seed=seed), kind=kind)
            step = asyncio.run(env.step(Message("assistant", env.oracle())))
            assert (step.reward, step.terminated, env.metrics()["success"]) == (1.0, True, 1.0)
            env, _ = opened(Task("t", seed=seed), kind=kind)
            assert asyncio.run(env.step(Message("assistant", "no one knows"))).reward == 0.0


def test_a_row_brings_its_own_document_question_and_answer():
    task = Task("t", (Message("user", "Who?"),), {"document_content": "Mira did.", "answer": "Mira"})
    env, observation = opened(task)
    assert observation.messages[-1].content == "Who?"
    assert episode_document(task, env) == "Mira did."
    assert asyncio.run(env.step(Message("assistant", "mira."))).reward == 1.0


def test_the_document_is_found_behind_wrappers():
    class Wrapper(Env):
        def __init__(self, env):
            self.env = env

    env, _ = opened(Task("t", seed=1))
    assert episode_document(Task("t"), Wrapper(Wrapper(env))) is env.document
    assert episode_document(Task("t"), Wrapper(object())) is None


def test_no_held_out_question_is_trained_on():
    def requested(seed, split):
        env, _ = opened(Task("t", seed=seed, fields={"split": split}), hops=1)
        return env.problem.question, env.problem.answer

    train = {requested(seed, "train") for seed in range(200)}
    held_out = {requested(seed, "held_out") for seed in range(60)}
    assert train.isdisjoint(held_out)


@pytest.mark.parametrize(
    ("answer", "right", "choice", "verdict"),
    [
        ("B", "B", True, True), ("B. Oslo", "B", True, True), ("(B)", "B", True, True), ("Because B", "B", True, False),
        ("A", "B", True, False), ("  oslo. ", "Oslo", False, True), ("in Oslo", "Oslo", False, False),
        ("", "", False, False),
    ],
)  # fmt: skip
def test_answers_are_compared_plainly(answer, right, choice, verdict):
    assert is_right(answer, right, choice) == verdict


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tokens": (9, 3)}, "tokens="), ({"hops": 7}, "hops=7"), ({"kind": "essay"}, "kind='essay'"),
        ({"lures": -1}, "lures=-1"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        Documents(**args)
