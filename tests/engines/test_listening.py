"""A listener gets every sampled token once, in order, with the likeliest alternatives, without effect on others."""

import asyncio
from dataclasses import dataclass, field

import pytest

from arborl.engines.local import LocalEngine
from arborl.errors import EngineError
from arborl.types import Sampling


@dataclass
class RecordingListener:
    top: int = 0
    tokens: list = field(default_factory=list)

    def __call__(self, token, logprob, top):
        self.tokens.append((token, logprob, tuple(top)))


class FailingListener(RecordingListener):
    def __call__(self, token, logprob, top):
        raise RuntimeError("no ears")


def engine_of(model, **more):
    return LocalEngine(model, max_context=128, **more)


def test_what_is_heard_is_what_is_answered_also_of_requests_that_are_put_back(tiny_llama):
    engine = engine_of(tiny_llama, kv_tokens=140, block_size=4)  # blocks for one whole sequence and little more
    ears = [RecordingListener() for _ in range(6)]

    async def one(number):
        sampling = Sampling(max_tokens=100 - number, seed=number)
        return await engine.generate([1, 2, number], sampling, session=str(number), listener=ears[number])

    async def all_of_them():
        return await asyncio.gather(*map(one, range(6)))

    for ear, completion in zip(ears, asyncio.run(all_of_them()), strict=True):
        assert tuple(token for token, _, _ in ear.tokens) == completion.tokens
        assert tuple(logprob for _, logprob, _ in ear.tokens) == completion.logprobs
    assert engine.metrics()["engine/preempted"] > 0


async def test_the_likeliest_tokens_are_those_of_the_distribution_and_differ_by_listener(tiny_llama):
    engine = engine_of(tiny_llama)
    three, none = RecordingListener(top=3), RecordingListener()
    greedy = Sampling(max_tokens=8, temperature=0.0)
    (
        await asyncio.gather(
            engine.generate([1, 2], greedy, session="a", listener=three),
            engine.generate([3], Sampling(max_tokens=8), session="b", listener=none),
        )
    )
    for token, logprob, top in three.tokens:
        assert top[0] == (token, logprob)  # the likeliest was taken
        assert len(top) == 3
        assert top[0][1] >= top[1][1] >= top[2][1]
    assert [top for _, _, top in none.tokens] == [()] * 8


async def test_a_listener_that_breaks_costs_its_own_request(tiny_llama):
    engine = engine_of(tiny_llama)
    broken = engine.generate([1], Sampling(max_tokens=4), session="a", listener=FailingListener())
    fine = engine.generate([2], Sampling(max_tokens=4), session="b", listener=RecordingListener())
    broken, fine = await asyncio.gather(broken, fine, return_exceptions=True)
    assert isinstance(broken, EngineError)
    assert "no ears" in str(broken)
    assert len(fine.tokens) == 4


def test_listening_changes_no_token(tiny_llama):
    async def generate(heard):
        engine = engine_of(tiny_llama)
        return await engine.generate([5, 6], Sampling(max_tokens=12, seed=3), session="", listener=heard)

    plain, heard = asyncio.run(generate(None)), asyncio.run(generate(RecordingListener(top=2)))
    assert heard.tokens == plain.tokens
    assert heard.logprobs == pytest.approx(plain.logprobs)
