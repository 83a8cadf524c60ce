"""Law 8 in small: one bad episode costs itself, is named, and the others go on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from arborl.agents.agent_interface import FunctionAgent
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.rollout.runner import EpisodeFactories
from arborl.types import Message, StopReason, Task

HELLO = Observation((Message("user", "hello"),))


class Moody(Env):
    """Misbehaves in the way its task's id says, in the first episode it is requested to play."""

    blocking = False  # they share a list, and count on their order

    def __init__(self, played: list[str]):
        self.played = played

    async def reset(self, task: Task, seed: int) -> Observation:
        self.trouble = task.id if task.id not in self.played else "none"
        self.played.append(task.id)
        if self.trouble == "raises in reset":
            raise RuntimeError("no lake today")
        return HELLO

    async def step(self, action: Message) -> Step:
        match self.trouble:
            case "raises":
                raise ZeroDivisionError("the ice broke")
            case "hangs":
                await asyncio.sleep(3600)
            case "nan reward":
                return Step(HELLO, reward=float("nan"), terminated=True)
            case "wrong shape":
                return (HELLO, 1.0, True)  # type: ignore[return-value]
            case "number as text":
                return Step(Observation((Message("user", 7),)), terminated=True)  # type: ignore[arg-type]
        return Step(HELLO, reward=1.0, terminated=True)


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        ("raises in reset", "RuntimeError", "no lake today"),
        ("raises", "ZeroDivisionError", "the ice broke"),
        ("hangs", "timeout", "longer than 0.2 s"),
        ("nan reward", "ValueError", "reward=nan"),
        ("wrong shape", "ValueError", "return a Step"),
        ("number as text", "ValueError", "whose content is"),
    ],
)
def test_a_bad_environment_costs_one_episode_and_is_named(make_rollout, caplog, trouble, kind, words):
    played: list[str] = []
    run = make_rollout(lambda task: Moody(played), step_seconds=0.2)
    with caplog.at_level(logging.WARNING):
        (group,) = asyncio.run(run.collect([Task(trouble, env="moody")], seed=0, group_size=4))
    assert [episode.failure is None for episode in group.episodes] == [False, True, True, True]
    bad = group.episodes[0]
    assert bad.failure.where == "environment 'moody'"
    assert bad.failure.kind == kind
    assert words in bad.failure.message
    assert bad.stop is (StopReason.TIMEOUT if kind == "timeout" else StopReason.ERROR)
    assert "environment 'moody'" in caplog.text
    assert [episode.turns[0].reward for episode in group.valid_episodes] == [1.0, 1.0, 1.0]


def test_an_episode_past_its_deadline_says_where_the_time_went(make_rollout):
    run = make_rollout(lambda task: Moody([]), step_seconds=60.0, episode_seconds=0.2)
    (group,) = asyncio.run(run.collect([Task("hangs", env="moody")], seed=0, group_size=1))
    assert group.episodes[0].failure.where == "environment 'moody'"
    assert "episode took longer than 0.2 s" in group.episodes[0].failure.message
    assert group.episodes[0].stop is StopReason.TIMEOUT


def test_an_agent_that_raises_is_named_as_agent(make_rollout):
    class Broken:
        async def run(self, task, env, model):
            await env.reset(task, 0)
            raise KeyError("lost")

    run = make_rollout(lambda task: FrozenLake())
    run.factories = EpisodeFactories(lambda task: Broken(), lambda task: FrozenLake())
    (group,) = asyncio.run(run.collect([Task("t", agent="broken")], seed=0, group_size=1))
    assert group.episodes[0].failure.where == "agent 'broken'"


async def forgets_chat(task, env, model):
    observation = await env.reset(task, 0)
    await env.step(model.chat(observation.messages))


async def reads_coroutine(task, env, model):
    observation = await env.reset(task, 0)
    assert model.chat(observation.messages).content


async def forgets_reset(task, env, model):
    await model.chat(env.reset(task, 0).messages)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("agent", [forgets_chat, reads_coroutine, forgets_reset])
def test_an_agent_that_forgot_await_is_told_so_by_name(make_rollout, agent):
    run = make_rollout(lambda task: FrozenLake())
    run.factories = EpisodeFactories(lambda task: FunctionAgent(agent), lambda task: FrozenLake())
    (group,) = asyncio.run(run.collect([Task("t")], seed=0, group_size=1))
    failure = group.episodes[0].failure
    assert failure.where == f"agent {agent.__name__!r}"
    assert "`await` is missing before a call" in failure.message
    assert "Write `await model.chat(…)`" in failure.message
    assert __file__ in failure.traceback


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_environment_that_forgot_await_is_named_as_environment(make_rollout):
    class Forgetful(FrozenLake):
        async def step(self, action):
            return super().step(action).reward

    run = make_rollout(lambda task: Forgetful())
    (group,) = asyncio.run(run.collect([Task("t", env="lake")], seed=0, group_size=1))
    assert group.episodes[0].failure.where == "environment 'lake'"
    assert group.episodes[0].failure.message.startswith("`await` is missing before a call")


async def never_ends(task, env, model):
    observation = await env.reset(task, 0)
    while True:
        await model.chat(observation.messages)
        await asyncio.sleep(0.001)


async def sleeps(task, env, model):
    await asyncio.sleep(60)


class SlowEngine(ScriptedEngine):
    async def generate(self, prompt, sampling, *, session):
        await asyncio.sleep(0.01)
        return await super().generate(prompt, sampling, session=session)


@pytest.mark.parametrize("agent", [never_ends, sleeps])
def test_an_agent_that_does_not_end_is_named_with_its_calls(make_rollout, agent):
    run = make_rollout(lambda task: FrozenLake(), episode_seconds=0.5)
    run.factories = EpisodeFactories(lambda task: FunctionAgent(agent), lambda task: FrozenLake())
    run.engine = SlowEngine([[1]])
    (group,) = asyncio.run(run.collect([Task("t")], seed=0, group_size=1))
    episode = group.episodes[0]
    assert (episode.failure.where, episode.failure.kind) == (f"agent {agent.__name__!r}", "timeout")
    assert episode.stop is StopReason.TIMEOUT
    said = f"it did not end within rollout.episode_seconds=0.5: {len(episode.calls)} model calls"
    assert said in episode.failure.message


def test_an_engine_that_does_not_reply_in_time_is_named_as_engine(make_rollout):
    class Hangs(ScriptedEngine):
        async def generate(self, prompt, sampling, *, session):
            await asyncio.sleep(60)

    run = make_rollout(lambda task: FrozenLake(), episode_seconds=0.2)
    run.engine = Hangs([[1]])
    (group,) = asyncio.run(run.collect([Task("t")], seed=0, group_size=1))
    assert group.episodes[0].failure.where == "engine"


def test_an_engine_that_refuses_is_named_as_engine(make_rollout):
    class Refuses(ScriptedEngine):
        async def generate(self, prompt, sampling, *, session):
            raise OSError("no power")

    run = make_rollout(lambda task: FrozenLake())
    run.engine = Refuses([[1]])
    (group,) = asyncio.run(run.collect([Task("t")], seed=0, group_size=1))
    assert group.episodes[0].failure.where == "engine"


def test_limits_end_an_episode_without_failing_it(make_rollout):
    walk = ("<answer>Up</answer>",)
    for limits, stop in (
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_context": 130}, StopReason.CONTEXT_FULL),
        ({}, StopReason.TRUNCATED),
    ):
        run = make_rollout(lambda task: FrozenLake(frozen=1.0, size=8), walk, **limits)
        (group,) = asyncio.run(run.collect([Task("t", seed=3)], seed=0, group_size=1))
        episode = group.episodes[0]
        assert episode.failure is None
        assert episode.metrics["success"] == 0.0  # walking up does not lead to this goal
        assert episode.stop is stop


def test_members_of_a_group_begin_alike_and_sample_differently(make_rollout):
    moves = ("<answer>Left</answer>", "<answer>Right</answer>", "<answer>Up</answer>", "<answer>Down</answer>")
    run = make_rollout(lambda task: FrozenLake(), moves)
    groups = asyncio.run(run.collect([Task("a", seed=1), Task("b", seed=2)], seed=0, group_size=6))
    for group in groups:
        assert len({episode.opening for episode in group.episodes}) == 1
        assert len({tuple(t.message.content for t in e.turns) for e in group.episodes}) > 1
    assert groups[0].episodes[0].opening != groups[1].episodes[0].opening
