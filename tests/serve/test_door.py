"""Who is let in, and how many: keys, sizes, rates, back-pressure; and what is written down of them."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from conftest_serve import client_of

from arborl.errors import ConfigError
from arborl.serve.app import Bounds
from arborl.serve.door import Load
from arborl.serve.keys import Keys, read_keys
from arborl.serve.source import Unavailable

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
KEY = "sk-a-long-and-secret-one"


def asked(client, **headers):
    return client.post("/v1/chat/completions", json=ASK, headers=headers)


def test_a_wrong_or_missing_key_is_401_and_the_right_one_of_several_is_let_in(opened):
    async def all_of_them():
        async with client_of(opened, keys=["sk-another-one", KEY]) as client:
            return [
                await asked(client),
                await asked(client, authorization="Bearer sk-wrong"),
                await asked(client, authorization=f"Bearer {KEY}x"),
                await asked(client, authorization=KEY.encode("utf-16").hex()),
                await asked(client, authorization=f"Bearer {KEY}"),
                await client.get("/v1/models"),
                await client.get("/health"),
                await client.get("/metrics"),
            ]

    answers = asyncio.run(all_of_them())
    assert [answer.status_code for answer in answers] == [401, 401, 401, 401, 200, 401, 200, 401]
    assert answers[0].json()["error"]["code"] == "invalid_api_key"


def test_a_key_is_never_written_and_requests_have_ids(opened, caplog):
    async def one():
        async with client_of(opened, keys=[KEY]) as client:
            await client.get("/v1/models", headers={"x-api-key": "sk-wrong-and-secret"})
            return await asked(client, authorization=f"Bearer {KEY}", **{"x-request-id": "mine-1"})

    with caplog.at_level(logging.INFO, "arborl.serve.door"):
        answer = asyncio.run(one())
    assert answer.headers["x-request-id"] == "mine-1"
    assert "secret" not in caplog.text
    row = json.loads(caplog.records[-1].message)
    assert row["request"] == "mine-1"
    assert row["key"].startswith("key-")
    assert (row["status"], row["completion_tokens"]) == (200, 3)


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-from-file\n\n")
    keys = read_keys(["sk-from-flag"], file, "sk-one, sk-two")
    assert all(keys.find(key) for key in (b"sk-from-flag", b"sk-from-file", b"sk-one", b"sk-two"))
    assert keys.find(b"") is None
    assert keys.find(b"# ours") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys([], tmp_path / "none", None)
    with pytest.raises(ConfigError, match="empty"):
        Keys([""])


def test_without_a_key_a_page_from_elsewhere_is_not_answered(opened):
    async def both():
        async with client_of(opened) as client:
            return await asked(client, host="evil.example"), await asked(client, origin="http://evil.example")

    assert [answer.status_code for answer in asyncio.run(both())] == [421, 421]


def test_a_body_that_is_too_large_is_refused_also_in_pieces(opened):
    async def both():
        async with client_of(opened, bounds=Bounds(body=1000)) as client:

            async def pieces():
                for _ in range(9):
                    yield b"x" * 200

            return (
                await client.post("/v1/completions", content=b"x" * 1001),
                await client.post("/v1/completions", content=pieces()),
            )

    assert [answer.status_code for answer in asyncio.run(both())] == [413, 413]


def test_one_key_over_its_rate_waits_and_another_does_not(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.limit.default_folder", lambda: tmp_path)

    async def some():
        async with client_of(opened, keys=["sk-aaaa", "sk-bbbb"], bounds=Bounds(per_minute=1, burst=2)) as client:
            mine = [await asked(client, authorization="Bearer sk-aaaa") for _ in range(3)]
            return [*mine, await asked(client, authorization="Bearer sk-bbbb")]

    answers = asyncio.run(some())
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert int(answers[2].headers["retry-after"]) in range(1, 61)


def test_more_at_once_than_there_is_room_for_are_told_to_come_back(opened):
    async def many():
        async with client_of(opened, bounds=Bounds(requests=2)) as client:
            return await asyncio.gather(*(asked(client) for _ in range(8)))

    answers = asyncio.run(many())
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 200] + [429] * 6
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


def test_draining_waits_for_those_who_are_in_and_lets_nobody_else_in():
    async def drained():
        load = Load()
        load.enter()
        waiting = asyncio.create_task(load.drained(5))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            load.enter()
        assert not waiting.done()
        load.leave()
        return await waiting

    assert asyncio.run(drained())


def test_an_engine_that_fails_again_and_again_is_left_alone_for_a_while(opened):
    from arborl.errors import EngineError
    from arborl.serve.speaker import Speaker
    from arborl.tools.breaker import Breaker

    class Fails:
        follows_weights, streams = True, True
        calls = 0

        async def generate(self, prompt, sampling, *, session, heard=None):
            self.calls += 1
            raise EngineError("no")

        def metrics(self):
            return {}

    engine = Fails()
    broken = Speaker(engine, opened.speaker.renderer, opened.speaker.vocabulary, "seedling", 64)
    broken.breaker = Breaker(pause=60.0, longest=60.0)  # a slow machine must not reach the next try

    async def many():
        async with client_of(opened, speaker=broken) as client:
            codes = [(await asked(client)).status_code for _ in range(8)]
            return codes, (await client.get("/ready")).status_code, (await client.get("/live")).status_code

    codes, ready, live = asyncio.run(many())
    assert codes == [500] * 5 + [503] * 3
    assert engine.calls == 5
    assert (ready, live) == (503, 200)
