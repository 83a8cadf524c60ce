"""API keys, body size, rate limits, concurrency, draining, the circuit breaker, and the request log."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time

import pytest
from serve_clients import CHAT, HELLO, client_of

from arborl.engines.engine import Engine
from arborl.errors import ConfigError, EngineError
from arborl.retry import CircuitBreaker
from arborl.serve.api_server import ServerLimits
from arborl.serve.engine_backend import EngineBackend
from arborl.serve.middleware import ApiKeys, KeyRateLimits, RequestLoad, read_api_keys
from arborl.serve.model_backend import ServiceUnavailable

KEY = "sk-a-long-and-secret-one"
NAMES = ApiKeys([KEY]).names
KILLED_SERVER = f"""
import asyncio, os, sys
from pathlib import Path
import arborl.tools.core.rate_limit as limit
limit.default_limit_dir = lambda: Path(sys.argv[1])
from arborl.serve.middleware import KeyRateLimits
async def serve():
    rates = KeyRateLimits({NAMES!r}, 1, 2)
    for _ in range(2):
        await rates.count({NAMES[0]!r})
asyncio.run(serve())
os.kill(os.getpid(), 9)
"""


def chat(client, key=None, **headers):
    return client.post(CHAT, json=HELLO, headers=headers | ({"x-api-key": key} if key else {}))


def with_client(loaded, work, **options):
    async def run():
        async with client_of(loaded, **options) as client:
            return await work(client)

    return asyncio.run(run())


def test_a_wrong_or_missing_key_is_401_and_each_of_several_keys_is_accepted(loaded):
    async def work(client):
        return [
            await chat(client),
            await chat(client, authorization="Bearer sk-wrong"),
            await chat(client, authorization=f"Bearer {KEY}x"),
            await chat(client, authorization=KEY.encode("utf-16").hex()),
            await chat(client, authorization=f"Bearer {KEY}"),
            await client.get("/v1/models"),
            await client.get("/health"),
            await client.get("/metrics"),
        ]

    responses = with_client(loaded, work, keys=["sk-another-one", KEY])
    assert [response.status_code for response in responses] == [401, 401, 401, 401, 200, 401, 200, 401]
    assert responses[0].json()["error"]["code"] == "invalid_api_key"


def test_requests_are_logged_with_their_id_and_without_keys(loaded, caplog):
    async def work(client):
        await client.get("/v1/models", headers={"x-api-key": "sk-wrong-and-secret"})
        return await chat(client, KEY, **{"x-request-id": "mine-1"})

    with caplog.at_level(logging.INFO, "arborl.serve.middleware"):
        response = with_client(loaded, work, keys=[KEY])
    assert response.headers["x-request-id"] == "mine-1"
    assert "secret" not in caplog.text
    row = json.loads(caplog.records[-1].message)
    assert (row["request"], row["key"][:4], row["status"], row["completion_tokens"]) == ("mine-1", "key-", 200, 3)


def test_keys_come_from_options_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-from-file\n\n")
    keys = read_api_keys(["sk-from-flag"], file, "sk-one, sk-two")
    assert all(keys.find(key) for key in (b"sk-from-flag", b"sk-from-file", b"sk-one", b"sk-two"))
    assert keys.find(b"") is None
    assert keys.find(b"# ours") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys([], tmp_path / "none", None)
    with pytest.raises(ConfigError, match="empty"):
        ApiKeys([""])


def test_foreign_hosts_are_refused_without_keys_and_public_paths_need_none(loaded, folder):
    async def work(client):
        return await chat(client, host="evil.example"), await chat(client, origin="http://evil.example")

    assert [response.status_code for response in with_client(loaded, work)] == [421, 421]

    async def work(client):
        return (await client.post("/health")).status_code

    assert with_client(loaded, work, keys=[KEY], limits=ServerLimits(per_minute=60, burst=3)) == 405


def test_a_too_large_body_is_refused_with_and_without_content_length(loaded):
    async def chunks():
        for _ in range(9):
            yield b"x" * 200

    async def work(client):
        return [(await client.post(CHAT, content=content)).status_code for content in (b"x" * 1001, chunks())]

    assert with_client(loaded, work, limits=ServerLimits(max_body_bytes=1000)) == [413, 413]


def test_concurrency_and_rates_are_limited(loaded, folder):
    async def work(client):
        return await asyncio.gather(*(chat(client) for _ in range(8)))

    responses = with_client(loaded, work, limits=ServerLimits(max_requests=2))
    assert sorted(response.status_code for response in responses) == [200, 200] + [429] * 6
    assert all("retry-after" in response.headers for response in responses if response.status_code == 429)

    async def work(client):
        return [await chat(client, key) for key in ("sk-aaaa", "sk-aaaa", "sk-aaaa", "sk-bbbb")]

    limits = ServerLimits(per_minute=1, burst=2)
    responses = with_client(loaded, work, keys=["sk-aaaa", "sk-bbbb"], limits=limits)
    assert [response.status_code for response in responses] == [200, 200, 429, 200]
    assert int(responses[2].headers["retry-after"]) in range(10, 61)


def test_draining_refuses_new_requests_and_waits_for_running_ones():
    async def drained():
        load = RequestLoad()
        with load:
            waiting = asyncio.create_task(load.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(ServiceUnavailable), load:
                pass
            assert not waiting.done()
        return await waiting

    assert asyncio.run(drained())


def test_the_circuit_breaker_opens_after_repeated_engine_failures(loaded):
    class FailingEngine(Engine):
        can_stream, num_calls = True, 0

        async def generate(self, prompt, sampling, *, session, listener=None):
            self.num_calls += 1
            raise EngineError("no")

    engine = FailingEngine()
    broken = EngineBackend(
        engine,
        loaded.backend.renderer,
        loaded.backend.vocab_size,
        "seedling",
        64,
        breaker=CircuitBreaker(pause=60.0, longest=60.0),
    )

    async def work(client):
        codes = [(await chat(client)).status_code for _ in range(8)]
        return codes, [(await client.get(path)).status_code for path in ("/ready", "/live")]

    codes, probes = with_client(loaded, work, backend=broken)
    assert codes == [500] * 5 + [503] * 3
    assert engine.num_calls == 5
    assert probes == [503, 200]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.core.rate_limit.default_limit_dir", lambda: tmp_path / "limits")
    return tmp_path / "limits"


def break_files(folder):
    for file in folder.iterdir():  # a folder cannot be opened as a file
        file.unlink()
        file.mkdir()


def test_counts_of_a_killed_server_apply_to_the_same_limits_only(loaded, folder):
    killed = subprocess.run([sys.executable, "-c", KILLED_SERVER, str(folder)], env=os.environ, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    with pytest.raises(ServiceUnavailable, match="more than 1 requests per minute"):
        asyncio.run(KeyRateLimits(NAMES, 1, 2).count(NAMES[0]))

    async def work(client):
        return [(await chat(client, KEY)).status_code for _ in range(4)], (await client.get("/ready")).status_code

    limits = ServerLimits(per_minute=2, burst=3)
    assert with_client(loaded, work, keys=[KEY], limits=limits) == ([200, 200, 200, 429], 200)


def test_requests_that_cannot_be_counted_are_refused_and_the_server_is_not_ready(loaded, folder, monkeypatch):
    monkeypatch.setattr("arborl.serve.middleware.RATE_CHECK_SECONDS", 0.0)

    async def work(client):
        async def state():
            ready, response = await client.get("/ready"), await chat(client, KEY)
            return response.status_code, ready.status_code, (response.json().get("error") or {}).get("code")

        states = [await state()]
        break_files(folder)
        states.append(await state())
        for file in folder.iterdir():
            file.rmdir()
        return [*states, await state()]

    states = with_client(loaded, work, keys=[KEY], limits=ServerLimits(per_minute=60, burst=9))
    assert states[1] == (503, 503, "rate_limit_failed")
    assert [state[0] for state in states] == [200, 503, 200]


def test_a_server_that_cannot_count_does_not_start(folder):
    folder.write_text("not a folder")
    with pytest.raises(ConfigError, match="requests cannot be counted"):
        KeyRateLimits(NAMES, 60, 3)
    KeyRateLimits(NAMES)  # nothing to count without a limit


def test_the_state_of_many_limits_is_checked_once_per_second(folder):
    rates = KeyRateLimits([f"key-{number}" for number in range(50)], 60, 3)
    break_files(folder)
    assert rates.failure() is None
    rates._checked_at = time.monotonic() - 2
    assert rates.failure() is not None
