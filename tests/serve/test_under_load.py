"""No accepted request is lost: many streams at once, shutdown, new weights, clients that disconnect."""

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
from serve_clients import CHAT, HELLO, client_of, running

from arborl import checkpoint
from arborl.config.config_base import dump_yaml
from arborl.config.load_config import load
from arborl.models.model_files import SEEDLING_DIR
from arborl.serve.api_server import make_app
from arborl.serve.engine_backend import EngineBackend
from arborl.serve.middleware import ApiKeys
from arborl.serve.served_model import CheckpointFollower
from arborl.serve.sessions import SessionStore

STREAM = {**HELLO, "stream": True, "temperature": 1.0}


async def stream(client, seed=0, tokens=40, started=None):
    """The outcome of one request: `whole`, `refused`, or how it was lost."""
    body = {**STREAM, "seed": seed, "max_tokens": tokens}
    try:
        async with client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                return "refused" if response.status_code in (429, 503) else str(response.status_code)
            if started is not None:
                started.set()
            lines = [line async for line in response.aiter_lines() if line]
    except httpx.ConnectError:
        return "refused"  # the socket is closed
    except httpx.HTTPError as error:
        return type(error).__name__
    reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
    return "whole" if lines[-1] == "data: [DONE]" and reasons[-1] in ("stop", "length") else "cut"


def client_at(url):
    limits = httpx.Limits(max_connections=400, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=120)


@contextmanager
def process(*arguments):
    """`arborl serve` as a process, and its URL."""
    command = [sys.executable, "-m", "arborl", "serve", *arguments, "--port", "0", "--quiet"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        line = child.stderr.readline()
        url = re.search(r"http://[\d.:]+", line)
        assert url, line + child.stderr.read()
        yield child, url[0]
    finally:
        child.kill()
        child.wait()


@contextmanager
def restored_weights(loaded):
    """The model's weights, which are loaded again at the end."""
    weights = {name: tensor.clone() for name, tensor in loaded.served.model.state_dict().items()}
    try:
        yield weights
    finally:
        asyncio.run(loaded.backend.engine.load(weights, 0))
        loaded.backend.version = 0


def save_scaled(folder, step, weights, scale):
    import torch

    def write(path):
        (path / "model").mkdir()
        torch.save({name: tensor * scale for name, tensor in weights.items()}, path / "model" / "weights.pt")

    checkpoint.save(folder, step, write, {}, keep=2)


def follower_of(loaded, folder, **options):
    import torch

    return CheckpointFollower(loaded.backend, folder, lambda path: torch.load(path / "weights.pt"), **options)


@pytest.mark.slow
def test_200_concurrent_streams_all_finish(address):
    async def run():
        async with client_at(address) as client:
            return Counter(await asyncio.gather(*(stream(client, seed, 12) for seed in range(200))))

    assert asyncio.run(run()) == {"whole": 200}


@pytest.mark.slow
def test_a_server_that_is_stopped_finishes_accepted_requests():
    async def run(url, child):
        async with client_at(url) as client:
            started = asyncio.Event()
            first = [asyncio.create_task(stream(client, seed, 64, started)) for seed in range(60)]
            await started.wait()
            child.send_signal(signal.SIGTERM)
            later = []
            while child.poll() is None:  # new requests arrive until the process ends
                later.append(asyncio.create_task(stream(client, len(later), 5)))
                await asyncio.sleep(0.02)
            return Counter(await asyncio.gather(*first)), Counter(await asyncio.gather(*later))

    with process("seedling") as (child, url):
        first, later = asyncio.run(run(url, child))
        assert child.wait(60) == 0
    assert set(first) <= {"whole", "refused"}
    assert first["whole"] > 0
    assert set(later) <= {"whole", "refused"}
    assert later["refused"] > 0


def test_new_weights_interrupt_no_stream_and_change_the_fingerprint(loaded, tmp_path):
    async def run(weights):
        follower, updated = follower_of(loaded, tmp_path), []
        async with client_of(loaded) as client:
            streams = [asyncio.create_task(stream(client, seed, 30)) for seed in range(24)]
            for step, scale in ((3, 1.01), (7, 0.99), (7, 0.5), (8, 1.0)):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(save_scaled, tmp_path, step, weights, scale)
                updated.append(await follower.update())
            response = await client.post(CHAT, json={**STREAM, "stream": False, "max_tokens": 2})
            return Counter(await asyncio.gather(*streams)), updated, response.json()["system_fingerprint"]

    with restored_weights(loaded) as weights:
        outcome, updated, fingerprint = asyncio.run(run(weights))
    assert outcome == {"whole": 24}
    assert updated == [True, True, False, True]
    assert fingerprint == "step-8"


async def request_during_updates(url, last_step, save):
    """Send requests on four connections while `save` writes checkpoints one by one: outcomes, and fingerprints."""
    fingerprints, is_done = Counter(), False

    async def keep_requesting(client, number):
        outcomes = Counter()
        while not is_done:
            outcomes[await stream(client, number, 24)] += 1
        return outcomes

    async with client_at(url) as client:
        tasks = [asyncio.create_task(keep_requesting(client, number)) for number in range(4)]
        for step in range(1, last_step + 1):
            await asyncio.to_thread(save, step)
            while (await client.get("/health")).json()["version"] < step:
                await asyncio.sleep(0.02)
            response = await client.post(CHAT, json={**STREAM, "stream": False, "max_tokens": 2})
            fingerprints[response.json()["system_fingerprint"]] += 1
        is_done = True
        return sum(await asyncio.gather(*tasks), Counter()), fingerprints


def test_repeated_weight_updates_drop_no_stream_over_http(loaded, tmp_path):
    follower = follower_of(loaded, tmp_path, seconds=0.02)
    with restored_weights(loaded) as weights, running(loaded, extra=(follower.follow,)) as url:
        outcome, fingerprints = asyncio.run(
            request_during_updates(url, 3, lambda step: save_scaled(tmp_path, step, weights, 1 + step / 100))
        )
    assert set(outcome) == {"whole"}
    assert fingerprints == {f"step-{step}": 1 for step in (1, 2, 3)}


@pytest.mark.slow
def test_a_server_that_follows_a_run_drops_no_stream_at_a_new_checkpoint(tmp_path):
    run = tmp_path / "run"

    def save(step):
        if step > 1 or not run.exists():
            copy = lambda folder: shutil.copytree(SEEDLING_DIR, folder / "model")  # noqa: E731
            checkpoint.save(run / "checkpoints", step, copy, {}, keep=2)

    save(1)
    (run / "config.yaml").write_text(dump_yaml(load(None)))
    with process("--follow", str(run)) as (_, url):
        outcome, fingerprints = asyncio.run(request_during_updates(url, 3, save))
    assert set(outcome) == {"whole"}
    assert set(fingerprints) == {"step-1", "step-2", "step-3"}


def test_an_unreadable_checkpoint_is_skipped_and_logged_once(loaded, tmp_path, caplog):
    checkpoint.save(tmp_path, 2, lambda folder: (folder / "model").mkdir(), {}, keep=2)

    async def run():
        follower = CheckpointFollower(loaded.backend, tmp_path, loaded.served.read)
        return [await follower.update() for _ in range(3)]

    assert asyncio.run(run()) == [False] * 3
    assert caplog.text.count("is not loaded") == 1
    assert loaded.backend.version == 0


def test_a_disconnected_client_frees_its_place_in_the_engine(address, loaded):
    async def run():
        async with client_at(address) as client:
            async with client.stream("POST", CHAT, json={**STREAM, "max_tokens": 4000}) as response:
                await anext(response.aiter_bytes())
            assert response.status_code == 200
            for _ in range(200):
                if not loaded.served.engine.scheduler.has_work:
                    return True
                await asyncio.sleep(0.05)
            return False

    assert asyncio.run(run())


@pytest.mark.slow
def test_requests_generated_from_the_openapi_schema_cause_no_server_error(loaded):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    backend = loaded.backend
    short = EngineBackend(backend.engine, backend.renderer, backend.vocab_size, backend.name, 96)  # short answers
    app = make_app(short, SessionStore(loaded.agents, max_sessions=3), ApiKeys(["sk-schema"]))
    key = {"X-API-Key": "sk-schema"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=key)
    codes: Counter[int] = Counter()
    options = settings(
        max_examples=settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    modes = schemathesis.GenerationMode
    for operation in [each.ok() for each in schema.get_all_operations()]:
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            if mode is modes.NEGATIVE and not operation.body:
                continue

            @options
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                response = case.call(headers=key)
                codes[response.status_code] += 1
                assert response.status_code < 500, (case, response.text)

            check()
    assert {200, 400, 404} <= set(codes)
