"""Batched calls of an actor: results, errors, cancellation and loss, with an actor in a thread in place of Ray's."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from arborl.cluster.placement.batched_calls import ActorCalls, BatchedActor

pytest.importorskip("ray")


class Lost(Exception):
    """As Ray's error of a dead actor."""


class NotPicklable(Exception):
    def __init__(self):
        super().__init__("open file")
        self.lock = threading.Lock()


class Adder(BatchedActor):
    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    async def add(self, a, b):
        return a + b

    async def fail(self, error):
        raise error

    async def fail_with_a_lock(self):
        raise NotPicklable

    async def wait(self, number):
        self.waiting.release()
        try:
            await self.gate.wait()
        finally:
            self.ended.release()
        return number


class ThreadHandle:
    """An actor in a thread, with the interface of Ray's handle."""

    def __init__(self, actor):
        self.actor, self.loop, self.num_calls, self.is_lost = actor, asyncio.new_event_loop(), 0, False
        self.calls: list[Future] = []
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def __getattr__(self, name):
        return _Method(self, name)

    def run(self, function, *args):
        self.loop.call_soon_threadsafe(function, *args)

    def lose(self):
        self.is_lost = True
        for call in self.calls:
            if not call.done():
                call.set_exception(Lost("the actor is gone"))

    def stop(self):
        async def end():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.is_lost = True
        asyncio.run_coroutine_threadsafe(end(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class _Method:
    def __init__(self, handle, name):
        self.handle, self.name = handle, name

    def remote(self, *args):
        handle, done = self.handle, Future()
        handle.num_calls += 1
        handle.calls.append(done)
        if handle.is_lost:
            done.set_exception(Lost("the actor is gone"))
        else:
            ran = asyncio.run_coroutine_threadsafe(getattr(handle.actor, self.name)(*args), handle.loop)
            ran.add_done_callback(lambda ran: ran.cancelled() or done.done() or done.set_result(ran.result()))
        return _Reference(done)


class _Reference:
    def __init__(self, done):
        self.done = done

    def future(self):
        return self.done


@pytest.fixture
def adder():
    handle = ThreadHandle(Adder())
    yield handle
    handle.stop()


def test_each_caller_of_many_threads_gets_its_own_result(adder):
    calls = ActorCalls(adder)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: calls.call("add", n, 1000).result(30), range(2000)))
    assert results == [n + 1000 for n in range(2000)]
    assert not calls.pending


def test_calls_made_while_a_batch_is_sent_share_the_next_one(adder):
    calls, blocked = ActorCalls(adder), threading.Event()
    adder.run(blocked.wait, 30)  # the actor is busy, so the first batch is not confirmed
    futures = [calls.call("add", n, 1) for n in range(500)]
    blocked.set()
    assert [future.result(30) for future in futures] == list(range(1, 501))
    assert adder.num_calls < 20


def test_an_exception_is_the_one_of_the_method_and_costs_only_its_call(adder):
    calls = ActorCalls(adder)
    failed, unpicklable, other = (
        calls.call("fail", KeyError("north")), calls.call("fail_with_a_lock"), calls.call("add", 1, 2),
    )  # fmt: skip
    with pytest.raises(KeyError, match="north"):
        failed.result(30)
    with pytest.raises(RuntimeError, match="NotPicklable: open file"):
        unpicklable.result(30)
    assert other.result(30) == 3


def test_cancelling_a_call_cancels_it_on_the_actor_and_leaves_the_others(adder):
    calls = ActorCalls(adder)
    first, second = calls.call("wait", 1), calls.call("wait", 2)
    assert adder.actor.waiting.acquire(timeout=30)
    assert adder.actor.waiting.acquire(timeout=30)
    assert first.cancel()
    assert adder.actor.ended.acquire(timeout=30)
    assert not second.done()
    adder.run(adder.actor.gate.set)
    assert second.result(30) == 2
    assert not calls.pending
    assert not adder.actor.running


def test_the_loss_of_the_actor_fails_pending_and_later_calls(adder):
    calls = ActorCalls(adder)
    waiting = [calls.call("wait", number) for number in range(3)]
    for _ in waiting:
        assert adder.actor.waiting.acquire(timeout=30)
    adder.lose()
    for future in (*waiting, calls.call("add", 1, 2)):
        with pytest.raises(Lost):
            future.result(30)
    assert not calls.pending
