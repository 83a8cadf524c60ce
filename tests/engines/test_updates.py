"""New weights find requests half-way: no token is lost or repeated, and each carries the version that sampled it."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from arborl.engines.engine import PROBE_SESSION
from arborl.engines.local import LocalEngine
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Episode, Group, Sampling, Task

PROMPT = list(range(3, 15))


def other_weights(model, seed: int = 1):
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()}


async def straddling(engine, landed: int = 5, **sampling):
    """A request of 20 tokens that gets other weights once so many have landed."""
    request = asyncio.create_task(engine.generate(PROMPT, Sampling(20, seed=7, **sampling), session="a"))
    while engine.batch.known.max() < len(PROMPT) + landed:
        await asyncio.sleep(0)
    await engine.pause()
    await engine.sleep()
    late = asyncio.create_task(engine.generate(PROMPT, Sampling(3, seed=7), session="b"))
    await asyncio.sleep(0.01)
    sampled = engine.counts["sampled"]
    await asyncio.sleep(0.01)
    assert engine.counts["sampled"] == sampled
    assert not late.done()
    await engine.load(other_weights(engine.model), version=1)
    probe = await asyncio.wait_for(engine.generate(PROMPT, Sampling(1), session=PROBE_SESSION), 40)
    assert probe.version == 1
    assert not late.done()
    engine.resume()
    return await request, await late


def run(tiny_llama, update: str, **sampling):
    engine = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512, update=update)
    return engine, *asyncio.run(straddling(engine, **sampling))


def test_a_completion_goes_on_over_an_update_and_each_token_carries_its_version(tiny_llama):
    _engine, done, late = run(tiny_llama, "continue")
    assert len(done.tokens) == 20
    assert done.versions == (0,) * 5 + (1,) * 15
    assert done.version == 1
    assert done.oldest == 0
    alone = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512)
    before = asyncio.run(alone.generate(PROMPT, Sampling(20, seed=7), session="a"))
    assert done.tokens[:5] == before.tokens[:5]
    assert done.logprobs[:5] == before.logprobs[:5]
    assert late.version == 1
    assert late.versions == ()


def test_a_completion_may_be_finished_under_the_weights_that_began_it(tiny_llama):
    _, done, late = run(tiny_llama, "finish")
    assert len(done.tokens) == 20
    assert done.version == 0
    assert done.versions == ()
    assert late.version == 1


def test_a_completion_may_begin_again_under_the_new_weights(tiny_llama):
    engine, done, _ = run(tiny_llama, "restart")
    assert len(done.tokens) == 20
    assert done.version == 1
    assert done.versions == ()
    assert engine.metrics()["engine/restarted"] == 5
    alone = asyncio.run(engine.generate(PROMPT, Sampling(20, seed=7), session="c"))
    assert done.tokens == alone.tokens


async def test_the_same_version_again_restarts_nothing(tiny_llama):
    engine = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512, update="restart")
    request = asyncio.create_task(engine.generate(PROMPT, Sampling(20), session="a"))
    while engine.batch.known.max() < len(PROMPT) + 5:
        await asyncio.sleep(0)
    await engine.load(engine.model.state_dict(), version=0)
    assert len((await request).tokens) == 20
    assert engine.metrics()["engine/restarted"] == 0


async def test_who_goes_while_held_leaves_nothing_behind_and_closing_tells_the_others(tiny_llama):
    engine = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512)
    await engine.pause()
    first, second = (asyncio.create_task(engine.generate(PROMPT, Sampling(3), session=name)) for name in ("a", "b"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    engine.resume()
    assert len((await second).tokens) == 3
    await engine.pause()
    third = asyncio.create_task(engine.generate(PROMPT, Sampling(3), session="c"))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(Exception, match="closed"):
        await third
    assert engine.pool.num_used == 0


def test_terms_have_the_version_of_their_token(tiny_llama):
    _, done, late = run(tiny_llama, "continue")
    calls = [Call(tuple(PROMPT), done, 0), Call(tuple(PROMPT), late, 1)]
    episode = Episode("e", Task("t"), calls=calls)
    terms = build_token_trees([Group(Task("t"), [episode])]).terms
    np.testing.assert_array_equal(terms.version, [*done.versions, 1, 1, 1])


def test_a_way_to_update_that_is_none_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="update='stop': give continue, finish, restart"):
        LocalEngine(tiny_llama, max_context=64, kv_tokens=512, update="stop")


class FakeMemory:
    """Memory in whose place others have written something else while it was given back."""

    def __init__(self, cache):
        self.cache, self.calls = cache, []

    def sleep(self):
        self.calls.append("sleep")
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))

    def wake_up(self):
        self.calls.append("wake_up")


@pytest.mark.parametrize("update", ["continue", "finish", "restart"])
def test_lending_memory_while_paused_does_not_change_the_sampled_tokens(tiny_llama, update):
    _, *expected = run(tiny_llama, update)
    engine = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512, update=update, compiled=False)
    memory = engine.runner.cache.memory = FakeMemory(engine.runner.cache)
    found = asyncio.run(straddling(engine))
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.tokens, mine.versions) == (theirs.tokens, theirs.versions)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert memory.calls == ["sleep", "wake_up"]


async def test_an_engine_that_was_held_for_nothing_has_its_memory_again(tiny_llama):
    engine = LocalEngine(copy.deepcopy(tiny_llama), max_context=64, kv_tokens=512, compiled=False)
    memory = engine.runner.cache.memory = FakeMemory(engine.runner.cache)
    await engine.pause()
    await engine.sleep()
    engine.resume()
    assert np.isfinite((await engine.generate(PROMPT, Sampling(4), session="a")).logprobs).all()
    assert memory.calls == ["sleep", "wake_up"]
