import asyncio
import time
from dataclasses import replace

import pytest

from arborl.sandbox import SandboxError, SandboxLimits, SandboxPool, run_code, run_code_sync

LIMITS = SandboxLimits(wall_seconds=20, memory_mb=128)


@pytest.fixture
def pool():
    made = SandboxPool(LIMITS, size=3, spare=2)
    yield made
    made.close()


def test_every_lease_is_a_fresh_interpreter(pool):
    with pool.lease_sync() as box:
        assert box.run_sync("import builtins, math; secret = 1; builtins.leak = 2; math.pi = 3; open('f', 'w')").ok
    for _ in range(4):
        with pool.lease_sync() as box:
            for code in ("secret", "leak", "open('f')"):
                assert not box.run_sync(code).ok
            assert box.run_sync("import math; math.pi > 3.1").value == "True"


def test_leases_beyond_the_size_wait_their_turn(pool):
    async def one() -> float:
        await pool.run("import time; time.sleep(0.3)")
        return time.perf_counter()

    async def play() -> list[float]:
        start = time.perf_counter()
        return sorted([at - start for at in await asyncio.gather(*(one() for _ in range(5)))])

    ends = asyncio.run(play())
    assert ends[3] > 0.55  # the fourth began when one of the first three had ended


def test_spares_are_started_ahead(pool):
    pool.run_sync("1")
    deadline = time.monotonic() + 40
    while len(pool._ready) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool._ready) == 2
    ready = list(pool._ready)
    with pool.lease_sync() as box:
        assert box in ready
        assert box.run_sync("1 + 1").value == "2"


def test_a_spare_that_died_is_passed_over(pool):
    pool.run_sync("1")
    deadline = time.monotonic() + 40
    while len(pool._ready) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for box in pool._ready:
        box.kill()
        box._supervisor.wait()
    assert pool.run_sync("2").value == "2"


def test_a_closed_pool_leaves_no_sandbox_process(pool):
    pool.run_sync("1")
    time.sleep(0.2)
    ready = list(pool._ready)
    pool.close()
    assert not any(box.alive for box in ready)
    with pytest.raises(SandboxError, match="closed"):
        pool.run_sync("1")


def test_code_runs_in_one_call_from_any_event_loop():
    assert run_code_sync("print(int(input()) * 2)", stdin="21", limits=LIMITS).stdout == "42\n"
    assert asyncio.run(run_code("6 * 7", limits=LIMITS)).value == "42"

    async def many() -> list[str]:
        outcomes = await asyncio.gather(*(run_code(f"{n} * 2", limits=LIMITS) for n in range(6)))
        return [outcome.value for outcome in outcomes]

    for _ in range(2):
        assert asyncio.run(many()) == [str(2 * n) for n in range(6)]


def test_a_cancelled_lease_is_given_back():
    pool = SandboxPool(replace(LIMITS, wall_seconds=100), size=1, spare=0)

    async def play() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.run("import time; time.sleep(100)"), 0.3)
        return (await asyncio.wait_for(pool.run("'free'"), 40)).value

    assert asyncio.run(play()) == "'free'"
    pool.close()
