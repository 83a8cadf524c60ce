"""Calls across the border take a short way where they wait for nothing, and mean the same either way."""

from __future__ import annotations

import asyncio
import time

import pytest

from arborl.errors import EpisodeError, MaxTurns
from arborl.rollout.deadlines import call_with_deadline


async def late(value, turns=3):
    for _ in range(turns):
        await asyncio.sleep(0)
    return value


async def at_once(value):
    return value


def plain(value):
    return value


def awaitable(value):
    return asyncio.ensure_future(late(value))


@pytest.mark.parametrize("function", [late, at_once, plain, awaitable])
def test_every_kind_of_function_answers(function):
    assert asyncio.run(call_with_deadline("x", 5.0, function, 7)) == 7


def raises(error):
    raise error


async def raises_at_once(error):
    raise error


async def raises_late(error):
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("function", [raises, raises_at_once, raises_late])
def test_whatever_fails_belongs_to_who_was_called(function):
    with pytest.raises(EpisodeError, match="environment 'x': ValueError: oh") as caught:
        asyncio.run(call_with_deadline("environment 'x'", 5.0, function, ValueError("oh")))
    assert caught.value.kind == "ValueError"
    inner = EpisodeError("tool 'y'", ValueError("oh"))
    for error in (inner, MaxTurns("used up")):
        with pytest.raises(type(error)) as passed:
            asyncio.run(call_with_deadline("environment 'x'", 5.0, function, error))
        assert passed.value is error  # attributed already, or no failure


def test_a_plain_function_that_raises_stop_iteration_has_failed_and_not_returned():
    with pytest.raises(EpisodeError, match="StopIteration"):
        asyncio.run(call_with_deadline("x", None, raises, StopIteration(7)))


def test_taking_too_long_belongs_to_it_too():
    with pytest.raises(EpisodeError, match=r"x: TimeoutError: took longer than 0.05 s"):
        asyncio.run(call_with_deadline("x", 0.05, asyncio.sleep, 5))


async def test_a_cancelled_call_is_reported_and_may_clean_up():
    reported = []

    async def patient():
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0)
            reported.append("cleaned up")

    job = asyncio.ensure_future(call_with_deadline("x", 5.0, patient))
    await asyncio.sleep(0.01)
    job.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await job
    assert caught.value.__notes__ == ["x"]
    assert reported == ["cleaned up"]


async def test_a_call_may_use_what_belongs_to_a_task():
    async def nested():
        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            jobs = [group.create_task(late(i)) for i in range(3)]
        return [job.result() for job in jobs], asyncio.current_task()

    values, task = await call_with_deadline("x", 40.0, nested)
    assert values == [0, 1, 2]
    assert task is asyncio.current_task()


async def sleeps(seconds):
    time.sleep(seconds)
    return 1


async def sleeps_later(seconds):
    await asyncio.sleep(0)
    return await sleeps(seconds)


@pytest.mark.parametrize("function", [sleeps, sleeps_later, time.sleep])
def test_a_call_that_blocks_for_too_long_has_failed_as_one_that_waits_has(function):
    with pytest.raises(EpisodeError, match=r"environment 'x': TimeoutError: took longer than 0.05 s") as caught:
        asyncio.run(call_with_deadline("environment 'x'", 0.05, function, 0.1))
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("function", [raises, raises_at_once, raises_late])
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_who_ends_the_process_or_cancels_itself_has_failed(function, error):
    with pytest.raises(EpisodeError, match=type(error).__name__):
        asyncio.run(call_with_deadline("environment 'x'", 5.0, function, error))


def test_ctrl_c_is_the_users_and_not_a_failure_of_who_was_called():
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(call_with_deadline("environment 'x'", 5.0, raises_at_once, KeyboardInterrupt()))
