"""Compression for every agent: what a policy may leave out, what it never does, and that every token is trained once.

Played through the real rollout: a scripted engine, seedling's template and tokens.
"""

import asyncio
import itertools
import json
import re

import pytest

import arborl
from arborl.agents import AGENTS
from arborl.agents.context.managed_conversation import SUMMARY_REQUEST, ContextPolicy
from arborl.agents.context.statelm import StateLM
from arborl.chat import HermesParser, Renderer, Template
from arborl.config.load_config import from_kwargs
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.conversation_env import Conversation
from arborl.errors import ConfigError
from arborl.models.model_files import SEEDLING_DIR
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.tools import tool
from arborl.track.jsonl import read_metrics
from arborl.training_run.part_factory import RunPartFactory, replies
from arborl.types import Group, Message, Sampling, StopReason, Task

SYSTEM = "Be kind."
SUMMARY = "They said much."
POLICIES = {
    "window": ContextPolicy("window", window=3),
    "truncate": ContextPolicy("truncate", compress_at=0.7, compression_ratio=0.5),
    "summary": ContextPolicy("summary", compress_at=0.7),
}


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"In {place} there is much to see. " + "grass " * 8


CALL = '<tool_call>{"name": "look", "arguments": {"place": "the park"}}</tool_call>'
REACT = 'Thought: look\nAction: look\nAction Input: {"place": "the park"}'
SAYS = {
    "chat": ["I hear you."],
    "tool": [CALL, CALL, "I hear you."],
    "code": ["<code>the park</code>", "<code>the park</code>", "<answer>I hear you.</answer>"],
    "react": [REACT, REACT, "Final Answer: I hear you."],
}
"""What an agent's model says in one turn, over and over."""


class Talker(Env):
    """A user who says the next thing, so many times; each has a word of its own."""

    blocking = False

    def __init__(self, turns=6, words=12, system=SYSTEM, huge=None):
        self.turns, self.words, self.system, self.huge = turns, words, system, huge

    def line(self, turn):
        long = 5000 if turn == self.huge else self.words
        return Message("user", f"This is word{turn}. " + "and so on " * long)

    async def reset(self, task, seed):
        self.turn = 0
        head = (Message("system", self.system),) if self.system else ()
        return Observation((*head, self.line(0)))

    async def step(self, action):
        self.turn += 1
        return Step(Observation((self.line(self.turn),)), terminated=self.turn >= self.turns)


@pytest.fixture(scope="module")
def renderer():
    return Renderer.from_folder(SEEDLING_DIR)


def agent_of(name, policy, **more):
    tools = {} if name == "chat" else {"tools": [look]}
    return AGENTS[name](context=policy, **tools, **more)


def play(renderer, name, policy, env=None, window=520, tokens=24, script=None, seed=0, **more):
    """One episode; requested for a summary, the model writes one."""
    says = list(script or SAYS[name])
    texts = [*says, SUMMARY]
    spoken = itertools.count()

    def choose(prompt, session):
        if SUMMARY_REQUEST[:40] in renderer.tokenizer.decode(prompt)[-400:]:
            return len(says)
        return next(spoken) % len(says)

    engine = ScriptedEngine(replies(renderer, texts), choose, decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: agent_of(name, policy, **more), lambda task: env or Talker())
    rollout = Rollout(
        engine, renderer, episode_factories, Sampling(tokens), EpisodeLimits(max_context=window), concurrency=1
    )
    episode = asyncio.run(rollout.play(Task("t", seed=1), seed, "t#0"))
    assert episode.failure is None, episode.failure.traceback
    return episode


def asks_for_summary(call):
    return call.messages[-1].content.endswith(SUMMARY_REQUEST)


def newest(call):
    """The highest of the user's words that a prompt shows."""
    return max(int(found) for message in call.messages for found in re.findall(r"word(\d+)\.", message.content))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SAYS)
def test_every_sampled_token_is_one_loss_term_in_the_context_it_was_sampled_in(renderer, name, policy):
    episode = play(renderer, name, POLICIES[policy])
    assert episode.stop == StopReason.DONE
    assert len(set(episode.branches)) > 1  # it was compressed
    forest = build_token_trees([Group(episode.task, [episode])])
    assert forest.terms.token.tolist() == [token for call in episode.calls for token in call.completion.tokens]
    tree = forest.trees[0]
    for number, call in enumerate(episode.calls):
        (rows,) = (forest.terms.call == number).nonzero()
        seen = [*call.prompt, *call.completion.tokens]
        for place, row in enumerate(rows):
            at = int(forest.terms.position[row])
            past = [int(tree.tokens[k]) for k in range(at + 1) if at < tree.end[k]]
            assert past == seen[: len(call.prompt) + place]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SAYS)
def test_prompts_are_whole_renders_within_the_window_and_grow_until_an_edit(renderer, name, policy):
    episode = play(renderer, name, POLICIES[policy])
    specs = agent_of(name, None).specs if name == "tool" else ()
    for call in episode.calls:
        assert list(call.prompt) == renderer.encode(renderer.render(call.messages, specs))
        assert len(call.prompt) + len(call.completion.tokens) <= 520
        assert call.messages[0].role == "system"
        assert call.messages[0].content.startswith(SYSTEM)
        assert call.messages[1].content.startswith("This is word0.")
        assert newest(call) == call.turn or asks_for_summary(call)
    if policy != "window":  # a window moves with every message
        edits = sum(episode.metrics[f"context/{kind}"] for kind in ("folded", "truncated"))
        assert edits > 0
        assert len(set(episode.branches)) <= 1 + edits
    assert episode.metrics["context/exceeded"] == 0
    assert episode.metrics["context/peak"] == max(len(c.prompt) + len(c.completion.tokens) for c in episode.calls)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["tool", "code", "react"])
def test_an_answer_is_never_shown_without_its_call(renderer, name, policy):
    episode = play(renderer, name, POLICIES[policy], env=Talker(3))
    for call in episode.calls:
        for before, message in itertools.pairwise(call.messages):
            if message.content.startswith(("In the park", "<result>", "Observation:")):
                assert before.role == "assistant"
        output = [m for m in call.messages if m.content in SAYS[name][:1]]
        heard = [m for m in call.messages if "there is much to see" in m.content]
        assert len(output) == len(heard)


@pytest.mark.parametrize("name", SAYS)
def test_without_a_policy_an_agent_shows_all_and_ends_when_it_is_full(renderer, name):
    episode = play(renderer, name, None, env=Talker(20))
    assert episode.stop == StopReason.CONTEXT_FULL
    assert set(episode.branches) == {0}
    assert not any(metric.startswith("context/") for metric in episode.metrics)


@pytest.mark.parametrize("trained", [True, False])
def test_a_summary_is_sampled_and_trained_if_requested(renderer, trained):
    episode = play(renderer, "tool", ContextPolicy("summary", compress_at=0.7, train_summaries=trained))
    written = [call for call in episode.calls if asks_for_summary(call)]
    assert len(written) == episode.metrics["context/folded"] > 0
    assert {call.trained for call in written} == {trained}
    assert renderer.read(written[0].completion).content == SUMMARY
    after = episode.calls[episode.calls.index(written[0]) + 1]
    assert f"[Previous Summary]: {SUMMARY}" in after.messages[1].content
    before = episode.calls[episode.calls.index(written[0]) - 1]
    whole = (*before.prompt, *before.completion.tokens)
    assert (
        written[0].prompt[: len(whole)] == whole
    )  # it is requested where the conversation stands: nothing is read again


def conversation():
    lines = [f"This is word{n}. " + "blah " * 20 for n in range(6)]
    personas = [{"name": str(number)} for number in range(30)]
    return Conversation(scenarios=[{"id": "a", "topic": "t", "user_responses": lines}], personas=personas, max_turns=6)


def test_a_summary_in_a_conversation_does_not_lose_what_the_user_stated_last(renderer):
    agent = {"toolset": ["finish"], "policy": "summary", "compress_at": 0.5, "form": "brief"}
    engine = ScriptedEngine(replies(renderer, ["I see."]), decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: StateLM(**agent), lambda task: conversation())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(32), EpisodeLimits(max_context=500), concurrency=1)
    episode = asyncio.run(rollout.play(Task("t", seed=1), 0, "t#0"))
    assert episode.failure is None
    assert episode.metrics["context/folded"] > 0
    for call in episode.calls:
        assert newest(call) == call.turn or asks_for_summary(call)


def test_summaries_keep_the_newest_message_in_view(renderer):
    episode = play(renderer, "chat", POLICIES["summary"])
    for call in episode.calls:
        if asks_for_summary(call):
            assert newest(call) == call.turn - 1
            assert call.messages[-2].role == "assistant"

    episode = play(renderer, "tool", POLICIES["summary"], env=Talker(2), script=[CALL] * 8 + ["Done."])
    second = [call for call in episode.calls if call.turn == 1]
    assert sum(map(asks_for_summary, second)) > 1
    assert all(newest(call) == 1 for call in second[1:])
    assert episode.stop == StopReason.DONE


@pytest.mark.parametrize("policy", POLICIES)
def test_a_message_that_is_too_long_by_itself_ends_the_episode_and_says_so(renderer, policy):
    episode = play(renderer, "chat", POLICIES[policy], env=Talker(huge=3))
    assert episode.stop == StopReason.CONTEXT_FULL
    assert episode.metrics["context/exceeded"] == 1
    assert len(episode.turns) == 3


def test_a_tool_result_that_is_too_long_ends_the_episode_and_is_not_torn_from_its_call(renderer):
    @tool
    def look(place: str) -> str:
        """Look at a place."""
        return "grass " * 4000

    engine = ScriptedEngine(replies(renderer, [CALL]), decode=renderer.tokenizer.decode)
    for policy in POLICIES.values():
        episode_factories = EpisodeFactories(
            lambda task, policy=policy: AGENTS["tool"]([look], context=policy), lambda task: Talker()
        )
        rollout = Rollout(
            engine, renderer, episode_factories, Sampling(24), EpisodeLimits(max_context=520), concurrency=1
        )
        episode = asyncio.run(rollout.play(Task("t"), 0, "t#0"))
        assert episode.failure is None
        assert episode.stop == StopReason.CONTEXT_FULL
        assert episode.metrics["context/exceeded"] == 1


def test_small_windows_end_and_small_turns_go_on(renderer):
    for window in range(26, 200, 7):
        for policy in POLICIES.values():
            episode = play(renderer, "chat", policy, env=Talker(4, words=1), window=window, tokens=8)
            assert episode.stop in (StopReason.CONTEXT_FULL, StopReason.DONE)
            assert all(len(c.prompt) + len(c.completion.tokens) <= window for c in episode.calls)

    for policy in POLICIES.values():
        episode = play(renderer, "chat", policy, env=Talker(30, words=0), window=200, tokens=8)
        assert episode.stop == StopReason.DONE
        assert len(episode.turns) == 30


def test_a_template_that_wants_roles_to_alternate_is_given_them(renderer):
    source = (
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    strict = Renderer(renderer.tokenizer, Template(source, None, "<|im_end|>"), HermesParser(), renderer.stop)
    for name, policy in itertools.product(("chat", "react"), POLICIES.values()):
        episode = play(strict, name, policy, **({"result_role": "tool"} if name == "react" else {}))
        assert len(set(episode.branches)) > 1


def test_an_opening_without_a_question_still_shows_the_summary(renderer):
    class First(Talker):
        async def reset(self, task, seed):
            await super().reset(task, seed)
            return Observation((Message("system", SYSTEM),))

    episode = play(renderer, "chat", POLICIES["summary"], env=First(8))
    assert episode.metrics["context/folded"] > 0
    last = episode.calls[-1].messages
    assert [message.role for message in last[:2]] == ["system", "user"]
    assert last[1].content.startswith(f"[Previous Summary]: {SUMMARY}")


def test_a_policy_is_given_to_every_agent_that_takes_one_and_by_source():
    sources = {
        "a": {"env": "frozen_lake", "agent": "tool", "tools": ["calculator"]},
        "b": {"env": "frozen_lake", "agent": "react", "tools": ["calculator"], "context": "none"},
        "c": {"env": "documents", "agent": "statelm", "context": {"policy": "window", "args": {"window": 4}}},
    }
    config = from_kwargs(context={"policy": "summary", "args": {"compress_at": 0.6}}, data={"sources": sources})
    episode_factories = RunPartFactory(config, {}).episode_factories()
    run, a, b, c = (episode_factories.agent(Task("t", source=name)) for name in ("", "a", "b", "c"))
    assert run.context == a.context == ContextPolicy("summary", compress_at=0.6)
    assert b.context is None
    assert c.policy == ContextPolicy("window", window=4)
    assert from_kwargs(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"context": "sumary"}, "context.policy: must be one of none, window, truncate, summary"),
        ({"context": {"policy": "summary", "args": {"window": 3}}}, "context.args.window: is for policy=window"),
        ({"context.args.compress_at": 0.3}, "context.args.compress_at: is for policy=truncate and summary"),
        ({"context": {"policy": "summary", "args": {"compress_at": 0}}}, "context.args.compress_at"),
    ],
)
def test_settings_of_a_policy_that_is_not_there_are_refused(given, words):
    with pytest.raises(ConfigError) as output:
        from_kwargs(**given)
    assert words in str(output.value)


async def mine(task, env, model):
    """An agent that takes no policy."""


def test_an_agent_that_takes_no_policy_is_refused_before_anything_starts():
    for agent in ("step", f"{__name__}:mine"):
        objects = {f"{__name__}:mine": mine}
        with pytest.raises(ConfigError, match=f"context.policy=window with agent={agent}"):
            RunPartFactory(from_kwargs(agent=agent, context="window"), objects).episode_factories()
    both = from_kwargs(env="documents", agent={"name": "statelm", "args": {"policy": "none"}}, context="window")
    with pytest.raises(ConfigError, match=r"policy=none and context\.policy=window"):
        RunPartFactory(both, {}).episode_factories()


def test_an_episode_is_the_same_when_it_is_played_again_and_beside_others(renderer):
    def tokens(episode):
        return json.dumps([(*call.whole, len(call.prompt)) for call in episode.calls])

    engine = ScriptedEngine(replies(renderer, [*SAYS["tool"], SUMMARY]), decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: agent_of("tool", POLICIES["summary"]), lambda task: Talker(4))
    many = Rollout(engine, renderer, episode_factories, Sampling(24), EpisodeLimits(max_context=520), concurrency=8)
    one = Rollout(engine, renderer, episode_factories, Sampling(24), EpisodeLimits(max_context=520), concurrency=1)
    (beside,), (alone,) = (asyncio.run(made.collect([Task("t")], 5, 4)) for made in (many, one))
    assert [tokens(e) for e in beside.episodes] == [tokens(e) for e in alone.episodes]
    assert len({tokens(e) for e in alone.episodes}) > 1


@arborl.reward
def sampled(episode):
    return float(episode.sampled % 7)


@pytest.mark.slow
def test_a_compressed_run_that_was_stopped_and_resumed_ends_as_one_that_was_not(tmp_path):
    settings = {
        "env": {"name": "conversation", "args": {"preset": "sales", "max_turns": 6}}, "agent.system": "Sell.",
        "env.prompt.observation": "Turn {turn_idx}: {observation}",
        "context": {"policy": "summary", "args": {"compress_at": 0.5}}, "rewards": [sampled], "deterministic": True,
        "threads": 1,
        "sampling.max_context": 220, "sampling.max_tokens": 24, "evaluation.tasks": 0, "rollout.tasks_per_step": 2,
        "rollout.group_size": 4, "learner.decay": "none", "track.gifs": 0, "track.tensorboard": False,
    }  # fmt: skip
    arborl.run(steps=2, output_dir=tmp_path / "whole", **settings)
    arborl.run(steps=1, output_dir=tmp_path / "parts", **settings)
    arborl.run(steps=2, output_dir=tmp_path / "parts", resume="latest", **settings)
    whole, parts = ((tmp_path / name) for name in ("whole", "parts"))
    last = "checkpoints/step-000002/model/model.safetensors"
    assert (whole / last).read_bytes() == (parts / last).read_bytes()
    (*_, numbers) = read_metrics(whole / "metrics.jsonl")
    assert numbers["episode/context/folded"] > 0
    assert numbers["learner/terms"] == 8 * numbers["episode/sampled"]
    assert numbers["policy/logprob_diff_max"] < 1e-4
