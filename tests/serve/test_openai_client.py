"""The `openai` client against a real socket: responses parse into its types."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

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


PET = {
    "type": "object", "required": ["kind", "age"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30},
                   "name": {"type": "string", "maxLength": 6}},
}  # fmt: skip


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=30)]


def as_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(stream, index=0):
    parts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(parts)


def test_a_stream_equals_the_whole_answer_of_the_same_seed(client):
    how = {"model": "seedling", "messages": ASK, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**how)
    assert whole.choices[0].message.content
    assert text_of(client.chat.completions.create(**how, stream=True)) == whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_choices_differ_and_are_reproducible(client):
    how = {"model": "seedling", "messages": ASK, "seed": 1, "n": 4, "max_tokens": 24, "temperature": 1.5}
    first, again = ([one.message.content for one in client.chat.completions.create(**how).choices] for _ in range(2))
    assert first == again
    assert len(set(first)) > 1
    stream = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert [text_of(stream, index) for index in range(4)] == first
    assert stream[-1].usage.completion_tokens > 0


def test_log_probabilities_include_the_most_likely_tokens(client):
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
    assert text_of(client.chat.completions.create(**how, stop=cut, stream=True)) == shorter.message.content


def test_a_tool_call_and_its_result_continue_the_conversation(client):
    question = [{"role": "user", "content": "What is 12 + 30? Answer as <answer>number</answer>."}]
    how = {"model": "seedling", "tools": [ADD], "temperature": 0, "max_tokens": 60}
    response = client.chat.completions.create(messages=question, tool_choice="required", **how)
    assert response.choices[0].finish_reason == "tool_calls"
    (call,) = response.choices[0].message.tool_calls
    assert call.function.name == "calculator"
    assert "expression" in json.loads(call.function.arguments)
    messages = [*question, response.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = client.chat.completions.create(messages=messages, **how)
    assert "42" in answer.choices[0].message.content


def test_tool_calls_are_streamed_without_their_text(client):
    stream = client.chat.completions.create(
        model="seedling", messages=ASK, tools=[ADD], temperature=0, max_tokens=60, stream=True,
        tool_choice={"type": "function", "function": {"name": "calculator"}},
    )  # fmt: skip
    deltas = [chunk.choices[0] for chunk in stream]
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["calculator"]
    assert not any(one.delta.content for one in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


def test_tool_choice_none_control_text_and_unknown_models(client, loaded):
    answer = client.chat.completions.create(
        model="seedling", messages=ASK, tools=[ADD], tool_choice="none", max_tokens=20
    )
    assert answer.choices[0].message.tool_calls is None
    answer = client.completions.create(
        model="seedling", prompt="<|im_end|>", max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert loaded.backend.renderer.stop[0] not in answer.choices[0].prompt_token_ids
    with pytest.raises(openai.NotFoundError, match="seedling"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert [model.id for model in client.models.list()] == ["seedling"]


def test_completions_accept_text_or_ids_and_return_ids(client):
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


def test_responses_as_a_whole_and_as_events(client):
    whole = client.responses.create(model="seedling", input="Hello", temperature=0, max_output_tokens=30)
    assert whole.output_text
    with client.responses.stream(model="seedling", input="Hello", temperature=0, max_output_tokens=30) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == whole.output_text
    assert deltas == whole.output_text


def test_responses_call_tools(client):
    tool = {"type": "function", **ADD["function"]}
    response = client.responses.create(
        model="seedling", input="What is 12 + 30?", tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "calculator"
    items = [
        {"role": "user", "content": "What is 12 + 30?"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    answer = client.responses.create(model="seedling", input=items, tools=[tool], temperature=0, max_output_tokens=30)
    assert answer.output_text


def test_the_async_client_streams_many_at_once(address):
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
    ("arguments", "word"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "context"),
        ({"messages": ASK, "extra_body": {"best": 1}}, "best"),
        ({"messages": ASK, "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"messages": ASK, "presence_penalty": "much"}, "presence_penalty"),
        ({"messages": ASK, "tool_choice": "required"}, "tools is empty"),
        ({"messages": ASK, "top_logprobs": 3}, "logprobs"),
        ({"messages": ASK, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": ASK, "response_format": {"type": "json_schema"}}, "json_schema"),
        ({"messages": ASK, "response_format": as_format({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"messages": ASK, "response_format": as_format({"type": "string", "pattern": "(?=a)"})}, "pattern"),
        ({"messages": ASK, "response_format": {"type": "json_object"}, "tools": [ADD]}, "tools"),
    ],
)
def test_unsupported_requests_name_the_problem(client, arguments, word):
    with pytest.raises(openai.BadRequestError, match=word):
        client.chat.completions.create(model="seedling", **arguments)


# ------------------------------------------------------------------------------------------------ JSON and penalties


def test_a_json_schema_constrains_the_answer_whole_streamed_and_parsed(client):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance", reason="the extra 'json'")
    how = {"model": "seedling", "messages": ASK, "n": 4, "seed": 3, "response_format": as_format(PET)}
    texts = [choice.message.content for choice in client.chat.completions.create(**how).choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PET)
    stream = list(client.chat.completions.create(**how, stream=True))
    assert [text_of(stream, index) for index in range(4)] == texts
    parsed = client.chat.completions.parse(model="seedling", messages=ASK, response_format=Pet, temperature=0)
    assert parsed.choices[0].message.parsed.kind in ("cat", "dog")


def test_json_mode_and_the_limit_of_tokens(client):
    pytest.importorskip("llguidance", reason="the extra 'json'")
    how = {"model": "seedling", "messages": ASK, "response_format": {"type": "json_object"}, "seed": 1}
    (choice,) = client.chat.completions.create(**how, max_tokens=4).choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")
    how |= {"temperature": 0.7, "max_tokens": 100}
    with ThreadPoolExecutor(32) as pool:  # about a fifth of them end by themselves
        answers = list(pool.map(lambda i: client.chat.completions.create(**how | {"seed": i}).choices[0], range(32)))
    whole = [answer.message.content for answer in answers if answer.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


def test_log_probabilities_of_a_constrained_answer_are_numbers(client):
    pytest.importorskip("llguidance", reason="the extra 'json'")
    answer = client.chat.completions.create(
        model="seedling", messages=ASK, response_format=as_format(PET), logprobs=True, top_logprobs=5, temperature=0
    )
    rows = answer.choices[0].logprobs.content
    assert rows[0].logprob == pytest.approx(0, abs=1e-6)  # only `{` was allowed
    assert [row.token for row in rows[0].top_logprobs] == [rows[0].token]
    assert all(-100 < top.logprob <= 0 for row in rows for top in row.top_logprobs)


def test_different_schemas_and_none_at_once(address):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance", reason="the extra 'json'")
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 2, "maxItems": 4}
    schemas = [PET, numbers, None, {"enum": ["yes", "no"]}]

    async def many():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

            async def one(number):
                schema = schemas[number % 4]
                more = {} if schema is None else {"response_format": as_format(schema)}
                answer = await client.chat.completions.create(
                    model="seedling", messages=ASK, seed=number, max_tokens=200 if schema else 8, **more
                )
                if schema is not None:
                    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
                return answer.usage.completion_tokens

            return await asyncio.gather(*map(one, range(24)))

    assert all(asyncio.run(many()))


def test_responses_have_formats_too(client):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance", reason="the extra 'json'")
    format = {"type": "json_schema", "name": "pet", "schema": PET, "strict": True}
    answer = client.responses.create(model="seedling", input="Hello", text={"format": format})
    jsonschema.validate(json.loads(answer.output_text), PET)
    assert answer.text.format.schema_ == PET
    format["schema"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.responses.create(model="seedling", input="Hello", text={"format": format})


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalties_make_repetition_rarer(client, penalty):
    how = {"model": "seedling", "prompt": "1 2 1 2 1 2", "temperature": 0, "max_tokens": 60}
    more = {"extra_body": {"return_token_ids": True}}
    plain, other = (client.completions.create(**how, **more, **{penalty: size}).choices[0] for size in (0.0, 2.0))
    assert len(set(other.token_ids)) > len(set(plain.token_ids))


BROKEN = {
    "no JSON": (b'{"messages": [', None, "JSON"),
    "not UTF-8": (b'{"model": "\xff\xfe"}', None, "JSON"),
    "no object": (b"[1, 2]", None, ""),
    "nothing": (b"", None, "JSON"),
    "wrong type of a field": (b'{"messages": [{"role": "user"}], "max_tokens": "many"}', "max_tokens", "integer"),
    "wrong type of messages": (b'{"messages": "hello"}', "messages", "list"),
    "unknown role": (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages", "wizard"),
    "no messages": (b"{}", "messages", "required"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_body_is_answered_in_the_form_of_openai(address, name, stream):
    data, param, word = BROKEN[name]
    if stream:
        data = data.replace(b'{"messages"', b'{"stream": true, "messages"')
    answer = httpx.post(f"{address}/v1/chat/completions", content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert word.lower() in error["message"].lower()
