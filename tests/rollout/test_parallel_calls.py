"""Calls that overlap: each has its own chance and its place, whatever finishes first; what is left behind is ended."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from arborl.agents.agent_interface import FunctionAgent
from arborl.chat import Conversations
from arborl.engines.engine import Engine
from arborl.engines.local import LocalEngine
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.episode_store import episode_to_json
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.seeds import derive
from arborl.types import Completion, FinishReason, Group, Message, Sampling, Task

WHO = (Message("user", "qzx 7 ~~ vwk !! 31 ; tell"),)


class Once(Env):
    async def reset(self, task, seed):
        return Observation(WHO)

    async def step(self, action):
        return Step(Observation(()), terminated=True)


class Late(Engine):
    """An engine whose answers come when they like."""

    follows_weights = True

    def __init__(self, engine, seed: int):
        self.engine, self.rng, self.seeds = engine, random.Random(seed), []

    async def generate(self, prompt, sampling, *, session):
        self.seeds.append(sampling.seed)
        done = await self.engine.generate(prompt, sampling, session=session)
        await asyncio.sleep(self.rng.random() * 0.02)
        return done


def play(agent, engine, renderer, size: int = 1, temperature: float = 1.0):
    episode_factories = EpisodeFactories(agent=lambda task: FunctionAgent(agent), env=lambda task: Once())
    rollout = Rollout(
        engine, renderer, episode_factories, Sampling(12, temperature), EpisodeLimits(max_context=250), concurrency=4
    )
    (group,) = asyncio.run(rollout.collect([Task("t")], seed=3, group_size=size))
    return group


def local(seedling, deterministic: bool = False) -> LocalEngine:
    return LocalEngine(seedling[0], max_context=250, kv_tokens=4000, deterministic=deterministic)


async def four(task, env, model):
    observation = await env.reset(task, task.seed)
    output = await asyncio.gather(*(model.chat(observation.messages) for _ in range(4)))
    await env.step(output[0])


def test_four_chats_requested_at_once_give_four_texts(seedling):
    (episode,) = play(four, local(seedling), seedling[1]).episodes
    assert episode.failure is None
    assert len({call.completion.tokens for call in episode.calls}) == 4


def sub_agents(rng: random.Random):
    """Asks, lets three others work at the same time, each with a tool that takes its time, and asks again."""

    async def work(number: int, model):
        mine = [Message("user", f"You are helper {number % 2}.")]
        for _ in range(3):
            mine += [await model.chat(mine), Message("user", "Go on.")]
            await asyncio.sleep(rng.random() * 0.03)
        return mine[-2]

    async def run(task, env, model):
        observation = await env.reset(task, task.seed)
        first = await model.chat(observation.messages)
        found = await asyncio.gather(*(work(number, model) for number in range(3)))
        last = await model.chat([*observation.messages, first, Message("user", " ".join(m.content for m in found))])
        await env.step(last)

    return run


def rows(group) -> list[dict]:
    found = [episode_to_json(episode) for episode in group.episodes]
    for row in found:
        del row["seconds"]
        for call in row["calls"]:
            del call["seconds"]
    return found


def test_tools_and_answers_that_come_in_another_order_give_bit_equal_episodes(seedling):
    engine = local(seedling, deterministic=True)
    one, other = (rows(play(sub_agents(random.Random(s)), Late(engine, s), seedling[1], size=3)) for s in (1, 2))
    assert all(row["failure"] is None for row in one)
    assert one == other


class SeedTokens(Engine):
    """Answers the first call of a conversation always with the same text, later calls with a text of the seed."""

    follows_weights = True

    def __init__(self, stop: int):
        self.stop = stop

    async def generate(self, prompt, sampling, *, session):
        tokens = (40 + (sampling.seed % 500 if prompt.count(self.stop) > 1 else 0), self.stop)
        return Completion(tokens, (-1.0, 0.0), FinishReason.STOP, 0)


def test_two_tasks_with_equal_conversations_keep_their_own_seeds_whichever_is_faster(seedling):
    def agent(waits: tuple[float, float]):
        async def work(number, model):
            mine = [Message("user", "You are a helper.")]
            for _ in range(3):
                mine += [await model.chat(mine), Message("user", "Go on.")]
                await asyncio.sleep(waits[number])
            return mine[-2]

        async def run(task, env, model):
            await env.reset(task, task.seed)
            output = await asyncio.gather(work(0, model), work(1, model))
            await env.step(Message("assistant", "|".join(message.content for message in output)))

        return run

    engine = SeedTokens(seedling[1].stop[0])
    one, other = (rows(play(agent(waits), engine, seedling[1])) for waits in ((0.0, 0.01), (0.01, 0.0)))
    assert one == other
    assert len(set(one[0]["turns"][0]["message"]["content"].split("|"))) == 2


def test_the_calls_of_one_task_stand_together_between_those_of_the_agent(seedling):
    (episode,) = play(sub_agents(random.Random(5)), Late(local(seedling), 5), seedling[1]).episodes
    calls = episode.calls
    assert len(calls) == 11
    for start in (1, 4, 7):
        for before, after in zip(calls[start : start + 2], calls[start + 1 : start + 3], strict=True):
            whole = (*before.prompt, *before.completion.tokens)
            assert after.prompt[: len(whole)] == whole
    assert calls[10].prompt[: len(calls[0].prompt)] == calls[0].prompt
    assert len(build_token_trees([Group(episode.task, [episode])]).terms) == episode.sampled


def test_what_is_requested_after_a_tool_of_unknown_length_is_answered_alike_in_any_order(seedling):
    def agent(rng):
        async def fetch(number, model):
            await asyncio.sleep(rng.random() * 0.03)
            return await model.chat([Message("user", f"Page {number} says so.")])

        async def run(task, env, model):
            await env.reset(task, task.seed)
            output = await asyncio.gather(*(fetch(number, model) for number in range(4)))
            await env.step(Message("assistant", "|".join(message.content for message in output)))

        return run

    engine = local(seedling, deterministic=True)
    one, other = (play(agent(random.Random(s)), engine, seedling[1]).episodes[0] for s in (1, 2))
    assert one.answer == other.answer
    assert len(set(one.answer.split("|"))) > 1


def test_an_agent_that_asks_one_after_the_other_draws_by_the_number_of_the_call(seedling):
    async def run(task, env, model):
        observation = await env.reset(task, task.seed)
        for _ in range(3):
            output = await model.chat(observation.messages)
        await env.step(output)

    engine = Late(ScriptedEngine([[40, seedling[1].stop[0]]]), 0)
    (episode,) = play(run, engine, seedling[1]).episodes
    assert engine.seeds == [derive(episode.seed, "sampling", number) for number in range(3)]


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_call_that_ends_badly_shifts_no_other(seedling, how):
    class Faulty(Late):
        async def generate(self, prompt, sampling, *, session):
            self.seeds.append(sampling.seed)
            if len(self.seeds) == 2 and how == "fails":
                raise ValueError("no")
            return await self.engine.generate(prompt, sampling, session=session)

    async def run(task, env, model):
        observation = await env.reset(task, task.seed)
        tasks = [asyncio.create_task(model.chat(observation.messages)) for _ in range(4)]
        await asyncio.sleep(0)
        if how == "is cancelled":
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await env.step(await model.chat(observation.messages))

    (whole,) = play(four, local(seedling, deterministic=True), seedling[1]).episodes
    (holed,) = play(run, Faulty(local(seedling, deterministic=True), 0), seedling[1]).episodes
    assert holed.failure is None
    kept = [call.completion.tokens for call in holed.calls[:3]]
    assert kept == [whole.calls[number].completion.tokens for number in (0, 2, 3)]
    assert len(holed.calls) == 4


def test_what_an_agent_leaves_behind_is_ended_and_the_episode_stays_as_it_is(seedling):
    orphans = []

    async def late(model):
        try:
            await model.chat(WHO)
        finally:
            await model.chat(WHO)

    async def run(task, env, model):
        observation = await env.reset(task, task.seed)
        orphans.append(asyncio.create_task(late(model)))
        await env.step(await model.chat(observation.messages))

    class Slow(Late):
        async def generate(self, prompt, sampling, *, session):
            self.seeds.append(sampling.seed)
            await asyncio.sleep(30.0 if len(self.seeds) == 2 else 0.01)
            return await self.engine.generate(prompt, sampling, session=session)

    (episode,) = play(run, Slow(local(seedling), 0), seedling[1]).episodes
    assert episode.failure is None
    assert len(episode.calls) == 1
    assert episode.metrics["agent/abandoned_calls"] == 1.0
    assert "after the agent returned" in str(orphans[0].exception())


def test_equal_texts_in_other_tokens_go_on_from_the_message_they_are(seedling):
    _, renderer = seedling
    whole = renderer.tokenizer.encode("hello")
    letters = [token for letter in "hello" for token in renderer.tokenizer.encode(letter)]
    assert renderer.tokenizer.decode(whole) == renderer.tokenizer.decode(letters) == "hello"
    conversations = Conversations(renderer)
    prompt = conversations.prompt(WHO)
    output = []
    for ids in (letters, whole):
        tokens = (*ids, renderer.stop[0])
        completion = Completion(tokens, (0.0,) * len(tokens), FinishReason.STOP)
        output.append(renderer.read(completion))
        conversations.record(prompt, completion, reply=output[-1])
    more = Message("user", "Go on.")
    for ids, message in zip((letters, whole, whole), (*output, replace(output[0])), strict=True):
        tokens = conversations.prompt([*WHO, message, more]).tokens
        assert tokens[len(prompt.tokens) :][: len(ids)] == tuple(ids)
