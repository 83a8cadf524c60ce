"""A session is the agent's own loop with a person for an environment."""

from __future__ import annotations

import asyncio
import json

from conftest_serve import client_of

from arborl.agents import FunctionAgent
from arborl.envs.documents import Documents
from arborl.envs.wrapper import word_of
from arborl.rollout.runner import Cast
from arborl.serve.sessions import AgentSession, Company
from arborl.types import Message, Task


def with_agent(opened, agent, env=None):
    company = opened.company
    cast = Cast(lambda task: agent, env or company.cast.env)
    return Company(company.engine, company.renderer, cast, company.sampling, company.limits, ("mine",))


async def echo(task, env, model):
    """Remembers all it heard, and says it again."""
    heard = list((await env.reset(task, 0)).messages)
    while True:
        told = " ".join(message.content for message in heard)
        step = await env.step(Message("assistant", f"{task.fields.get('sign', '')}{told}"))
        heard += step.observation.messages


async def once(task, env, model):
    """Answers, and is done."""
    (message,) = (await env.reset(task, 0)).messages
    await env.step(Message("assistant", message.content.upper()))


async def breaks(task, env, model):
    await env.reset(task, 0)
    raise RuntimeError("out of order")


def test_an_agent_keeps_its_memory_between_messages(opened):
    async def talk():
        session = AgentSession(with_agent(opened, FunctionAgent(echo)), fields={"sign": "!"})
        try:
            return [(await session.say(word)).content for word in ("one", "two", "three")]
        finally:
            await session.end()

    assert asyncio.run(talk()) == ["!one", "!one two", "!one two three"]


def test_an_agent_that_is_done_begins_anew_with_what_is_said_next(opened):
    async def talk():
        session = AgentSession(with_agent(opened, FunctionAgent(once)))
        try:
            return [(await session.say(word)).content for word in ("one", "two")], len(session.episodes)
        finally:
            await session.end()

    assert asyncio.run(talk()) == (["ONE", "TWO"], 2)


def test_the_agent_is_shown_what_its_environment_would_show(opened):
    """Its system message, and the document that the session brings; and never one of a game that nobody plays."""
    seen = []

    async def looks(task, env, model):
        observation = await env.reset(task, 0)
        seen.append((observation.messages, word_of(env, "document")))
        await env.step(Message("assistant", "yes"))

    def documents(task):
        return Documents(tokens=100)

    async def talk():
        for fields in ({"document_content": "A short one."}, {}):
            session = AgentSession(with_agent(opened, FunctionAgent(looks), documents), fields=fields)
            await session.say("What is it about?")
            await session.end()

    asyncio.run(talk())
    (with_one, document), (without, nothing) = seen
    own = asyncio.run(
        Documents(tokens=100).reset(Task("x", (Message("user", "What is it about?"),), {"document_content": "."}), 0)
    )
    assert with_one == own.messages == without
    assert (document, nothing) == ("A short one.", None)


def test_tools_are_called_and_shown_on_the_way(opened):
    happened = []

    async def talk():
        session = AgentSession(opened.company, temperature=0.0, watch=happened.append)
        try:
            return await session.say("What is 12 + 30? Answer as <answer>number</answer>."), session.tools
        finally:
            await session.end()

    reply, tools = asyncio.run(talk())
    assert "42" in reply.content
    assert [spec.name for spec in tools] == ["calculator"]
    asked, answered = (one.message for one in happened)
    assert asked.tool_calls[0].arguments == {"expression": "12 + 30"}
    assert (answered.role, answered.content) == ("tool", "42")
    assert reply.sampled > 0


def test_sessions_over_http_from_beginning_to_end(opened):
    async def talk():
        async with client_of(opened) as client:
            at = "/v1/agents/tool/sessions"
            begun = (await client.post(at, json={"temperature": 0})).json()
            mine = f"{at}/{begun['id']}"
            question = {"content": "What is 12 + 30? Answer as <answer>number</answer>."}
            answer = (await client.post(f"{mine}/messages", json=question)).json()
            stream = await client.post(f"{mine}/messages", json={**question, "stream": True})
            seen = (await client.get(mine)).json()
            ended = (await client.delete(mine)).status_code, (await client.get(mine)).status_code
            others = [
                (await client.post("/v1/agents/nobody/sessions", json={})).status_code,
                (await client.post(f"{mine}/messages", json=question)).status_code,
                (await client.post(at, json={"field": 1})).status_code,
            ]
            many = [(await client.post(at, json={})).status_code for _ in range(5)]
        return begun, answer, stream.text, seen, ended, others, many

    begun, answer, stream, seen, ended, others, many = asyncio.run(talk())
    assert [tool["name"] for tool in begun["tools"]] == ["calculator"]
    assert "42" in answer["content"]
    assert [one["role"] for one in answer["happened"]] == ["assistant", "tool"]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert events[0]["type"] == "begun"
    assert events[-1]["type"] == "answer"
    assert [message["role"] for message in seen["messages"]][:3] == ["user", "assistant", "user"]
    assert ended == (204, 404)
    assert others == [404, 404, 400]
    assert many == [201] * 4 + [429]


def test_an_agent_that_breaks_says_so_and_costs_nobody_else(opened):
    async def talk():
        company = with_agent(opened, FunctionAgent(breaks))
        broken = AgentSession(company)
        try:
            await broken.say("hello")
        except Exception as error:
            said = str(error)
        fine = AgentSession(opened.company, temperature=0.0)
        reply = await fine.say("Hello")
        await fine.end()
        return said, reply.content

    said, content = asyncio.run(talk())
    assert "out of order" in said
    assert content


def test_two_messages_at_once_are_one_too_many(opened):
    async def talk():
        session = AgentSession(opened.company)
        results = await asyncio.gather(session.say("Hello"), session.say("Hello"), return_exceptions=True)
        await session.end()
        return results

    first, second = asyncio.run(talk())
    assert first.content
    assert "one message at a time" in str(second)


def test_a_reader_of_long_documents_answers_in_a_session_as_it_does_in_a_rollout():
    """StateLM over documents eight times its window, greedily: the same words, through the same calls."""
    from pathlib import Path

    from arborl.config.load_config import load
    from arborl.rollout.runner import Rollout
    from arborl.training_run.build import build_served

    recipe = Path(__file__).parents[2] / "recipes/statelm/run.yaml"
    served = build_served(load(recipe, ["env.args.tokens=[8200,8300]", "agent.args.max_assistant_turns=6"]))
    names = ("statelm",)
    company = Company(served.engine, served.renderer, served.cast, served.sampling, served.limits, names)
    rollout = Rollout(served.engine, served.renderer, served.cast, served.sampling, served.limits, 4)

    async def both(task):
        env = served.cast.env(task)
        question = (await env.reset(task, 0)).messages[-1].content
        fields = {"document_content": word_of(env, "document")}
        episode = await rollout.play(task, 0, "plain", {"temperature": 0.0})
        session = AgentSession(company, fields=fields, temperature=0.0)
        reply = await session.say(question)
        await session.end()
        return episode, session.episodes[0], reply

    async def several():
        return [await both(Task(f"t{seed}", seed=seed)) for seed in range(1)]

    for episode, talked, reply in asyncio.run(several()):
        assert reply.content == episode.answer
        assert [call.completion.tokens for call in talked.calls] == [call.completion.tokens for call in episode.calls]
        assert len(talked.calls) > 1


def test_a_session_is_found_by_the_key_that_began_it_and_by_no_other(opened):
    async def talk():
        async with client_of(opened, keys=["sk-aaaa", "sk-bbbb"]) as client:
            mine, other = {"x-api-key": "sk-aaaa"}, {"x-api-key": "sk-bbbb"}
            at = "/v1/agents/tool/sessions"
            begun = await client.post(at, json={}, headers=mine)
            one = f"{at}/{begun.json()['id']}"
            said = {"content": "Hello"}
            stolen = [
                await client.get(one, headers=other),
                await client.post(f"{one}/messages", json=said, headers=other),
                await client.post(f"{one}/messages", json={**said, "stream": True}, headers=other),
                await client.delete(one, headers=other),
            ]
            own = [
                await client.post(f"{one}/messages", json=said, headers=mine),
                await client.get(one, headers=mine),
                await client.delete(one, headers=mine),
            ]
        return [answer.status_code for answer in stolen], [answer.status_code for answer in own]

    assert asyncio.run(talk()) == ([404] * 4, [200, 200, 204])


def test_no_key_can_take_the_sessions_of_another(opened):
    async def talk():
        async with client_of(opened, keys=["sk-aaaa", "sk-bbbb", "sk-cccc"], sessions=7) as client:

            async def begin(key):
                return await client.post("/v1/agents/tool/sessions", json={}, headers={"x-api-key": key})

            greedy = [await begin("sk-aaaa") for _ in range(4)]
            others = [await begin(key) for key in ("sk-bbbb", "sk-cccc") for _ in range(2)]
            return greedy, others

    greedy, others = asyncio.run(talk())
    assert [answer.status_code for answer in greedy] == [201, 201, 429, 429]
    assert greedy[-1].json()["error"]["code"] == "too_many_sessions"
    assert "retry-after" in greedy[-1].headers
    assert [answer.status_code for answer in others] == [201] * 4
