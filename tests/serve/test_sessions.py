"""Agent sessions: the agent's own loop with a user in place of its environment."""

import asyncio
import json
from pathlib import Path

from serve_clients import client_of

from arborl.agents import FunctionAgent
from arborl.config.load_config import load
from arborl.envs.games.documents_env import Documents
from arborl.envs.wrapper import inner_attribute
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.serve.sessions import AgentSession, ServedAgents
from arborl.training_run.build import build_served
from arborl.types import Message, Task

QUESTION = "What is 12 + 30? Answer as <answer>number</answer>."
SESSIONS = "/v1/agents/tool/sessions"
CALLS = {"temperature": 1.0, "seed": 8}
"""With this seed the embedded model calls the tool for `QUESTION`; most often it guesses."""


def agents_with(loaded, function, env=None):
    agents = loaded.agents
    episode_factories = EpisodeFactories(lambda task: FunctionAgent(function), env or agents.episode_factories.env)
    return ServedAgents(agents.engine, agents.renderer, episode_factories, agents.sampling, agents.limits, ("mine",))


async def replies_to(messages, *arguments, **options):
    session = AgentSession(*arguments, **options)
    try:
        return [await session.send(message) for message in messages], session
    finally:
        await session.end()


def test_an_agent_keeps_its_state_between_messages(loaded):
    async def echo_all(task, env, model):
        messages = list((await env.reset(task, 0)).messages)
        while True:
            text = " ".join(message.content for message in messages)
            step = await env.step(Message("assistant", f"{task.fields.get('sign', '')}{text}"))
            messages += step.observation.messages

    agents = agents_with(loaded, echo_all)
    replies, _ = asyncio.run(replies_to(("one", "two", "three"), agents, fields={"sign": "!"}))
    assert [reply.content for reply in replies] == ["!one", "!one two", "!one two three"]


def test_an_agent_that_has_ended_starts_a_new_episode_with_the_next_message(loaded):
    async def answer_once(task, env, model):
        (message,) = (await env.reset(task, 0)).messages
        await env.step(Message("assistant", message.content.upper()))

    replies, session = asyncio.run(replies_to(("one", "two"), agents_with(loaded, answer_once)))
    assert [reply.content for reply in replies] == ["ONE", "TWO"]
    assert len(session.episodes) == 2


def test_the_first_message_is_presented_as_the_run_environment_presents_a_task(loaded):
    """With its system message and the session's document; without a document there is none of a made-up task."""
    observations = []

    async def look(task, env, model):
        observation = await env.reset(task, 0)
        observations.append((observation.messages, inner_attribute(env, "document")))
        await env.step(Message("assistant", "yes"))

    agents = agents_with(loaded, look, lambda task: Documents(tokens=100))
    for fields in ({"document_content": "A short one."}, {}):
        asyncio.run(replies_to(["What is it about?"], agents, fields=fields))
    (with_document, document), (without, missing) = observations
    task = Task("x", (Message("user", "What is it about?"),), {"document_content": "."})
    expected = asyncio.run(Documents(tokens=100).reset(task, 0))
    assert with_document == expected.messages == without
    assert (document, missing) == ("A short one.", None)


def test_tool_calls_and_results_are_reported_before_the_answer(loaded):
    steps = []
    (reply,), session = asyncio.run(replies_to([QUESTION], loaded.agents, **CALLS, on_step=steps.append))
    call, result = steps
    assert "42" in reply.content
    assert reply.steps == (call, result)
    assert [spec.name for spec in session.tools] == ["calculator"]
    assert call.tool_calls[0].arguments == {"expression": "12 + 30"}
    assert (result.role, result.content) == ("tool", "42")
    assert reply.completion_tokens > 0


def test_a_failing_agent_is_reported_and_affects_no_other_session(loaded):
    async def fail(task, env, model):
        await env.reset(task, 0)
        raise RuntimeError("out of order")

    try:
        asyncio.run(replies_to(["hello"], agents_with(loaded, fail)))
    except Exception as error:
        message = str(error)
    (reply,), _ = asyncio.run(replies_to(["Hello"], loaded.agents, temperature=0.0))
    assert "out of order" in message
    assert reply.content


def test_a_second_message_at_the_same_time_is_refused(loaded):
    async def run():
        session = AgentSession(loaded.agents)
        results = await asyncio.gather(session.send("Hello"), session.send("Hello"), return_exceptions=True)
        await session.end()
        return results

    first, second = asyncio.run(run())
    assert first.content
    assert "one message at a time" in str(second)


def test_a_document_reader_answers_in_a_session_as_in_a_rollout():
    """StateLM on a document eight times its context, greedy: the same answer through the same calls."""
    recipe = Path(__file__).parents[2] / "recipes/statelm/run.yaml"
    served = build_served(load(recipe, ["env.args.tokens=[8200,8300]", "agent.args.max_assistant_turns=6"]))
    parts = (served.engine, served.renderer, served.episode_factories, served.sampling, served.limits)

    async def run(task):
        env = served.episode_factories.env(task)
        question = (await env.reset(task, 0)).messages[-1].content
        fields = {"document_content": inner_attribute(env, "document")}
        episode = await Rollout(*parts, 4).play(task, 0, "plain", {"temperature": 0.0})
        agents = ServedAgents(*parts, ("statelm",))
        return episode, *await replies_to([question], agents, fields=fields, temperature=0.0)

    episode, (reply,), session = asyncio.run(run(Task("t0", seed=0)))
    calls = session.episodes[0].calls
    assert reply.content == episode.answer
    assert [call.completion.tokens for call in calls] == [call.completion.tokens for call in episode.calls]
    assert len(calls) > 1


def test_a_session_over_http(loaded):
    async def run():
        async with client_of(loaded) as client:
            created = (await client.post(SESSIONS, json=CALLS)).json()
            url, body = f"{SESSIONS}/{created['id']}", {"content": QUESTION}
            answer = (await client.post(f"{url}/messages", json=body)).json()
            stream = (await client.post(f"{url}/messages", json={**body, "stream": True})).text
            shown = (await client.get(url)).json()
            codes = [
                (await client.delete(url)).status_code,
                (await client.get(url)).status_code,
                (await client.post("/v1/agents/unknown/sessions", json={})).status_code,
                (await client.post(f"{url}/messages", json=body)).status_code,
                (await client.post(SESSIONS, json={"field": 1})).status_code,
                *[(await client.post(SESSIONS, json={})).status_code for _ in range(5)],
            ]
        return created, answer, stream, shown, codes

    created, answer, stream, shown, codes = asyncio.run(run())
    assert [tool["name"] for tool in created["tools"]] == ["calculator"]
    assert "42" in answer["content"]
    assert [message["role"] for message in answer["steps"]] == ["assistant", "tool"]
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert events[0]["type"] == "start"
    assert events[-1]["type"] == "answer"
    assert [message["role"] for message in shown["messages"]][:3] == ["user", "assistant", "user"]
    assert codes == [204, 404, 404, 404, 400] + [201] * 4 + [429]


def test_a_session_is_visible_only_to_the_key_that_created_it(loaded):
    async def run():
        async with client_of(loaded, keys=["sk-aaaa", "sk-bbbb"]) as client:
            own, other, body = {"x-api-key": "sk-aaaa"}, {"x-api-key": "sk-bbbb"}, {"content": "Hello"}
            created = await client.post(SESSIONS, json={}, headers=own)
            url = f"{SESSIONS}/{created.json()['id']}"
            responses = [
                await client.get(url, headers=other),
                await client.post(f"{url}/messages", json=body, headers=other),
                await client.post(f"{url}/messages", json={**body, "stream": True}, headers=other),
                await client.delete(url, headers=other),
                await client.post(f"{url}/messages", json=body, headers=own),
                await client.get(url, headers=own),
                await client.delete(url, headers=own),
            ]
        return [response.status_code for response in responses]

    assert asyncio.run(run()) == [404] * 4 + [200, 200, 204]


def test_each_key_has_an_equal_share_of_the_sessions(loaded):
    async def run():
        async with client_of(loaded, keys=["sk-aaaa", "sk-bbbb", "sk-cccc"], sessions=7) as client:
            keys = ["sk-aaaa"] * 4 + ["sk-bbbb"] * 2 + ["sk-cccc"] * 2
            return [await client.post(SESSIONS, json={}, headers={"x-api-key": key}) for key in keys]

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [201, 201, 429, 429] + [201] * 4
    assert responses[3].json()["error"]["code"] == "too_many_sessions"
    assert "retry-after" in responses[3].headers
