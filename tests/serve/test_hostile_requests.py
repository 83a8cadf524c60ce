"""Hostile requests: refused within bounds of time and memory, without effect on other clients."""

import asyncio
import gc
import json
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from serve_clients import client_of

from arborl.serve.engine_backend import EngineBackend
from arborl.serve.model_backend import RequestError, ServiceUnavailable
from arborl.serve.parsing import SMALL_BODY_BYTES, RequestWorkers

SIZE = 2_000_000
USER = b'{"role":"user","content":"hi"}'
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def fill(unit, last):
    return unit * (SIZE // len(unit)) + last


def chat(*fields):
    return "chat/completions", b'{"messages":[' + USER + b"]," + b",".join(fields) + b"}"


def tool_call_body(arguments):
    call = b'{"id":"1","function":{"name":"f","arguments":' + arguments + b"}}"
    return "chat/completions", b'{"messages":[' + USER + b',{"role":"assistant","tool_calls":[' + call + b"]}]}"


TOO_COMPLEX = {
    "prompt of objects": ("completions", b'{"prompt":[' + fill(b"{},", b"{}") + b"]}"),
    "prompt of arrays": ("completions", b'{"prompt":[' + fill(b"[],", b"[]") + b"]}"),
    "prompt of strings": ("completions", b'{"prompt":[' + fill(b'"",', b'""') + b"]}"),
    "unknown fields": chat(*(b'"f%d":0' % number for number in range(SIZE // 11))),
    "unknown fields inside": chat(b'"stream_options":{' + fill(b'"a":0,', b'"b":0') + b"}"),
    "tool schema": chat(b'"tools":[{"function":{"name":"f","parameters":{"enum":[' + fill(b"{},", b"{}") + b"]}}}]"),
    "tool calls": tool_call_body(b'{"a":[' + fill(b"{},", b"{}") + b"]}"),
    "tool calls as text": tool_call_body(b'"{\\"a\\":[' + fill(b"{},", b"{}") + b']}"'),
    "messages": ("chat/completions", b'{"messages":[' + fill(USER + b",", USER) + b"]}"),
    "parts": ("chat/completions", b'{"messages":[{"content":[' + fill(b'{"text":"a"},', b"{}") + b"]}]}"),
    "items": ("responses", b'{"input":[' + fill(b"{},", b"{}") + b"]}"),
    "fields of a session": ("agents/tool/sessions", b'{"fields":{"a":[' + fill(b"{},", b"{}") + b"]}}"),
    "stop": chat(b'"stop":[' + fill(b"{},", b"{}") + b"]"),
}
TOO_LONG = {
    "prompt": ("completions", b'{"prompt":"' + fill(b"some words ", b"") + b'"}'),
    "prompt of spaces": ("completions", b'{"prompt":"' + fill(b"        ", b"") + b'"}'),
    "prompts": ("completions", b'{"prompt":[' + b",".join([b'"' + b" " * 30_000 + b'"'] * 64) + b"]}"),
    "message": ("chat/completions", b'{"messages":[{"role":"user","content":"' + fill(b"some words ", b"") + b'"}]}'),
    "tool": chat(b'"tools":[{"function":{"name":"f","description":"' + fill(b"some words ", b"") + b'"}}]'),
    "tool call": tool_call_body(b'{"a":"' + fill(b"some words ", b"") + b'"}'),
    "16 choices": chat(b'"n":16,"tools":[{"function":{"name":"f","description":"' + fill(b"words ", b"") + b'"}}]'),
}
INVALID = {
    "name of a model": chat(b'"model":"' + fill(b"a", b"") + b'"'),
    "name of a user": chat(b'"user":"' + fill(b"a", b"") + b'"'),
    "name of a tool": chat(b'"tool_choice":"required","tools":[{"function":{"name":"' + fill(b"a ", b"") + b'"}}]'),
    "role": ("chat/completions", b'{"messages":[{"role":"' + fill(b"user", b"") + b'","content":""}]}'),
    "name in a message": (
        "chat/completions",
        b'{"messages":[{"role":"user","content":"","name":"' + fill(b"a", b"") + b'"}]}',
    ),
    "metadata": chat(b'"metadata":{' + b",".join(b'"f%d":0' % number for number in range(20_000)) + b"}"),
    "10,000 unknown fields": chat(*(b'"f%d":0' % number for number in range(10_000))),
    "30,000 wrong messages": ("responses", b'{"input":[' + b"1," * 30_000 + b"1]}"),
    "number": chat(b'"seed":' + b"9" * 1_000_000),
    "not JSON": ("chat/completions", b"]" * 1_000_000),
    "UTF-16": ("chat/completions", json.dumps(ASK).encode("utf-16")),
}


def post_all(loaded, requests, **more):
    async def run():
        async with client_of(loaded, **more) as client:
            head = {"content-type": "application/json"}
            return [await client.post(f"/v1/{path}", content=body, headers=head) for path, body in requests]

    return asyncio.run(run())


class WatchingTokenizer:
    """A tokenizer that records the number of characters and the threads of its calls."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_chars, self.threads = tokenizer, 0, set()

    def encode(self, text, quoted=()):
        self.num_chars += len(text)
        self.threads.add(threading.get_ident())
        return self.tokenizer.encode(text, quoted)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def watched_backend(loaded):
    backend = loaded.backend
    tokenizer = WatchingTokenizer(backend.renderer.tokenizer)
    renderer = replace(backend.renderer, tokenizer=tokenizer)
    return EngineBackend(backend.engine, renderer, backend.vocab_size, backend.name, backend.max_context), tokenizer


def peak_of(work):
    """Most megabytes of memory that were held while `work` ran, above what was held before."""

    def held(what):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = held("VmRSS")
    work()
    return held("VmHWM") - before


@pytest.mark.parametrize("name", TOO_COMPLEX)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(loaded, name):
    (answer,) = post_all(loaded, [TOO_COMPLEX[name]])
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "body_too_complex")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hostile_request_uses_little_memory(loaded):
    post_all(loaded, [("chat/completions", json.dumps(ASK).encode())])
    assert peak_of(lambda: post_all(loaded, [TOO_COMPLEX["prompt of objects"]])) < 200  # 2,600 without limits


@pytest.mark.parametrize("name", TOO_LONG)
def test_text_that_exceeds_the_context_is_not_tokenized_completely(loaded, name):
    backend, tokenizer = watched_backend(loaded)
    (answer,) = post_all(loaded, [TOO_LONG[name]], backend=backend)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert tokenizer.num_chars < 100 * backend.max_context


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_request_is_refused_with_a_short_error(loaded, name):
    (answer,) = post_all(loaded, [INVALID[name]])
    assert answer.status_code == 400
    assert len(answer.content) < 5000
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [70, 450, 700, 980, 100_000])
def test_deeply_nested_json_is_refused_in_every_field(loaded, depth):
    nested = b"[" * depth + b"]" * depth
    text = json.dumps('{"a":' + nested.decode() + "}").encode()
    answers = post_all(
        loaded,
        [
            chat(b'"tools":[{"function":{"name":"f","parameters":{"a":' + nested + b"}}}]"),
            chat(b'"metadata":{"a":' + nested + b"}"),
            chat(b'"tool_choice":{"type":' + nested + b"}"),
            tool_call_body(b'{"a":' + nested + b"}"),
            tool_call_body(text),
            ("completions", b'{"prompt":' + nested + b"}"),
            ("responses", b'{"input":' + nested + b"}"),
            ("responses", b'{"input":"hi","metadata":{"a":' + nested + b"}}"),
            ("responses", b'{"input":[{"type":' + nested + b"}]}"),
            ("agents/tool/sessions", b'{"fields":{"a":' + nested + b"}}"),
        ],
    )
    results = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert results == [(400, "body_too_complex")] * 10


def test_other_content_types_than_json_are_refused(loaded):
    async def both():
        async with client_of(loaded) as client:
            body = json.dumps(ASK)
            heads = [{}, {"content-type": "text/plain"}, {"content-type": "Application/JSON; charset=utf-8"}]
            return [await client.post("/v1/chat/completions", content=body, headers=head) for head in heads]

    assert [answer.status_code for answer in asyncio.run(both())] == [400, 400, 200]


def test_large_prompts_are_tokenized_once_and_outside_the_event_loop(loaded):
    backend, tokenizer = watched_backend(loaded)
    content = "some words " * 1000
    assert len(content) > SMALL_BODY_BYTES
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}).encode()
    (answer,) = post_all(loaded, [("chat/completions", body)], backend=backend)
    assert answer.status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads
    backend, tokenizer = watched_backend(loaded)
    body = json.dumps({**ASK, "n": 8, "messages": [{"role": "user", "content": "words " * 500}]}).encode()
    (answer,) = post_all(loaded, [("chat/completions", body)], backend=backend)
    assert len(answer.json()["choices"]) == 8
    assert tokenizer.num_chars < 2 * 6 * 500


def test_hanging_work_times_out_while_other_requests_are_served():
    free = threading.Event()

    async def some():
        workers = RequestWorkers(num_workers=2, seconds=0.1)
        hanging = [asyncio.create_task(workers.run(lambda: free.wait(60), SMALL_BODY_BYTES + 1)) for _ in range(3)]
        small = await workers.run(lambda: "small", SMALL_BODY_BYTES)
        results = await asyncio.gather(*hanging, return_exceptions=True)
        large = await workers.run(lambda: "large", SMALL_BODY_BYTES + 1)
        return small, results, large

    try:
        small, results, large = asyncio.run(some())
    finally:
        free.set()
    assert (small, large) == ("small", "large")
    assert all(isinstance(error, ServiceUnavailable) and error.status == 503 for error in results)


def test_an_error_in_a_worker_is_raised_to_the_request():
    def fails():
        raise RequestError("no")

    async def both():
        workers = RequestWorkers()
        return await asyncio.gather(*(workers.run(fails, size) for size in (1, 10**6)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(both())] == [RequestError, RequestError]


def test_hostile_requests_of_every_kind_at_once_do_not_affect_an_ordinary_one(loaded):
    async def run():
        async with client_of(loaded) as client:
            head = {"content-type": "application/json"}
            kinds = [*TOO_COMPLEX.values(), *TOO_LONG.values(), *INVALID.values()]
            tasks = [asyncio.create_task(client.post(f"/v1/{to}", content=data, headers=head)) for to, data in kinds]
            await asyncio.sleep(0.05)
            for task in tasks[::8]:  # some clients leave in the middle
                task.cancel()
            ordinary = await client.post("/v1/chat/completions", json=ASK)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return ordinary.status_code, {one.status_code for one in results if not isinstance(one, BaseException)}

    ordinary, others = asyncio.run(run())
    assert ordinary == 200
    assert others <= {400, 503}


def test_memory_of_large_requests_is_returned_once_for_all_of_them(monkeypatch):
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr("arborl.serve.parsing.trim_memory", trimmed.release)
    monkeypatch.setattr("arborl.serve.parsing.TRIM_SECONDS", 0.2)

    async def some(size):
        workers = RequestWorkers()
        await asyncio.gather(*(workers.run(lambda: None, size) for _ in range(8)))
        await asyncio.sleep(0.4)

    asyncio.run(some(100_000))
    asyncio.run(some(10_000_000))
    assert trimmed.acquire(timeout=60)
    assert not trimmed.acquire(blocking=False)


@pytest.mark.parametrize("fails", [False, True])
def test_the_objects_of_a_request_are_freed_with_it(fails):
    """Without a run of the garbage collector, which is rare with a model in memory."""

    class Body:
        pass

    def freed():
        async def read():
            body = Body()
            held.append(weakref.ref(body))

            def work():
                if fails:
                    raise RequestError(f"{body}: no")
                return len(f"{body}")

            with suppress(RequestError):
                await RequestWorkers().run(work, SMALL_BODY_BYTES + 1)

        held: list[weakref.ref[Body]] = []
        gc.disable()
        try:
            asyncio.run(read())
            for _ in range(1000):  # until the thread has ended
                if held[0]() is None:
                    return True
                time.sleep(0.01)
            return False
        finally:
            gc.enable()

    assert freed()
