"""The episode file loses nothing."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.errors import ConfigError, DiskWriteError
from arborl.rollout.episode_store import EpisodeStore, episode_from_json, episode_to_json
from arborl.types import (
    Call,
    Completion,
    Episode,
    Failure,
    FinishReason,
    Group,
    Message,
    StopReason,
    Task,
    ToolCall,
    Turn,
)

numbers = st.floats(allow_nan=False)
texts = st.text(max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
metrics = st.dictionaries(texts, numbers, max_size=3)
tool_calls = st.builds(ToolCall, texts, texts, st.dictionaries(texts, values, max_size=2), st.none() | texts)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    texts,
    st.lists(tool_calls, max_size=2).map(tuple),
    st.none() | texts,
    st.none() | texts,
    st.booleans(),
)
several = st.lists(messages, max_size=3).map(tuple)
tasks = st.builds(
    Task,
    texts,
    several,
    st.dictionaries(texts, values, max_size=3),
    texts,
    st.none() | texts,
    st.none() | texts,
    st.integers(),
)
turns = st.builds(Turn, messages, several, numbers, texts, metrics)
ids = st.lists(st.integers(0, 3), max_size=6).map(tuple)  # few ids, so that prompts often share a beginning


@st.composite
def completions(draw):
    tokens = draw(ids)
    logprobs = draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens)).map(tuple))
    version = draw(st.integers(0, 99))
    versions = draw(st.sampled_from([(), tuple(max(version - n % 3, 0) for n in range(len(tokens)))]))
    return Completion(tokens, logprobs, draw(st.sampled_from(FinishReason)), version, draw(numbers), versions)


@st.composite
def call_lists(draw):
    """Fresh prompts, prompts that extend an earlier call, and prompts that repeat only a part of one."""
    calls = []
    for turn in range(draw(st.integers(0, 5))):
        prompt = draw(ids)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            whole = earlier.prompt + earlier.completion.tokens
            prompt = whole[: draw(st.integers(0, len(whole)))] + prompt
        requests = draw(several)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            requests = earlier.messages + ((earlier.reply,) if earlier.reply else ()) + requests
        calls.append(Call(prompt, draw(completions()), turn, draw(st.booleans()), requests, draw(st.none() | messages)))
    return calls


episodes = st.builds(
    Episode,
    id=texts,
    task=tasks,
    seed=st.integers(0, 2**63 - 1),
    opening=several,
    turns=st.lists(turns, max_size=3),
    calls=call_lists(),
    stop=st.sampled_from(StopReason),
    rewards=metrics,
    metrics=metrics,
    failure=st.none() | st.builds(Failure, texts, texts, texts, texts),
    seconds=numbers,
    turn_weight=numbers,
)


def completion(*tokens):
    return Completion(tokens, tuple(-0.1 * token for token in tokens), FinishReason.STOP)


def group(*given):
    return Group(given[0].task, list(given))


@settings(max_examples=80, deadline=None)
@given(episodes)
def test_an_episode_survives_json_bit_for_bit(episode):
    assert episode_from_json(json.loads(json.dumps(episode_to_json(episode)))) == episode


@settings(max_examples=25, deadline=None)
@given(st.lists(episodes, min_size=1, max_size=3))
def test_a_file_gives_back_equal_episodes_in_order(tmp_path_factory, given_episodes):
    store = EpisodeStore(tmp_path_factory.mktemp("episodes"))
    path = store.write(12, [group(episode) for episode in given_episodes])
    assert path.name == "step-000012.jsonl"
    assert list(store.read(path)) == given_episodes


def test_a_prompt_that_extends_an_earlier_call_stores_only_what_is_new():
    episode = Episode("e", Task("t"))
    episode.calls = [
        Call((1, 2, 3), completion(4, 5), 0),
        Call((1, 2, 3, 4, 5, 6), completion(7), 1),
        Call((1, 2, 9), completion(8), 2),  # the history was edited: a branch
        Call((9, 9), completion(8), 3),
    ]
    assert [row["prompt"] for row in episode_to_json(episode)["calls"]] == [
        [-1, 0, [1, 2, 3]],
        [0, 5, [6]],
        [0, 2, [9]],
        [-1, 0, [9, 9]],
    ]


def test_what_was_stated_and_what_tools_answered_stands_beside_the_ids_as_text():
    episode = Episode("e", Task("t"))
    question = Message("user", "6*7?")
    asks = Message("assistant", "calc(6*7)", (ToolCall("1", "calc", {"of": "6*7"}),), sampled=True)
    result = Message("tool", "42", tool_call_id="1", name="calc")
    episode.calls = [
        Call((1, 2), completion(3), 0, messages=(question,), reply=asks),
        Call((1, 2, 3, 4), completion(5), 0, messages=(question, asks, result), reply=Message("assistant", "42!")),
    ]
    first, second = episode_to_json(episode)["calls"]
    assert first["messages"] == [-1, 0, [{"role": "user", "content": "6*7?"}]]
    assert first["reply"]["tool_calls"] == [{"id": "1", "name": "calc", "arguments": {"of": "6*7"}, "error": None}]
    reported = {"role": "tool", "content": "42", "tool_call_id": "1", "name": "calc"}
    assert second["messages"] == [0, 2, [reported]]  # what was stated before is not stated again
    assert second["reply"] == {"role": "assistant", "content": "42!"}


def test_a_file_of_before_there_were_messages_is_still_read():
    episode = Episode("e", Task("t"), calls=[Call((1, 2), completion(3), 0), Call((1, 2, 3, 4), completion(5), 1)])
    row = episode_to_json(episode)
    for call in row["calls"]:
        del call["messages"], call["reply"]
    assert episode_from_json(row) == episode


def test_a_long_conversation_grows_with_its_length_and_not_with_its_square():
    def size(length):
        episode, prompt, output = Episode("e", Task("t")), (), ()
        for turn in range(length):
            prompt += (1000 + turn,) * 20
            output += (Message("user", f"and {turn:03}?"),)
            reply = Message("assistant", "so")
            episode.calls.append(Call(prompt, completion(7), turn, messages=output, reply=reply))
            prompt, output = (*prompt, 7), (*output, reply)
        return len(json.dumps(episode_to_json(episode)))

    assert size(80) < 2.2 * size(40)


def test_a_torn_last_line_is_passed_over_with_a_warning(tmp_path, caplog):
    store = EpisodeStore(tmp_path)
    path = store.write(0, [group(Episode("a", Task("t")), Episode("b", Task("t")))])
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        assert [episode.id for episode in store.read(path)] == ["a"]
    assert "line 2 is incomplete" in caplog.text


def test_a_broken_line_in_the_middle_is_an_error_that_says_where(tmp_path):
    store = EpisodeStore(tmp_path)
    path = store.write(0, [group(Episode("a", Task("t")))])
    path.write_text("{oops\n" + path.read_text())
    with pytest.raises(ConfigError, match=r"step-000000\.jsonl: line 1: not JSON"):
        list(store.read(path))


@pytest.mark.parametrize("line", ["[]", "3", "{}", '{"id": "a", "task": 3}', "null"])
def test_a_line_of_another_shape_is_an_error_that_says_where(tmp_path, line):
    path = EpisodeStore(tmp_path).write(0, [group(Episode("a", Task("t")))])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"step-000000\.jsonl: line 2 is not an episode"):
        list(EpisodeStore.read(path))


def test_a_full_disk_is_one_sentence_and_the_former_file_is_whole(tmp_path):
    store = EpisodeStore(tmp_path)
    path = store.write(1, [group(Episode("a", Task("t")))])
    (tmp_path / ".step-000001.jsonl.tmp").symlink_to("/dev/full")
    with pytest.raises(DiskWriteError, match=r"step-000001\.jsonl: cannot be written: No space left on device"):
        store.write(1, [group(Episode("b", Task("t")))])
    assert [episode.id for episode in store.read(path)] == ["a"]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_writing_a_step_again_replaces_it_and_leaves_no_other_file(tmp_path):
    store = EpisodeStore(tmp_path / "episodes")
    store.write(3, [group(Episode("old", Task("t")))])
    path = store.write(3, [group(Episode("new", Task("t")))])
    assert [episode.id for episode in store.read(path)] == ["new"]
    assert list((tmp_path / "episodes").iterdir()) == [path]


def test_the_files_come_in_the_order_of_their_steps(tmp_path):
    store = EpisodeStore(tmp_path)
    for step in (1_000_000, 2, 11):
        store.write(step, [])
    assert [path.stem for path in store.paths()] == ["step-000002", "step-000011", "step-1000000"]


def test_fields_beyond_json_do_not_stop_a_run(tmp_path):
    fields = {"array": np.arange(3), "number": np.float32(0.5), "pair": (1, 2), "set": {2, 1}, "where": tmp_path}
    episode = Episode("e", Task("t", fields=fields), metrics={"x": np.float64(0.25)})
    store = EpisodeStore(tmp_path)
    (read,) = store.read(store.write(0, [group(episode)]))
    assert read.task.fields == {
        "array": [0, 1, 2],
        "number": 0.5,
        "pair": [1, 2],
        "set": [1, 2],
        "where": str(tmp_path),
    }


def test_half_a_character_pair_in_a_text_is_kept(tmp_path):
    store = EpisodeStore(tmp_path)
    episode = Episode("e", Task("t"), turns=[Turn(Message("assistant", "\ud83d\u2028 line"))])
    assert list(store.read(store.write(0, [group(episode)]))) == [episode]
