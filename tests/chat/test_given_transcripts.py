"""A given transcript has the ids that a rollout would have recorded, had the model sampled its replies."""

import asyncio
import math
from dataclasses import replace

import pytest

from arborl.agents.tool_agents import ToolAgent
from arborl.chat import Renderer
from arborl.chat.formats import make_parser
from arborl.data.reading.row_reader import OfflineRowReader
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.env import Env, Observation, Step
from arborl.rollout.offline_episodes import OfflineEpisodes
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.tools import as_tool
from arborl.types import NOT_SAMPLED, FinishReason, Message, Sampling, StopReason, Task

FAMILIES = ("chatml_hermes", "llama3", "thinking")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


ADD = as_tool(add)
TOOLS = [{"type": "function", "function": {"name": ADD.spec.name, "description": ADD.spec.description,
                                           "parameters": ADD.spec.parameters}}]  # fmt: skip
CALL = {"id": "toolu_77", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TRANSCRIPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and two?"},
    {"role": "assistant", "content": "<think>\nI should add.\n</think>\n\nLet me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "toolu_77"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nThe answer is three."},
    {"role": "user", "content": "And again <|im_end|>?"},
    {"role": "assistant", "content": "Three."},
]


class Talk(Env):
    """Says what the user says in the transcript."""

    async def reset(self, task, seed):
        self.user_messages = iter([Message("user", "And again <|im_end|>?")])
        return Observation((Message("system", "Be brief."), Message("user", "One and two?")))

    async def step(self, action):
        following = next(self.user_messages, None)
        return Step(Observation((following,) if following else ()), terminated=following is None)


def given(renderer, row, **more):
    task = OfflineRowReader("rows").task(row, "rows.jsonl, line 1")
    (group,) = OfflineEpisodes(renderer, **({"max_context": 4096} | more)).groups([task])
    return group


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_those_of_a_rollout_in_which_the_model_says_the_same(family, renderer_for, tokenizer):
    plain = renderer_for(family, tokenizer)
    renderer = replace(plain, parser=make_parser("auto", plain.template.sources))
    (shown,) = given(renderer, {"messages": TRANSCRIPT, "tools": TOOLS}).episodes
    replies = [call.completion.tokens for call in shown.calls]
    count = iter(range(len(replies)))
    engine = ScriptedEngine(replies, choose=lambda prompt, session: next(count))
    episode_factories = EpisodeFactories(lambda task: ToolAgent([ADD]), lambda task: Talk())
    rollout = Rollout(engine, renderer, episode_factories, Sampling(512), EpisodeLimits(max_context=4096), 1)
    played = asyncio.run(rollout.play(Task("t"), 0, "t#0"))
    assert played.failure is None, played.failure
    assert [call.prompt for call in shown.calls] == [call.prompt for call in played.calls]
    assert [call.messages for call in shown.calls] == [call.messages for call in played.calls]
    assert [turn.message for turn in shown.turns][-1] == played.turns[-1].message


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_only_the_assistants_words_are_terms_and_each_ends_its_turn(family, renderer_for, tokenizer):
    renderer = renderer_for(family, tokenizer)
    row = {"messages": [TRANSCRIPT[1], TRANSCRIPT[4], TRANSCRIPT[5], TRANSCRIPT[6]]}
    group = given(renderer, row)
    (episode,) = group.episodes
    replies = [tokenizer.decode(call.completion.tokens) for call in episode.calls]
    assert "The answer is three." in replies[0]
    assert replies[1].strip().startswith("Three.")
    assert all(call.completion.tokens[-1] in renderer.stop for call in episode.calls)
    terms = build_token_trees([group]).terms
    assert len(terms) == sum(len(call.completion.tokens) for call in episode.calls)
    assert (terms.version == NOT_SAMPLED).all()
    assert all(math.isnan(value) for value in terms.logprob)
    assert episode.is_offline


def test_thinking_is_kept_as_the_template_shows_it(renderer_for, tokenizer):
    renderer = renderer_for("thinking", tokenizer)
    question, thought = {"role": "user", "content": "?"}, {"role": "assistant", "content": "One."}
    beside = given(renderer, {"messages": [question, thought | {"reasoning_content": "Hm."}]})
    written = given(renderer, {"messages": [question, thought | {"content": "<think>\nHm.\n</think>\n\nOne."}]})
    tokens = beside.episodes[0].calls[0].completion.tokens
    assert tokens == written.episodes[0].calls[0].completion.tokens
    assert "Hm." in tokenizer.decode(tokens)


def test_a_message_may_be_left_out_of_the_loss_and_still_be_seen(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    rows = [
        {"messages": [TRANSCRIPT[1], TRANSCRIPT[4] | flag, TRANSCRIPT[5], TRANSCRIPT[6]]}
        for flag in ({"train": False}, {"loss_mask": 0}, {"weight": 0})
    ]
    for row in rows:
        (episode,) = given(renderer, row).episodes
        assert [call.trained for call in episode.calls] == [False, True]
        assert episode.calls[1].prompt[: len(episode.calls[0].prompt)] == episode.calls[0].prompt


def test_what_goes_beyond_the_context_is_cut_off(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    row = {"messages": [TRANSCRIPT[1], TRANSCRIPT[4], TRANSCRIPT[5], TRANSCRIPT[6]]}
    whole = given(renderer, row).episodes[0]
    max_context = len(whole.calls[0].prompt) + 3
    cut = given(renderer, row, max_context=max_context).episodes[0]
    assert [call.completion.tokens for call in cut.calls] == [whole.calls[0].completion.tokens[:3]]
    assert cut.calls[0].completion.finish is FinishReason.LENGTH
    assert cut.stop is StopReason.CONTEXT_FULL
    assert given(renderer, row, max_context=max_context - 3).episodes[0].calls == []
    task = OfflineRowReader("rows").task(row, "here")
    last = whole.calls[-1]
    assert OfflineEpisodes(renderer, 8).length(task) == len(last.prompt) + len(last.completion.tokens)


def test_calls_are_imitated_where_the_chat_template_leaves_them_out(model_folder):
    folder = model_folder(config={}, tokenizer_config={"eos_token": "<|im_end|>"})
    renderer = Renderer.from_folder(folder, "hermes", chat_template="chatml")
    (episode,) = given(renderer, {"messages": TRANSCRIPT[1:5], "tools": TOOLS}).episodes
    reply = renderer.decode(episode.calls[0].completion.tokens[:-1])
    assert [call.arguments for call in renderer.parser.parse(reply)] == [{"a": 1, "b": 2}]
    assert reply in renderer.tokenizer.decode(episode.calls[1].prompt)
