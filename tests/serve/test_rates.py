"""Requests are counted, whatever an earlier server left behind; where they cannot be, `/ready` says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from conftest_serve import client_of

from arborl.errors import ConfigError
from arborl.serve.app import Bounds
from arborl.serve.keys import Keys, Rates
from arborl.serve.source import Unavailable

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
KEYS = Keys(["sk-aaaa"])
KILLED = """
import asyncio, os, sys
from pathlib import Path
import arborl.tools.limit as limit
limit.default_folder = lambda: Path(sys.argv[1])
from arborl.serve.keys import Keys, Rates
async def serve():
    rates = Rates(Keys(["sk-aaaa"]).names, 6, 2)
    for _ in range(2):
        await rates.take(Keys(["sk-aaaa"]).names[0])
asyncio.run(serve())
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.tools.limit.default_folder", lambda: tmp_path / "limits")
    return tmp_path / "limits"


def asked(client):
    return client.post("/v1/chat/completions", json=ASK, headers={"x-api-key": "sk-aaaa"})


def test_a_server_with_other_numbers_than_one_that_was_killed_takes_its_own(opened, folder):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], env=os.environ, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    assert list(folder.iterdir())

    async def some():
        async with client_of(opened, keys=["sk-aaaa"], bounds=Bounds(per_minute=1, burst=3)) as client:
            return [(await asked(client)).status_code for _ in range(4)], (await client.get("/ready")).status_code

    assert asyncio.run(some()) == ([200, 200, 200, 429], 200)


def test_a_server_with_the_same_numbers_counts_on_from_one_that_was_killed(folder):
    subprocess.run([sys.executable, "-c", KILLED, str(folder)], env=os.environ, check=False)
    with pytest.raises(Unavailable, match="more than 6 requests a minute"):
        asyncio.run(Rates(KEYS.names, 6, 2).take(KEYS.names[0]))


def test_where_requests_cannot_be_counted_they_are_refused_and_the_server_is_not_ready(opened, folder, monkeypatch):
    monkeypatch.setattr("arborl.serve.keys.CHECK_SECONDS", 0.0)

    async def some():
        async with client_of(opened, keys=["sk-aaaa"], bounds=Bounds(per_minute=60, burst=9)) as client:
            seen = [((await asked(client)).status_code, (await client.get("/ready")).status_code)]
            for file in folder.iterdir():  # nobody can open them now
                file.unlink()
                file.mkdir()
            ready, refused = await client.get("/ready"), await asked(client)
            seen.append((refused.status_code, ready.status_code))
            for file in folder.iterdir():
                file.rmdir()
            seen.append(((await asked(client)).status_code, (await client.get("/ready")).status_code))
            return seen, refused.json()["error"]["code"]

    assert asyncio.run(some()) == ([(200, 200), (503, 503), (200, 200)], "rate_limit_failed")


def test_a_server_that_cannot_count_is_not_started(folder):
    folder.write_text("not a folder")
    with pytest.raises(ConfigError, match="requests cannot be counted"):
        Rates(KEYS.names, 60, 3)
    Rates(KEYS.names)  # without a limit there is nothing to count


def test_a_post_to_an_open_path_needs_no_limit(opened, folder):
    async def one():
        async with client_of(opened, keys=["sk-aaaa"], bounds=Bounds(per_minute=60, burst=3)) as client:
            return (await client.post("/health")).status_code

    assert asyncio.run(one()) == 405


def test_the_state_of_many_limits_is_looked_up_once_a_second(folder):
    rates = Rates([f"key-{number}" for number in range(50)], 60, 3)
    for file in folder.iterdir():
        file.unlink()
        file.mkdir()
    assert rates.fault() is None  # as a moment ago
    rates._checked = time.monotonic() - 2
    assert rates.fault() is not None
