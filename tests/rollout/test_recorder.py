"""What the recorder keeps is what the engine was given and gave, whatever the tokenizer does to texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from arborl.agents.agent_interface import FunctionAgent
from arborl.agents.chat_agents import ChatAgent
from arborl.chat import HermesParser, Renderer, Template
from arborl.chat.conversation import messages_exceed
from arborl.chat.messages import read_tools
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Group, Message, Sampling, StopReason, Task, ToolSpec

STOP = 0
SHAPE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Adversary:
    """Ten ids for every character; `encode` always takes the first, so encode(decode(x)) is almost never x."""

    vocab_size = 20_000
    control = tags = frozenset()

    def encode(self, text: str) -> list[int]:
        return [STOP if c == ";" else ord(c) * 10 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(";" if i == STOP else chr(i // 10) for i in ids)

    def token_id(self, text: str) -> int | None:
        return STOP if text == ";" else None


class Echo(Env):
    """Three turns of small talk."""

    async def reset(self, task, seed):
        self.turns = 0
        return Observation((Message("user", "hello"),))

    async def step(self, action):
        self.turns += 1
        return Step(Observation((Message("user", f"you said {action.content}"),)), terminated=self.turns == 3)


class Noting(ScriptedEngine):
    """Remembers every prompt it was given."""

    def __init__(self, replies):
        super().__init__(replies)
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt, sampling, *, session):
        self.prompts.append(tuple(prompt))
        return await super().generate(prompt, sampling, session=session)


def test_an_adversarial_tokenizer_never_changes_a_trained_id():
    tokenizer = Adversary()
    renderer = Renderer(tokenizer, Template(SHAPE, None, ";"), HermesParser(), (STOP,))
    odd = [[ord(c) * 10 + 7 for c in word] + [STOP] for word in ("yes", "no", "maybe")]
    assert all(tokenizer.encode(tokenizer.decode(reply)) != reply for reply in odd)
    engine = Noting(odd)
    episode_factories = EpisodeFactories(agent=lambda task: ChatAgent(), env=lambda task: Echo())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(16), EpisodeLimits(max_context=2000), concurrency=4)
    (group,) = asyncio.run(rollout.collect([Task("t")], seed=0, group_size=5))

    sampled = [token for e in group.episodes for c in e.calls for token in c.completion.tokens]
    forest = build_token_trees([group])
    assert forest.terms.token.tolist() == sampled
    assert {tuple(c.completion.tokens) for e in group.episodes for c in e.calls} <= {tuple(reply) for reply in odd}
    assert sorted(engine.prompts) == sorted(c.prompt for e in group.episodes for c in e.calls)
    for episode in group.episodes:
        assert episode.failure is None
        for call, following in zip(episode.calls, episode.calls[1:], strict=False):
            assert following.prompt[: len(call.prompt) + len(call.completion.tokens)] == (
                *call.prompt,
                *call.completion.tokens,
            )
    # one append-only conversation an episode: no branch was opened for want of matching text
    assert build_token_trees([Group(Task("t"), group.episodes[:1])]).raw_tokens == len(episode_row(group.episodes[0]))


def played(agent, replies=("yes",)):
    """One episode of Echo, and the samplings that were requested for."""
    renderer = Renderer(Adversary(), Template(SHAPE, None, ";"), HermesParser(), (STOP,))
    engine = Noting([[ord(c) * 10 for c in word] + [STOP] for word in replies])
    engine.decode = renderer.tokenizer.decode
    episode_factories = EpisodeFactories(agent=lambda task: FunctionAgent(agent), env=lambda task: Echo())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(16), EpisodeLimits(max_context=2000), concurrency=4)
    (group,) = asyncio.run(rollout.collect([Task("t")], seed=0, group_size=1))
    return group.episodes[0], engine, renderer


def test_dicts_in_openais_shape_are_messages():
    given = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        Message("user", "hi"),
    ]

    async def agent(task, env, model):
        await env.reset(task, task.seed)
        await model.chat(given)

    episode, engine, renderer = played(agent)
    assert episode.failure is None
    assert renderer.tokenizer.decode(engine.prompts[0]) == "[system]be brief;[user]hi;[assistant]"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "messages: str, not a list"),
        ({"role": "user", "content": "x"}, "messages: dict, not a list"),
        ([{"content": "x"}], "messages[0].role: None is not a role"),
        ([{"role": "usr", "content": "x"}], "Did you mean 'user'?"),
        ([Message("user", "x"), {"role": "user", "content": 5}], "messages[1].content: int, not text"),
        ([Message("user", 5)], "messages[0].content: int, not text"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id: int, not text"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "messages[0].tool_calls[0]: not a call"),
        (["hello"], "messages[0]: str, not an object"),
    ],
)
def test_what_is_no_message_is_refused_with_the_name_of_its_field(messages, complaint):
    async def agent(task, env, model):
        await env.reset(task, task.seed)
        await model.chat(messages)

    episode, _, _ = played(agent)
    assert episode.failure is not None
    assert episode.failure.where.startswith("agent")
    assert complaint in episode.failure.message


ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def test_tools_in_openais_shape_are_tools():
    seen = []

    async def agent(task, env, model):
        await env.reset(task, task.seed)
        seen.append(read_tools([ADD, ToolSpec("sub", "", {})], "tools"))
        await model.chat([Message("user", "hi")], [ADD])

    episode, _, _ = played(agent)
    assert episode.failure is None
    assert seen == [(ToolSpec("add", "Adds.", {"type": "object"}), ToolSpec("sub", "", {}))]


@pytest.mark.parametrize("tools", ["add", ["add"], [{"type": "function"}], ADD])
def test_what_is_no_tool_is_refused_with_what_to_write(tools):
    async def agent(task, env, model):
        await env.reset(task, task.seed)
        await model.chat([Message("user", "hi")], tools)

    episode, _, _ = played(agent)
    assert episode.failure is not None
    assert "model.chat, tools" in episode.failure.message
    assert '"type": "function"' in episode.failure.message


def test_one_stop_text_is_one_text_and_not_its_letters():
    async def agent(task, env, model):
        observation = await env.reset(task, task.seed)
        for stop in ("ye", ("ye", "zz")):
            await env.step(await model.chat(observation.messages, stop=stop))

    episode, _, renderer = played(agent, ("eyes",))
    assert [renderer.tokenizer.decode(call.completion.tokens) for call in episode.calls] == ["eye", "eye"]


def test_a_step_before_reset_says_what_to_do():
    async def agent(task, env, model):
        await env.step(await model.chat([Message("user", "hi")]))

    episode, _, _ = played(agent)
    assert "await env.reset(task, task.seed)" in episode.failure.message
    assert episode.failure.where.startswith("agent")


def test_an_agent_that_never_asks_the_model_is_counted():
    async def mute(task, env, model):
        await env.reset(task, task.seed)
        await env.step(Message("assistant", "up"))

    async def talks(task, env, model):
        observation = await env.reset(task, task.seed)
        await env.step(await model.chat(observation.messages))

    assert played(mute)[0].metrics["agent/silent"] == 1.0
    assert "agent/silent" not in played(talks)[0].metrics


def episode_row(episode) -> tuple[int, ...]:
    last = episode.calls[-1]
    return (*last.prompt, *last.completion.tokens)


class Counting(Adversary):
    """Notes how much text it is given; a run of white space is one token."""

    def __init__(self):
        self.given: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.given.append(len(text))
        return super().encode(" ".join(text.split(" ")) if text.strip() else "x")


class Page(Env):
    """Shows a text."""

    def __init__(self, text: str):
        self.text = text

    async def reset(self, task, seed):
        return Observation((Message("user", "look"),))

    async def step(self, action):
        return Step(Observation((Message("user", self.text),)))


def shown(text: str, max_context: int = 500):
    tokenizer = Counting()
    renderer = Renderer(tokenizer, Template(SHAPE, None, ";"), HermesParser(), (STOP,))
    episode_factories = EpisodeFactories(agent=lambda task: ChatAgent(), env=lambda task: Page(text))
    engine = ScriptedEngine([[ord("y") * 10, STOP]])
    rollout = Rollout(
        engine,
        renderer,
        episode_factories,
        Sampling(16),
        EpisodeLimits(max_turns=2, max_context=max_context),
        concurrency=4,
    )
    (group,) = asyncio.run(rollout.collect([Task("t")], seed=0, group_size=1))
    return group.episodes[0], tokenizer.given


def test_an_observation_of_megabytes_fills_the_context_and_is_not_tokenised_to_find_out():
    episode, given = shown("five megabytes " * 350_000)
    assert (episode.failure, episode.stop) == (None, StopReason.CONTEXT_FULL)
    assert len(episode.calls) == 1
    assert max(given) < 10_000


def test_a_long_text_of_long_tokens_is_shown():
    """The bound is in tokens: characters only say where to look."""
    tokenizer = Counting()
    assert not messages_exceed([Message("user", " " * 100_000)], tokenizer, most=500)
    assert messages_exceed([Message("tool", "a" * 100_000)], tokenizer, most=500)
    assert not messages_exceed(
        [Message("assistant", "a" * 100_000)], tokenizer, most=500
    )  # old thinking may be left out
    assert not messages_exceed([Message("user", "a" * 4000)], tokenizer, most=500)  # tokenised whole, as ever
