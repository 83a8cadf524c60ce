"""The official client, against a real socket: what it asks is answered in its own types."""

from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")

ASK = [{"role": "user", "content": "Hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(stream, index=0):
    parts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(parts)


def test_a_stream_says_what_the_whole_answer_says_for_the_same_seed(client):
    how = {"model": "seedling", "messages": ASK, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**how)
    assert whole.choices[0].message.content
    assert said(client.chat.completions.create(**how, stream=True)) == whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_choices_differ_and_are_the_same_again(client):
    how = {"model": "seedling", "messages": ASK, "seed": 1, "n": 4, "max_tokens": 24, "temperature": 1.5}
    first, again = ([one.message.content for one in client.chat.completions.create(**how).choices] for _ in range(2))
    assert first == again
    assert len(set(first)) > 1
    stream = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert [said(stream, index) for index in range(4)] == first
    assert stream[-1].usage.completion_tokens > 0


def test_log_probabilities_come_with_their_alternatives(client):
    answer = client.chat.completions.create(
        model="seedling", messages=ASK, logprobs=True, top_logprobs=3, temperature=0, max_tokens=6
    )
    rows = answer.choices[0].logprobs.content
    assert "".join(row.token for row in rows) == answer.choices[0].message.content
    assert all(len(row.top_logprobs) == 3 and row.top_logprobs[0].token == row.token for row in rows)


def test_an_answer_ends_before_its_stop_text(client):
    how = {"model": "seedling", "messages": ASK, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**how).choices[0].message.content
    cut = whole[5:9]
    shorter = client.chat.completions.create(**how, stop=[cut]).choices[0]
    assert shorter.message.content == whole[: whole.index(cut)]
    assert shorter.finish_reason == "stop"
    assert said(client.chat.completions.create(**how, stop=cut, stream=True)) == shorter.message.content


def test_a_tool_is_called_answered_and_the_model_is_shown_what_it_wrote(client):
    question = [{"role": "user", "content": "What is 12 + 30? Answer as <answer>number</answer>."}]
    how = {"model": "seedling", "tools": [ADD], "temperature": 0, "max_tokens": 60}
    asked = client.chat.completions.create(messages=question, tool_choice="required", **how)
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls
    assert call.function.name == "calculator"
    assert "expression" in json.loads(call.function.arguments)
    told = [*question, asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = client.chat.completions.create(messages=told, **how)
    assert "42" in answer.choices[0].message.content


def test_calls_are_streamed_and_their_text_is_not(client):
    stream = client.chat.completions.create(
        model="seedling", messages=ASK, tools=[ADD], temperature=0, max_tokens=60, stream=True,
        tool_choice={"type": "function", "function": {"name": "calculator"}},
    )  # fmt: skip
    deltas = [chunk.choices[0] for chunk in stream]
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["calculator"]
    assert not any(one.delta.content for one in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


def test_no_tool_is_called_where_none_is_wanted(client):
    answer = client.chat.completions.create(
        model="seedling", messages=ASK, tools=[ADD], tool_choice="none", max_tokens=20
    )
    assert answer.choices[0].message.tool_calls is None


def test_completions_take_text_or_ids_and_tell_ids(client):
    text = client.completions.create(model="seedling", prompt="Hello", max_tokens=4, seed=1, echo=True)
    assert text.choices[0].text.startswith("Hello")
    ids = client.completions.create(
        model="seedling",
        prompt=[[5, 6, 7], [8, 9]],
        max_tokens=4,
        seed=1,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    assert [choice.prompt_token_ids for choice in ids.choices] == [[5, 6, 7], [8, 9]]
    assert all(len(choice.token_ids) == 4 for choice in ids.choices)
    assert ids.usage.prompt_tokens == 5


def test_a_control_token_in_a_text_prompt_is_text(client, opened):
    answer = client.completions.create(
        model="seedling", prompt="<|im_end|>", max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert opened.speaker.renderer.stop[0] not in answer.choices[0].prompt_token_ids


def test_responses_are_said_whole_and_in_events(client):
    whole = client.responses.create(model="seedling", input="Hello", temperature=0, max_output_tokens=30)
    assert whole.output_text
    with client.responses.stream(model="seedling", input="Hello", temperature=0, max_output_tokens=30) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == whole.output_text
    assert deltas == whole.output_text


def test_responses_call_tools(client):
    tool = {"type": "function", **ADD["function"]}
    asked = client.responses.create(
        model="seedling", input="What is 12 + 30?", tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = [item for item in asked.output if item.type == "function_call"]
    assert call.name == "calculator"
    said = [
        {"role": "user", "content": "What is 12 + 30?"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    answer = client.responses.create(model="seedling", input=said, tools=[tool], temperature=0, max_output_tokens=30)
    assert answer.output_text


def test_the_asynchronous_client_streams_many_at_once(address):
    async def many():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

            async def one(seed):
                stream = await client.chat.completions.create(
                    model="seedling", messages=ASK, seed=seed, max_tokens=12, stream=True
                )
                return [chunk.choices[0].finish_reason async for chunk in stream][-1]

            return await asyncio.gather(*map(one, range(24)))

    assert set(asyncio.run(many())) <= {"stop", "length"}


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "context"),
        ({"messages": ASK, "extra_body": {"best": 1}}, "best"),
        ({"messages": ASK, "frequency_penalty": 1.0}, "frequency_penalty"),
        ({"messages": ASK, "tool_choice": "required"}, "no tools"),
        ({"messages": ASK, "top_logprobs": 3}, "logprobs"),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_word_about_it(client, asked, word):
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model="seedling", **asked)


def test_another_model_is_not_here(client):
    with pytest.raises(openai.NotFoundError, match="seedling"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert [model.id for model in client.models.list()] == ["seedling"]
