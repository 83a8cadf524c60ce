"""Any caller waits for a sandbox loses no time by it."""

import asyncio
import time

import pytest

from arborl import sandbox
from arborl.errors import EpisodeError, boundary, paused_deadlines
from arborl.rewards import Rewards
from arborl.rewards.code_tests import CodeTests
from arborl.sandbox import SandboxLimits, SandboxPool
from arborl.types import Episode, Group, Message, Task, Turn

DOUBLE = "print(int(input()) * 2)"


def episodes(count: int, code: str, tests: list) -> Group:
    received = Message("assistant", f"```python\n{code}\n```")
    task = Task("t", fields={"tests": tests})
    return Group(task, [Episode(f"e{n}", task, turns=[Turn(received)]) for n in range(count)])


def scored(group: Group, seconds: float, pool: SandboxPool) -> list[float]:
    reward = CodeTests(seconds=5)
    reward._run = lambda code, stdin: pool.run(code, stdin)
    asyncio.run(Rewards([("code", reward, 1.0)], seconds).score([group]))
    return [episode.reward for episode in group.valid_episodes]


def test_right_answers_are_right_however_long_they_wait_for_a_sandbox():
    pool = SandboxPool(SandboxLimits(), busy=1)
    sleepy = f"import time; time.sleep(0.2)\n{DOUBLE}"
    group = episodes(6, sleepy, [{"input": "21", "output": "42"}, {"input": "1", "output": "2"}])
    sandbox.sandbox_metrics()
    assert scored(group, 1.5, pool) == [1.0] * 6  # three seconds of work, one at a time
    pool.close()
    seen = sandbox.sandbox_metrics()
    assert seen["sandbox/runs"] == 12
    assert seen["sandbox/queue_seconds_max"] > 1.5
    assert 0 < seen["sandbox/queue_seconds"] < seen["sandbox/queue_seconds_max"]
    assert sandbox.sandbox_metrics() == {}


@pytest.mark.slow
def test_a_hundred_right_programs_of_twenty_tests_each_are_all_right():
    pool = SandboxPool(CodeTests(seconds=5).limits)
    tests = [{"input": str(n), "output": str(2 * n)} for n in range(20)]
    assert scored(episodes(128, DOUBLE, tests), 30.0, pool) == [1.0] * 128
    pool.close()


def test_code_that_takes_too_long_itself_still_does():
    pool = SandboxPool(SandboxLimits(wall_seconds=5), busy=1)
    group = episodes(2, f"import time; time.sleep(2)\n{DOUBLE}", [{"input": "21", "output": "42"}])
    assert scored(group, 1.0, pool) == []
    assert {str(episode.failure.kind) for episode in group.episodes} == {"timeout"}
    pool.close()


def test_a_clock_stands_still_in_a_queue_and_goes_on_after_it():
    async def play() -> None:
        async with boundary("outer", 0.3), boundary("inner", 5):
            await asyncio.sleep(0.1)
            with paused_deadlines():
                await asyncio.sleep(0.5)
            await asyncio.sleep(5)

    start = time.perf_counter()
    with pytest.raises(EpisodeError, match=r"took longer than 0\.3 s"):
        asyncio.run(play())
    assert 0.7 < time.perf_counter() - start < 5


def test_a_clock_stands_still_while_any_of_its_tasks_waits():
    async def one(wait: float) -> None:
        with paused_deadlines():
            await asyncio.sleep(wait)

    async def play() -> str:
        async with boundary("all", 0.3):
            await asyncio.gather(one(0.2), one(0.4), one(0.6))
            return "done"

    assert asyncio.run(play()) == "done"


def test_a_wait_outlives_its_boundary_and_does_no_harm():
    async def one() -> None:
        with paused_deadlines():
            await asyncio.sleep(0.2)

    async def play() -> str:
        async with boundary("short", 5):
            task = asyncio.create_task(one())
            await asyncio.sleep(0.05)
        await task
        async with boundary("next", 5):
            return "fine"

    assert asyncio.run(play()) == "fine"


def test_the_loop_of_another_thread_leaves_our_clock_alone():
    async def inner() -> None:
        with paused_deadlines():
            await asyncio.sleep(0.4)

    async def play() -> None:
        async with boundary("ours", 0.2):
            await asyncio.to_thread(asyncio.run, inner())

    with pytest.raises(EpisodeError, match=r"took longer than 0\.2 s"):
        asyncio.run(play())
