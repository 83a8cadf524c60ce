"""Servers: who gets which request, what happens when one goes or comes back, and which are refused."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_server import FakeServer

from arborl.engines.remote import replicas
from arborl.engines.remote.http_engine import HttpEngine
from arborl.errors import EngineError
from arborl.types import FinishReason, Sampling

KINDS = ("vllm", "vllm completions", "sglang")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.02)


@pytest.fixture
def serve(seedling):
    """Makes servers, and ends them."""
    servers = []

    def make(kind="vllm", **more):
        servers.append(FakeServer(more.pop("model", seedling[0]), kind, renderer=seedling[1], **more))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def connected(seedling, *servers, **more):
    model = more.pop("model", seedling[0])
    return HttpEngine(
        model, [server.url for server in servers], max_context=64, seconds=more.pop("seconds", 5.0),
        renderer=seedling[1], **more,
    )  # fmt: skip


def moved(seedling, by=0.05):
    """A model that has learned."""
    model = copy.deepcopy(seedling[0])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * by)
    return model


async def ask(engine, count=1, session="a", tokens=4, **more):
    requests = (engine.generate([1, 2, i + 1], Sampling(tokens, seed=i, **more), session=session) for i in range(count))
    return await asyncio.gather(*requests)


@pytest.mark.parametrize("kind", KINDS)
async def test_after_an_update_a_server_says_what_the_learner_says(seedling, serve, kind):
    model, server = moved(seedling), serve(kind)
    engine = connected(seedling, server, model=model)
    await engine.load(model.state_dict(), 3)
    (done,) = await ask(engine)
    await engine.close()
    assert engine.gap < 1e-4
    assert done.version == 3
    assert set(server.labels_of("tokens")) == {f"{engine.run}:0", f"{engine.run}:3"}


async def test_a_version_may_be_given_again(seedling, serve):
    engine = connected(seedling, serve())
    for version in (0, 0, 1, 1):
        await engine.load(seedling[0].state_dict(), version)
    (done,) = await ask(engine)
    kept = len(list(engine.files.home.glob("*-version-*")))
    await engine.close()
    assert (done.version, kept) == (1, 1)
    assert not engine.files.home.exists()


def test_an_update_that_does_not_arrive_is_noticed(seedling, serve):
    with pytest.raises(EngineError, match=r"does not match the learner's model.*processed_logprobs"):
        connected(seedling, serve(deaf=True), model=moved(seedling))


async def test_an_episode_stays_with_its_server_and_others_go_to_the_least_busy(seedling, serve):
    first, second = serve(), serve()
    engine = connected(seedling, first, second)
    before = len(first.sessions), len(second.sessions)
    first.gate = second.gate = threading.Event()
    tasks = [asyncio.create_task(ask(engine, session=name)) for name in ("a", "b", "c", "d")]
    while sum(replica.busy for replica in engine.replicas) < 4:
        await asyncio.sleep(0.005)
    shares = sorted(replica.busy for replica in engine.replicas)
    first.gate.set()
    await asyncio.gather(*tasks)
    for _ in range(3):
        await ask(engine, session="a")
    await engine.close()
    assert shares == [2, 2]
    counts = len(first.sessions) - before[0], len(second.sessions) - before[1]
    assert sorted(counts) == [2, 5]


async def test_a_request_that_a_server_loses_is_answered_by_another_once(seedling, serve):
    first, second = serve(), serve()
    engine = connected(seedling, first, second)
    await ask(engine, session="a")
    mine = first if engine.routes.sessions["a"].url == first.url else second
    mine.kill()
    done = await ask(engine, 5, session="a")
    counted = engine.metrics()
    await engine.close()
    assert [len(one.tokens) for one in done] == [4] * 5
    assert counted["engine/sampled"] == 24
    assert counted["engine/lost"] == 1
    assert counted["engine/servers"] == 1


async def test_a_server_that_comes_back_gets_the_newest_weights_before_its_first_request(seedling, serve):
    model = moved(seedling)
    first, second = serve(), serve()
    engine = connected(seedling, first, second, model=model)
    await ask(engine, session="a")
    first.kill()
    await ask(engine, 4, session="b")
    await engine.load(model.state_dict(), 5)
    first.log.clear()
    first.restart()
    while not all(replica.up for replica in engine.replicas):
        await ask(engine, session="c")
        await asyncio.sleep(0.01)
    engine.routes.sessions.clear()
    done = await asyncio.gather(*(ask(engine, 3, session=str(i)) for i in range(6)))
    await engine.close()
    assert {one.version for one in [one for some in done for one in some]} == {5}
    assert first.log[0] != ("tokens", "default")
    assert [what for what, _ in first.log].index("update") < [what for what, _ in first.log].index("tokens")
    assert "default" not in first.labels_of("tokens")
    assert len(first.labels_of("tokens")) > 1


async def test_a_server_that_came_back_gets_its_share_of_episodes_that_are_named_as_earlier_ones(seedling, serve):
    """Tasks come again, with every pass over the data and at every evaluation."""
    first, second = serve(), serve()
    engine = connected(seedling, first, second)
    names = [str(i) for i in range(6)]
    first.kill()
    await asyncio.gather(*(ask(engine, session=name) for name in names))
    first.restart()
    async with asyncio.timeout(20):
        while not all(replica.up for replica in engine.replicas):
            await asyncio.sleep(0.01)
    await engine.load(seedling[0].state_dict(), 1)
    await asyncio.gather(*(ask(engine, session=name) for name in names))
    await engine.close()
    assert [sum(engine.routes.sessions[name] is replica for name in names) for replica in engine.replicas] == [3, 3]


async def test_a_server_that_comes_back_as_another_is_not_taken_back(seedling, serve, caplog):
    first, second = serve(), serve()
    engine = connected(seedling, first, second)
    await ask(engine, 4, session="a")
    first.kill()
    await engine.load(seedling[0].state_dict(), 1)
    first.context = 32
    first.restart()
    async with asyncio.timeout(20):
        while "is not used" not in caplog.text:
            await asyncio.sleep(0.01)
    done = await asyncio.gather(*(ask(engine, session=str(i)) for i in range(4)))
    await engine.close()
    assert len(done) == 4
    assert "reads 32 tokens, and sampling.max_context=64" in caplog.text
    assert first.label == "default"


async def test_a_restarted_server_is_used_again_without_a_request(seedling, serve):
    first, second = serve(), serve()
    engine = connected(seedling, first, second)
    await ask(engine, 4, session="a")
    first.kill()
    await engine.load(seedling[0].state_dict(), 1)
    first.restart()
    async with asyncio.timeout(20):
        while not all(replica.up for replica in engine.replicas):
            await asyncio.sleep(0.01)
    await engine.close()
    assert first.label == f"{engine.run}:1"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_server_samples_that_was_restarted_unseen_does_not_count(seedling, serve, kind):
    model = moved(seedling)
    server = serve(kind)
    engine = connected(seedling, server, model=model)
    await engine.load(model.state_dict(), 2)
    (before,) = await ask(engine)
    server.kill()
    server.restart()  # between two requests: no request was refused
    (after,) = await ask(engine)
    await engine.close()
    assert before.tokens == after.tokens
    assert after.version == 2
    assert server.labels_of("tokens")[-1] == f"{engine.run}:2"


async def test_a_request_to_an_overloaded_server_is_retried(seedling, serve):
    """It still has its weights, and is not given them again."""
    server = serve()
    engine = connected(seedling, server)
    updates = len(server.labels_of("update"))
    server.fails = 2
    done = await ask(engine)
    await engine.close()
    assert len(done[0].tokens) == 4
    assert len(server.labels_of("update")) == updates


def test_where_no_server_answers_the_request_fails_and_says_why(seedling, serve):
    server = serve()
    engine = connected(seedling, server)
    server.kill()
    engine.routes.seconds = 0.3
    with pytest.raises(EngineError, match=r"no server has answered for 0.3 s: .*connection refused"):
        asyncio.run(ask(engine))


async def test_a_deadline_and_a_stop_text_end_a_completion_early(seedling, serve):
    engine = connected(seedling, serve())
    engine.decode = lambda ids: "".join(chr(200 + i) for i in ids)
    (free,) = await ask(engine, tokens=6)
    (cut,) = await ask(engine, tokens=6, stop_texts=(engine.decode(free.tokens[:2]),))
    await engine.close()
    assert (cut.tokens, cut.finish) == (free.tokens[:2], FinishReason.STOP)


async def test_a_cancelled_request_frees_its_slot(seedling, serve):
    server = serve()
    engine = connected(seedling, server)
    server.gate = threading.Event()
    task = asyncio.create_task(ask(engine))
    while not engine.replicas[0].busy:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    busy = engine.replicas[0].busy
    server.gate.set()
    done = await ask(engine)
    await engine.close()
    assert busy == 0
    assert len(done[0].tokens) == 4


# ------------------------------------------------------------------------------------------------ who is refused


def test_a_port_without_a_server_is_refused_at_construction(seedling):
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9: no server there \(connection refused\)"):
        HttpEngine(seedling[0], ["http://127.0.0.1:9"])


def test_a_server_that_takes_no_weights_is_refused_for_training_and_measured_all_the_same(seedling, serve):
    server = serve("vllm closed")
    with pytest.raises(EngineError, match=r"cannot be trained with: it takes no weights.*VLLM_SERVER_DEV_MODE=1"):
        connected(seedling, server)
    engine = connected(seedling, server, training=False)
    assert len(asyncio.run(ask(engine))[0].tokens) == 4
    assert server.labels_of("update") == []


def test_a_server_that_only_chats_is_refused_for_training_with_the_reason(seedling, serve):
    with pytest.raises(EngineError, match=r"it takes and returns text.*arborl evaluate"):
        connected(seedling, serve("chat"))


def test_a_server_of_another_tokenizer_is_refused(seedling, serve):
    class Other:
        class tokenizer:
            encode = staticmethod(lambda text: [ord(letter) for letter in text])

    server = serve()
    server.renderer = Other
    with pytest.raises(EngineError, match=r"has another tokenizer: it splits 'Hello, world!'… into 60 tokens"):
        connected(seedling, server)


def test_a_server_of_another_model_is_refused(seedling, serve, tiny_llama):
    server = serve(model=copy.deepcopy(tiny_llama).float())
    with pytest.raises(EngineError, match="size mismatch"):
        connected(seedling, server)


def test_a_server_with_less_context_or_another_name_is_refused(seedling, serve):
    with pytest.raises(EngineError, match=r"serves policy: engine.args.model=other is not among them"):
        connected(seedling, serve(), named="other")
    with pytest.raises(
        EngineError, match=r"reads 32 tokens, and sampling.max_context=64. Start it with --max-model-len"
    ):
        connected(seedling, serve(context=32))


def test_the_key_comes_from_the_environment(seedling, serve, monkeypatch):
    with pytest.raises(EngineError, match=r"engine.args.api_key_env=NO_SUCH: there is no such environment variable"):
        connected(seedling, serve(), key="NO_SUCH")
