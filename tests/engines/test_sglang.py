"""SGLang servers by their own interface: exact tokens, log-probabilities and versions."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_server import FakeServer

import arborl
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.engines.local import LocalEngine
from arborl.engines.remote import replicas
from arborl.engines.remote.http_engine import HttpEngine
from arborl.engines.remote.http_servers import _sglang_event
from arborl.errors import ConfigError, EngineError
from arborl.types import FinishReason, Sampling

RECORDED = json.loads("""
{"text": " capital of France is Paris.", "output_ids": [6722, 315, 9625],
 "meta_info": {"id": "5c2b7a9e0d1f4c1b", "finish_reason": {"type": "length", "length": 3}, "prompt_tokens": 5,
  "weight_version": "9f86d081:4", "total_retractions": 0, "input_token_logprobs": [],
  "output_token_logprobs": [[-0.7126, 6722, null], [-0.0001, 315, null], [-1.5, 9625, null]],
  "output_token_logprobs_length": 3, "completion_tokens": 3, "cached_tokens": 4, "e2e_latency": 0.0312}}
""")
"""A response of `/generate` in SGLang's format."""
CLIENT = httpx.AsyncClient(base_url="http://sglang:30000")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.02)


@pytest.fixture
def serve(seedling):
    servers = []

    def make(**more):
        servers.append(FakeServer(seedling[0], more.pop("kind", "sglang"), renderer=seedling[1], **more))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def connected(seedling, server, **more):
    more = {"max_context": 64, "seconds": 5.0, "renderer": seedling[1], "kind": "sglang"} | more
    return HttpEngine(seedling[0], [server.url], **more)


async def ask(engine, **how):
    return await engine.generate([1, 2, 3], Sampling(**({"max_tokens": 8, "temperature": 0.0} | how)), session="a")


async def locally(seedling, **how):
    engine = LocalEngine(seedling[0], max_context=64, max_requests=1, kv_tokens=64)
    return await ask(engine, **how)


def test_a_recorded_response_has_token_ids_log_probabilities_and_version():
    pairs, finish, label = _sglang_event(CLIENT, RECORDED, 0)
    assert pairs == [(6722, -0.7126), (315, -0.0001), (9625, -1.5)]
    assert (finish["type"], label) == ("length", "9f86d081:4")
    assert _sglang_event(CLIENT, RECORDED, 2)[0] == [(9625, -1.5)]  # two tokens were streamed before
    assert _sglang_event(CLIENT, RECORDED, 3)[0] == []


def test_other_tokens_than_those_with_log_probabilities_are_an_error():
    with pytest.raises(EngineError, match="output_ids and output_token_logprobs have other tokens"):
        _sglang_event(CLIENT, RECORDED | {"output_ids": [6722, 315, 1]}, 0)


@pytest.mark.parametrize(
    "event",
    [{}, [], None, {"meta_info": {}}, {"meta_info": {"output_token_logprobs": [[None, 3, None]]}}, {"text": "x"}],
)
def test_a_response_without_log_probabilities_is_an_error_of_one_line(event):
    with pytest.raises(EngineError, match=r"http://sglang:30000.*without meta_info.output_token_logprobs"):
        _sglang_event(CLIENT, event, 0)


async def test_tokens_and_log_probabilities_are_the_models_and_end_at_a_stop_token(seedling, serve):
    free = await locally(seedling)
    server = serve()
    engine = connected(seedling, server)
    assert (await ask(engine)).tokens == free.tokens
    cut = await ask(engine, stop=(free.tokens[2],))
    await engine.close()
    assert (cut.tokens, cut.finish) == (free.tokens[: free.tokens.index(free.tokens[2]) + 1], FinishReason.STOP)
    assert cut.logprobs == pytest.approx(free.logprobs[: len(cut.tokens)], abs=1e-5)
    assert cut.version == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_token_of_the_server_that_is_no_stop_token_of_the_request_does_not_end_it(seedling, serve, stream):
    free = await locally(seedling)
    how = {"seconds": 30.0} if stream else {}
    server = serve(ends=tuple(free.tokens[1:4]))
    engine = connected(seedling, server)
    whole = await ask(engine, **how)
    cut = await ask(engine, stop=(free.tokens[3],), **how)
    await engine.close()
    assert (whole.tokens, whole.finish) == (free.tokens, FinishReason.LENGTH)
    assert whole.logprobs == pytest.approx(free.logprobs, abs=1e-4)
    end = free.tokens.index(free.tokens[3]) + 1
    assert (cut.tokens, cut.finish) == (free.tokens[:end], FinishReason.STOP)


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_a_stream_of_all_tokens_and_one_of_new_tokens_give_the_same(seedling, serve, is_incremental):
    free = await locally(seedling)
    server = serve()
    server.is_incremental = is_incremental
    engine = connected(seedling, server)
    engine.decode = lambda ids: "".join(chr(200 + i) for i in ids)
    streamed = await ask(engine, seconds=30.0)
    cut = await ask(engine, stop_texts=(engine.decode(free.tokens[:3]),))
    await engine.close()
    assert (streamed.tokens, streamed.finish) == (free.tokens, FinishReason.LENGTH)
    assert streamed.logprobs == pytest.approx(free.logprobs, abs=1e-5)
    assert (cut.tokens, cut.finish) == (free.tokens[:3], FinishReason.STOP)


async def test_a_server_that_comes_back_is_found_under_its_new_name_and_gets_the_weights(seedling, serve):
    """An update renames the model of an SGLang server."""
    server = serve(name="policy")
    engine = connected(seedling, server, named="policy")
    assert server.name.endswith("version-0")
    server.kill()
    server.restart()
    done = await ask(engine)
    await engine.load(seedling[0].state_dict(), 1)
    server.kill()
    server.restart()
    again = await ask(engine)
    await engine.close()
    assert (done.version, again.version) == (0, 1)
    assert server.label == f"{engine.run}:1"


# ------------------------------------------------------------------------------------------------ who is refused


def test_another_kind_of_server_is_refused(seedling, serve):
    with pytest.raises(EngineError, match=r"is not an SGLang server: it has no /model_info. Write engine=http"):
        connected(seedling, serve(kind="vllm"))


def test_a_server_that_is_not_ready_is_refused_with_its_status(seedling, serve):
    server = serve()
    server.is_starting = True
    with pytest.raises(EngineError, match="/health answers 503"):
        connected(seedling, server)


def test_a_server_that_does_not_report_its_weights_is_only_evaluated(seedling, serve):
    server = serve()
    server.label = None
    with pytest.raises(EngineError, match=r"cannot be trained with: .*use SGLang 0.5.1 or newer"):
        connected(seedling, server)
    assert len(asyncio.run(ask(connected(seedling, server, training=False))).tokens) == 8


@pytest.mark.parametrize(("name", "value", "off"), [("top_k", 20, 0), ("top_p", 0.9, 1), ("min_p", 0.1, 0)])
def test_truncated_sampling_is_refused_for_training(seedling, serve, name, value, off):
    server, sampling = serve(), Sampling(8, **{name: value})
    with pytest.raises(EngineError, match=rf"do not include sampling.{name}. Write sampling.{name}={off}, or use vLLM"):
        connected(seedling, server, sampling=sampling)
    engine = connected(seedling, server, sampling=sampling, training=False)
    assert len(asyncio.run(ask(engine, **{name: value})).tokens) == 8


def test_weights_that_do_not_fit_or_do_not_arrive_are_noticed(seedling, serve):
    with pytest.raises(EngineError, match=r"update_weights_from_disk answers 400: size mismatch"):
        HttpEngine(small(seedling), [serve().url], max_context=64, kind="sglang")
    with pytest.raises(EngineError, match=r"reads 32 tokens.*Start it with --context-length 64"):
        connected(seedling, serve(context=32))


def small(seedling):
    config = copy.deepcopy(seedling[0].config)
    config.intermediate_size //= 2
    return type(seedling[0])(config)


def test_the_engine_has_its_own_name_and_needs_addresses():
    tree = {"data": {"rows": "pkg:rows"}, "rewards": ["exact"]}
    tree |= {"engine": {"name": "sglang", "args": {"urls": ["http://h:30000"]}}}
    assert validate(RunConfig, tree).engine.options.urls == ("http://h:30000",)
    for engine, says in (
        ({"name": "sglang"}, r"engine=sglang needs servers. Write engine.args.urls=\[http://HOST:30000\]"),
        (
            {"name": "sglang", "args": {"urls": ["http://h:1"], "chat": True}},
            "is for engine=http, not for engine=sglang",
        ),
        ({"name": "sglang", "args": {"urls": ["http://h:1"]}, "kv_tokens": 9}, "kv_tokens is for engine=local"),
    ):
        with pytest.raises(ConfigError, match=says):
            validate(RunConfig, tree | {"engine": engine})
    with pytest.raises(ConfigError, match="deterministic=true with engine=sglang"):
        validate(RunConfig, tree | {"deterministic": True})


@pytest.mark.slow
def test_a_run_trains_with_an_sglang_server(seedling, serve, tmp_path):
    server = serve(context=512)
    arborl.run(
        data=[{"question": f"{n} + 1?", "answer": n + 1} for n in range(8)],
        model="seedling",
        engine={"name": "sglang", "args": {"urls": [server.url]}},
        sampling={"max_tokens": 4, "max_context": 256},
        rollout={"tasks_per_step": 2, "group_size": 2},
        rewards=["equal"],
        steps=2,
        output_dir=str(tmp_path / "run"),
        track={"tensorboard": False, "gifs": 0},
        evaluation={"tasks": 0},
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["engine/probe_gap"] for row in rows if "engine/probe_gap" in row) < 1e-3
    assert server.label.endswith(":2")
