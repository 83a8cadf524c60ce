"""An engine is given a conversation as it grows, or written out anew each turn: it makes no difference but in time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from arborl.engines.engine_requests import read_prompt
from arborl.engines.local import LocalEngine
from arborl.errors import EngineError
from arborl.tokens import Tokens
from arborl.types import Sampling


async def talks(engine: LocalEngine, grows: bool) -> list[tuple]:
    """Three conversations side by side, one of which turns back half-way; what was sampled, and the cache's hits."""

    async def talk(number: int) -> list[tuple]:
        rng = np.random.default_rng(number // 2)  # the first two begin alike
        prompt, completions = Tokens(rng.integers(0, 50, 20).tolist()), []
        for turn in range(4):
            given = prompt if grows else list(prompt)
            done = await engine.generate(given, Sampling(6, seed=10 * number + turn, stop=(3,)), session=str(number))
            completions.append((done.tokens, done.logprobs, done.finish))
            kept = prompt[:9] if (number, turn) == (1, 1) else prompt + done.tokens
            prompt = Tokens(kept) + rng.integers(0, 50, 5).tolist()
        return completions

    found = await asyncio.gather(*(talk(number) for number in range(3)))
    counts = engine.metrics()
    return [*found, [(counts[f"engine/{name}"],) for name in ("sampled", "read", "reused", "preempted", "hit_rate")]]


@pytest.mark.parametrize("pages", [{"block_size": 4}, {"block_size": 0}, {"block_size": 4, "kv_tokens": 100}])
def test_conversations_given_as_they_grow_and_as_lists_sample_the_same_and_hit_the_cache_alike(tiny_llama, pages):
    sampled = []
    for grows in (True, False):
        engine = LocalEngine(tiny_llama, max_context=100, max_requests=3, **pages)
        sampled.append(asyncio.run(talks(engine, grows)))
    assert sampled[0] == sampled[1]
    assert sampled[0][-1][2] > (0,)  # some of it was found


def test_what_grows_is_looked_at_where_it_is_and_refused_as_a_list_is():
    tokens = Tokens([1, 2, 49])
    assert np.shares_memory(read_prompt(tokens, 50, 100), tokens.array)
    for vocabulary, context, why in ((49, 100, "token id 49 is outside"), (50, 3, "no room to sample")):
        for prompt in (tokens, [1, 2, 49]):
            with pytest.raises(EngineError, match=why):
                read_prompt(prompt, vocabulary, context)
    with pytest.raises(EngineError, match="the prompt is empty"):
        read_prompt(Tokens())
