"""Runs whose engine lives elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_runs import LAKE, invoke

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from fake_server import FakeServer

from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.engines.remote import replicas
from arborl.engines.remote.http_engine import HttpEngine
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics

SMALL = [*LAKE, "trainer.steps=3", "evaluation.tasks=1", "sampling.max_context=512", "sampling.max_tokens=12"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.02)


@pytest.fixture
def serve(seedling):
    servers = []

    def make(kind="vllm", **more):
        servers.append(FakeServer(seedling[0], kind, renderer=seedling[1], context=512, **more))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.mark.slow
def test_a_run_goes_on_when_a_server_dies_and_nothing_is_trained_twice(serve, tmp_path, monkeypatch, caplog):
    first, second = serve(), serve()
    load, done = HttpEngine.load, []

    async def killing(self, weights, version):
        await load(self, weights, version)
        if version == 1 and not done:  # in the middle of the run, with episodes to come
            done.append(first.kill())
            first.log.clear()
        elif version == 2 and len(done) == 1:
            done.append(first.restart())

    monkeypatch.setattr(HttpEngine, "load", killing)
    urls = f"engine.args.urls=[{first.url},{second.url}]"
    ran = invoke("train", f"output_dir={tmp_path / 'run'}", "engine=http", urls, "engine.args.seconds=20", *SMALL)
    assert ran.exit_code == 0, ran.output
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "policy/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "a server is lost and will be retried" in caplog.text
    seen = set()
    for step, file in enumerate(sorted((tmp_path / "run" / "episodes").glob("step-*.jsonl"))):
        for one in EpisodeStore.read(file):
            assert {call.completion.version for call in one.calls} == {step}
            seen.add((step, one.id))
    assert len(seen) == 3 * 2 * 3
    assert "default" not in first.labels_of("tokens")  # after its restart: weights before requests


def test_a_chat_server_is_measured(serve):
    server = serve("chat", name="other-model")
    ran = invoke(
        "evaluate", "seedling", "engine=http", f"engine.args.urls=[{server.url}]", "evaluation.tasks=2", SMALL[-2]
    )
    assert ran.exit_code == 0, ran.output
    assert "success" in ran.output
    requested = [json.loads(body) for what, body in server.log if what == "chat"]
    assert requested[0]["model"] == "other-model"
    assert requested[0]["messages"][-1]["role"] == "user"


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        ("chat", (), "cannot be trained with: it takes and returns text"),
        ("vllm closed", (), "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", ("sampling.max_context=600",), "Start it with --max-model-len 600"),
        ("vllm", ("engine.args.model=x",), "serves policy: engine.args.model=x is not among them"),
    ],
)
def test_a_server_that_will_not_do_is_one_message_and_nothing_is_written(serve, tmp_path, kind, settings, complaint):
    server = serve(kind)
    folder = tmp_path / "run"
    ran = invoke("train", f"output_dir={folder}", "engine=http", f"engine.args.urls=[{server.url}]", *SMALL, *settings)
    assert ran.exit_code == 2
    assert complaint in " ".join(ran.output.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["engine=vllm"], "engine=vllm: this environment has no vLLM. Install it there"),
        (
            ["engine=vllm", "engine.args.python=/no/python"],
            "engine.args.python=/no/python: cannot be started as a Python interpreter",
        ),
        (
            ["engine=http", "engine.args.urls=[http://127.0.0.1:9]"],
            "http://127.0.0.1:9: no server there",
        ),
    ],
)
def test_an_engine_that_is_not_there_is_one_message_and_nothing_is_written(tmp_path, settings, complaint):
    folder = tmp_path / "run"
    ran = invoke("train", f"output_dir={folder}", *settings)
    assert ran.exit_code == 2
    assert complaint in " ".join(ran.output.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"engine": "http"}, "engine=http needs servers. Write engine.args.urls=[http://HOST:8000]"),
        ({"engine": {"name": "http", "args": {"urls": ["host:80"]}}}, "'host:80' is not an address"),
        ({"engine": {"name": "http", "args": {"urls": ["http://a", "http://a"]}}}, "named twice"),
        (
            {"engine": {"args": {"urls": ["http://a"]}}},
            "urls: is for engine=http and engine=sglang, not for engine=local",
        ),
        ({"engine": {"name": "http", "args": {"urls": ["http://a"], "python": "x"}}}, "python: is for engine=vllm"),
        (
            {"engine": {"name": "vllm", "args": {"update": "restart"}}},
            "update: is for engine=local, not for engine=vllm",
        ),
        (
            {"engine": {"name": "http", "args": {"urls": ["http://a"]}, "kv_tokens": 9}},
            "kv_tokens is for engine=local and engine=vllm",
        ),
        (
            {"engine": {"name": "vllm", "args": {"block_size": 16}}},
            "block_size: is for engine=local, not for engine=vllm",
        ),
        ({"engine": "vllm", "deterministic": True}, "Write engine=local, or deterministic=false"),
        ({"engine": "vllm", "sampling": {"min_p": 0.1, "top_p": 0.9}}, "in the other order"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ConfigError) as refused:
        validate(RunConfig, settings)
    assert complaint in str(refused.value)
