"""Nobody who was let in is lost: when the server is told to stop, when weights change, when many come at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest
from conftest_serve import client_of, running

from arborl import checkpoint
from arborl.serve.reload import Follower

ASK = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 1.0}


async def stream(client, seed=0, tokens=40, began=None):
    """What became of one request: `whole`, `refused`, or how it was lost."""
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json={**ASK, "seed": seed, "max_tokens": tokens}
        ) as got:
            if got.status_code != 200:
                return "refused" if got.status_code in (429, 503) else str(got.status_code)
            if began is not None:
                began.set()
            lines = [line async for line in got.aiter_lines() if line]
    except httpx.ConnectError:
        return "refused"  # nobody listens any more
    except httpx.HTTPError as error:
        return type(error).__name__
    finish = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
    return "whole" if lines[-1] == "data: [DONE]" and finish[-1] in ("stop", "length") else "cut"


def client_at(address):
    limits = httpx.Limits(max_connections=400, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=address, limits=limits, timeout=120)


@pytest.mark.slow
def test_two_hundred_streams_at_once_all_come_to_their_end(address):
    async def many():
        async with client_at(address) as client:
            return Counter(await asyncio.gather(*(stream(client, seed) for seed in range(200))))

    assert asyncio.run(many()) == {"whole": 200}


@contextmanager
def process(*arguments):
    """`arborl serve` in a process of its own: it, and its address."""
    command = [sys.executable, "-m", "arborl", "serve", *arguments, "--port", "0", "--quiet"]
    made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert made.stderr is not None
        line = made.stderr.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, line + made.stderr.read()
        yield made, found[0]
    finally:
        made.kill()
        made.wait()


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_loses_no_request_that_it_took():
    async def many(address, made):
        async with client_at(address) as client:
            began = asyncio.Event()
            first = [asyncio.create_task(stream(client, seed, 200, began)) for seed in range(60)]
            await began.wait()
            made.send_signal(signal.SIGTERM)
            later = []
            while made.poll() is None:  # and others go on asking, until nobody is there
                later.append(asyncio.create_task(stream(client, len(later), 5)))
                await asyncio.sleep(0.02)
            return Counter(await asyncio.gather(*first)), Counter(await asyncio.gather(*later))

    with process("seedling") as (made, address):
        first, later = asyncio.run(many(address, made))
        assert made.wait(60) == 0
    assert set(first) <= {"whole", "refused"}
    assert first["whole"] > 0
    assert set(later) <= {"whole", "refused"}
    assert later["refused"] > 0


def test_new_weights_under_load_lose_no_stream_and_are_told(opened, tmp_path):
    """Checkpoints with other weights are written while requests are answered."""
    import torch

    model, speaker = opened.served.model, opened.speaker
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    follower = Follower(speaker, tmp_path, lambda folder: torch.load(folder / "weights.pt"))

    def save(step, scale):
        def write(folder):
            (folder / "model").mkdir()
            torch.save({name: tensor * scale for name, tensor in own.items()}, folder / "model" / "weights.pt")

        checkpoint.save(tmp_path, step, write, {}, keep=2)

    async def many():
        async with client_of(opened) as client:
            streams = [asyncio.create_task(stream(client, seed, 30)) for seed in range(24)]
            loaded = []
            for step, scale in ((3, 1.01), (7, 0.99), (7, 0.5), (8, 1.0)):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(save, step, scale)
                loaded.append(await follower.look())
            told = await client.post("/v1/chat/completions", json={**ASK, "stream": False, "max_tokens": 2})
            return Counter(await asyncio.gather(*streams)), loaded, told.json()["system_fingerprint"]

    try:
        outcome, loaded, mark = asyncio.run(many())
    finally:
        asyncio.run(speaker.engine.load(own, 0))
        speaker.version = 0
    assert outcome == {"whole": 24}
    assert loaded == [True, True, False, True]
    assert mark == "step-8"


async def loaded_until(address, last, save):
    """Ask all the while, on eight connections, until what `save` writes, one after the other, has all been served: what
    became of the requests, and the versions that answered."""
    seen, done = Counter(), False

    async def ask(client, number):
        outcomes = Counter()
        while not done:
            outcomes[await stream(client, number, 40)] += 1
        return outcomes

    async with client_at(address) as client:
        asking = [asyncio.create_task(ask(client, number)) for number in range(8)]
        for step in range(1, last + 1):
            await asyncio.to_thread(save, step)
            while (await client.get("/health")).json()["version"] < step:
                await asyncio.sleep(0.02)
            told = await client.post("/v1/chat/completions", json={**ASK, "stream": False, "max_tokens": 2})
            seen[told.json()["system_fingerprint"]] += 1
        done = True
        return sum(await asyncio.gather(*asking), Counter()), seen


def test_weights_that_change_again_and_again_under_load_drop_no_stream_over_http(opened, tmp_path):
    import torch

    model, speaker = opened.served.model, opened.speaker
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    follower = Follower(speaker, tmp_path, lambda folder: torch.load(folder / "weights.pt"), seconds=0.02)

    def save(step):
        def write(folder):
            (folder / "model").mkdir()
            torch.save({name: tensor * (1 + step / 100) for name, tensor in own.items()}, folder / "model/weights.pt")

        checkpoint.save(tmp_path, step, write, {}, keep=2)

    try:
        with running(opened, extra=(follower.following,)) as address:
            outcome, seen = asyncio.run(loaded_until(address, 4, save))
    finally:
        asyncio.run(speaker.engine.load(own, 0))
        speaker.version = 0
    assert set(outcome) == {"whole"}
    assert seen == {f"step-{step}": 1 for step in (1, 2, 3, 4)}


@pytest.mark.slow
def test_a_server_that_follows_a_run_drops_no_stream_when_a_checkpoint_comes(tmp_path):
    run = tmp_path / "run"
    settings = ["trainer.steps=1", "evaluation.tasks=2", "rollout.tasks_per_step=1", "rollout.group_size=2"]
    command = [sys.executable, "-m", "arborl", "train", *settings, f"output_dir={run}"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (first,) = checkpoint.complete_checkpoints(run / "checkpoints")

    def save(step):
        def write(folder):
            shutil.copytree(first / "model", folder / "model")

        if step > 1:
            checkpoint.save(run / "checkpoints", step, write, {}, keep=2)

    with process("--follow", str(run)) as (_, address):
        outcome, seen = asyncio.run(loaded_until(address, 3, save))
    assert set(outcome) == {"whole"}
    assert set(seen) == {"step-1", "step-2", "step-3"}


def test_a_checkpoint_that_cannot_be_read_leaves_the_weights_and_is_told_of_once(opened, tmp_path, caplog):
    checkpoint.save(tmp_path, 2, lambda folder: (folder / "model").mkdir(), {}, keep=2)

    async def looks():
        follower = Follower(opened.speaker, tmp_path, opened.served.read)
        return [await follower.look() for _ in range(3)]

    assert asyncio.run(looks()) == [False] * 3
    assert caplog.text.count("is not served") == 1
    assert opened.speaker.version == 0


def test_a_client_that_leaves_gives_its_place_back(address, opened):
    async def leaves():
        async with client_at(address) as client:
            async with client.stream("POST", "/v1/chat/completions", json={**ASK, "max_tokens": 4000}) as got:
                await anext(got.aiter_bytes())
            assert got.status_code == 200
            for _ in range(200):
                if not opened.served.engine.scheduler.busy:
                    return True
                await asyncio.sleep(0.05)
            return False

    assert asyncio.run(leaves())


@pytest.mark.slow
def test_a_schema_of_its_own_finds_no_server_error(opened):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    from arborl.serve.app import make_app
    from arborl.serve.keys import Keys
    from arborl.serve.sessions import Sessions
    from arborl.serve.speaker import Speaker

    own = opened.speaker
    short = Speaker(own.engine, own.renderer, own.vocabulary, own.name, 96)  # answers of any length are soon over
    app = make_app(short, Sessions(opened.company, most=3), Keys(["sk-schema"]))
    key = {"X-API-Key": "sk-schema"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=key)
    seen: Counter[int] = Counter()
    quietly = settings(
        max_examples=settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    modes = schemathesis.GenerationMode
    for operation in [each.ok() for each in schema.get_all_operations()]:
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            if mode is modes.NEGATIVE and not operation.body:
                continue

            @quietly
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case):
                answer = case.call(headers=key)
                seen[answer.status_code] += 1
                assert answer.status_code < 500, (case, answer.text)

            one()
    assert {200, 400, 404} <= set(seen)
