"""What goes wrong with one request reaches no other, and nothing is lost on the way: no row, no page, no caller."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import numpy as np
import pytest
import torch
from cases import slow_cases

from arborl.engines.local import LocalEngine
from arborl.errors import EngineError
from arborl.types import FinishReason, Sampling


class Meddling:
    """An executor beside which something happens while it runs a step."""

    def __init__(self, engine: LocalEngine, meddle):
        self.inner, self.meddle, self.steps = engine.runner, meddle, 0
        engine.runner = self

    def launch(self, step):
        self.steps += 1
        self.meddle(self.steps)
        return self.inner.launch(step)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Ahead(Meddling):
    """The next step is launched before this one's outcome is looked at, as on a GPU: tokens the host does not know yet
    are named by their place in the step before."""

    ahead = True

    def __init__(self, engine: LocalEngine):
        super().__init__(engine, lambda step: None)
        self.last = np.zeros(0, dtype=np.int64)

    def launch(self, step):
        known = step.tokens >= 0
        tokens = np.where(known, step.tokens, 0)
        tokens[~known] = self.last[-1 - step.tokens[~known]]
        outcome = super().launch(dataclasses.replace(step, tokens=tokens))
        self.last = outcome.wait()[0]
        return outcome


def assert_nothing_leaks(engine: LocalEngine) -> None:
    pages, scheduler = engine.pool, engine.scheduler
    assert (list(scheduler.waiting), scheduler.running) == ([], {})
    assert sorted(engine.batch.free) == list(range(engine.batch.count))
    found = [pages.root]
    for node in found:
        found.extend(child for some in node.children.values() for child in some)
    assert pages.num_used == 0
    assert sorted([*pages.free_ids, *(node.id for node in found[1:])]) == list(range(pages.num_blocks))


def ask(engine, *requests):
    async def run():
        calls = (engine.generate(prompt, sampling, session=str(i)) for i, (prompt, sampling) in enumerate(requests))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def test_a_request_cancelled_in_the_turn_it_is_answered_ends_no_other(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=4, kv_tokens=256)
    (expected,) = ask(engine, ([3, 4], Sampling(9, seed=1)))

    async def run():
        tasks = [
            asyncio.create_task(engine.generate([1, 2], Sampling(5), session="gone")),
            asyncio.create_task(engine.generate([3, 4], Sampling(9, seed=1), session="stays")),
        ]
        Meddling(engine, lambda step: step == 5 and tasks[0].cancel())  # its fifth token is its last
        return await asyncio.gather(*tasks, return_exceptions=True)

    gone, stays = asyncio.run(run())
    assert isinstance(gone, asyncio.CancelledError)
    assert stays.tokens == expected.tokens
    assert_nothing_leaks(engine)


def test_a_decode_that_breaks_costs_the_request_it_was_called_for(qwen3):
    calls = []

    def decode(ids):
        calls.append(ids)
        raise KeyError("no such id")

    engine = LocalEngine(qwen3, max_context=64, max_requests=4, kv_tokens=256, decode=decode)
    bad, good = ask(engine, ([1, 2], Sampling(8, stop_texts=("x",))), ([3], Sampling(8)))
    assert isinstance(bad, EngineError)
    assert "KeyError" in str(bad)
    assert len(calls) == 1
    assert len(good.tokens) == 8
    assert_nothing_leaks(engine)


def test_a_prompt_that_the_model_makes_nan_of_fails_alone_and_spoils_no_page(qwen3):
    model = copy.deepcopy(qwen3)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    fine = [([1, 2, 3], Sampling(6, 0.0)), ([5] * 20, Sampling(6, 0.0)), ([9, 8], Sampling(6, 0.0))]
    expected = [done.tokens for done in ask(LocalEngine(qwen3, max_context=64, kv_tokens=256), *fine)]
    assert not any(7 in tokens for tokens in expected)
    for block_size in (0, 4):
        engine = LocalEngine(model, max_context=64, max_requests=4, kv_tokens=128, block_size=block_size)
        for _ in range(3):  # every page is used again
            bad, *good = ask(engine, ([1, 2, 7, *[3] * 30], Sampling(6, 0.0)), *fine)
            assert isinstance(bad, EngineError)
            assert "not finite" in str(bad)
            assert [done.tokens for done in good] == expected
        assert_nothing_leaks(engine)


def test_a_step_that_breaks_fails_all_each_with_an_error_of_its_own_and_the_next_request_works(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=2, kv_tokens=128)
    (expected,) = ask(engine, ([1, 2], Sampling(5, seed=3)))

    def meddle(step):
        if step == 3:
            raise RuntimeError("out of memory")

    Meddling(engine, meddle)
    failed = ask(engine, *(([i + 1, 2], Sampling(5, seed=3)) for i in range(5)))
    assert [str(error) for error in failed] == ["RuntimeError: out of memory"] * 5
    assert len(set(map(id, failed))) == 5
    assert_nothing_leaks(engine)
    assert ask(engine, ([1, 2], Sampling(5, seed=3)))[0].tokens == expected.tokens


async def test_closing_ends_waiting_requests_and_refuses_new_ones(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=1, kv_tokens=64)
    tasks = [asyncio.create_task(engine.generate([i + 1], Sampling(50), session="")) for i in range(3)]
    await asyncio.sleep(0.01)
    await engine.close()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 40)
    outcome = [*ended, *await asyncio.gather(engine.generate([1], Sampling(), session=""), return_exceptions=True)]
    assert [str(error) for error in outcome] == ["the engine was closed"] * 3 + ["the engine is closed; make another"]
    assert_nothing_leaks(engine)


async def test_cancellation_of_the_worker_ends_all_requests_and_starts_another_worker(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=2, kv_tokens=128)
    task = asyncio.create_task(engine.generate([1], Sampling(50), session=""))
    await asyncio.sleep(0.01)
    engine.worker.cancel()
    (ended,) = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 40)
    done = await engine.generate([2], Sampling(3), session="")
    assert str(ended) == "the engine was stopped"
    assert len(done.tokens) == 3
    assert_nothing_leaks(engine)


def test_an_engine_goes_on_in_a_second_event_loop_whatever_the_first_left_behind(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=2, kv_tokens=128)
    loop = asyncio.new_event_loop()

    async def begin():
        begun.extend(loop.create_task(engine.generate([i + 1], Sampling(50), session="")) for i in range(3))
        await asyncio.sleep(0.01)

    begun: list[asyncio.Task] = []
    loop.run_until_complete(begin())
    loop.close()  # while its tasks are pending, without cancellation
    (done,) = ask(engine, ([1, 2], Sampling(4, seed=1)))
    assert len(done.tokens) == 4
    assert_nothing_leaks(engine)
    for task in [*begun, *asyncio.all_tasks(loop)]:
        task._log_destroy_pending = False


def test_two_event_loops_at_once_are_refused(qwen3):
    engine = LocalEngine(qwen3, max_context=64, max_requests=2, kv_tokens=128)

    async def run():
        mine = asyncio.create_task(engine.generate([1], Sampling(20), session=""))
        await asyncio.sleep(0)
        (other,) = await asyncio.to_thread(ask, engine, ([2], Sampling(3)))
        return await mine, other

    mine, other = asyncio.run(run())
    assert len(mine.tokens) == 20
    assert "another event loop" in str(other)


def decode(ids) -> str:
    """Text of which some cannot be read."""
    if any(i % 11 == 0 for i in ids):
        raise ValueError("that is no character")
    return "".join(chr(200 + i) for i in ids)


def random_requests(rng: np.random.Generator, count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts that begin alike, of all lengths; some with texts to stop at that decode cannot always read."""
    stem = rng.integers(0, 99, 30).tolist()
    found = []
    for seed in range(count):
        prompt = [*stem[: int(rng.integers(1, 30))], *rng.integers(0, 5, int(rng.integers(0, 4))).tolist()]
        texts = (chr(200 + int(rng.integers(0, 20))),) if rng.random() < 0.3 else ()
        stop = tuple(rng.integers(0, 99, int(rng.integers(0, 4))).tolist())
        size = int(rng.integers(1, 15))
        found.append((prompt, Sampling(size, float(rng.choice([0.0, 1.0])), seed, stop, texts)))
    return found


def same(done, expected) -> bool:
    if isinstance(expected, EngineError):
        return str(done) == str(expected)
    return done.tokens == expected.tokens and np.allclose(done.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1, *slow_cases(2, 3, 4, 5)])
def test_cancellations_deadlines_faults_and_loads_do_not_change_the_tokens_of_other_requests(qwen3, seed, monkeypatch):
    """Every other seed with steps that are launched ahead, and a model that makes NaN of a token."""
    monkeypatch.setattr("arborl.engines.local.scheduler.HEADROOM", 0)
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 80)
    if seed % 2:
        qwen3 = copy.deepcopy(qwen3)
        with torch.no_grad():
            qwen3.get_input_embeddings().weight[7] = float("nan")
    alone = LocalEngine(qwen3, max_context=48, kv_tokens=48, decode=decode, deterministic=True)
    expected = [ask(alone, one)[0] for one in requests]
    engine = LocalEngine(
        qwen3, max_context=48, max_requests=6, kv_tokens=100, block_size=int(rng.choice([1, 4, 16])), decode=decode
    )
    if seed % 2:
        Ahead(engine)

    async def client(number: int):
        prompt, sampling = requests[number]
        for _ in range(int(rng.integers(0, 40))):
            await asyncio.sleep(0)
        sampling = dataclasses.replace(sampling, seconds=0.01) if number % 7 == 0 else sampling
        return await engine.generate(prompt, sampling, session=str(number))

    async def run():
        tasks = [asyncio.create_task(client(number)) for number in range(len(requests))]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if rng.random() < 0.2:
                tasks[int(rng.integers(len(tasks)))].cancel()
            if rng.random() < 0.05:
                await engine.load({}, version=engine.version + 1)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcome = asyncio.run(asyncio.wait_for(run(), 60))
    survived = 0
    for done, wanted in zip(outcome, expected, strict=True):
        if isinstance(done, asyncio.CancelledError):
            continue
        survived += 1
        late = not isinstance(done, Exception) and done.finish is FinishReason.ABORT
        if late and not isinstance(wanted, Exception):
            assert done.tokens == wanted.tokens[: len(done.tokens)]
        elif not late:
            assert same(done, wanted)
    assert 10 < survived < len(requests)
    assert any(isinstance(done, EngineError) for done in expected)
    assert_nothing_leaks(engine)
