"""Who may begin: so many at a time, or as many as the engine can serve."""

from __future__ import annotations

import asyncio

import pytest

from arborl.config.load import load
from arborl.errors import ConfigError
from arborl.rollout import slots as module
from arborl.rollout.meter import Meter
from arborl.rollout.slots import Slots


class Engine:
    """Serves so many at a time; a crowd is what waits beyond."""

    def __init__(self, room: int):
        self.room, self.asked, self.most = asyncio.Semaphore(room), 0, 0
        self.size = room

    @property
    def crowded(self) -> bool:
        return self.asked > self.size

    async def generate(self) -> None:
        self.asked += 1
        self.most = max(self.most, self.asked)
        async with self.room:
            await asyncio.sleep(0.002)
        self.asked -= 1


def play(limit: int | None, room: int, episodes: int, tool: float) -> tuple[Slots, Engine, int]:
    async def all_of_them():
        engine = Engine(room)
        slots = Slots(limit, lambda: engine.crowded)
        meter, most = Meter(slots.look), 0

        async def episode():
            nonlocal most
            async with slots:
                most = max(most, slots.inside)
                for _ in range(4):
                    with meter:
                        await engine.generate()
                    await asyncio.sleep(tool)

        await asyncio.gather(*(episode() for _ in range(episodes)))
        assert slots.inside == 0
        return slots, engine, most

    return asyncio.run(all_of_them())


def test_a_limit_is_kept_and_everybody_gets_in():
    _, _, most = play(3, room=8, episodes=20, tool=0.0)
    assert most == 3


def test_auto_lets_more_in_while_there_is_room_and_fewer_where_requests_wait(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.002)
    _, _, many = play(None, room=200, episodes=150, tool=0.01)
    crowd, _engine, _ = play(None, room=4, episodes=150, tool=0.0)
    assert many > 2 * module.FIRST  # late tools: many are in play, and the engine has room for all
    assert crowd.limit < module.FIRST / 2


def test_who_is_cancelled_in_line_or_on_the_way_in_takes_no_slot():
    async def gone():
        slots = Slots(1, lambda: False)
        async with slots:
            waits = [asyncio.ensure_future(slots.__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            waits[0].cancel()
            await asyncio.sleep(0)
        waits[1].cancel()  # it was let in a moment ago
        await asyncio.sleep(0)
        await asyncio.wait_for(waits[2], 20)
        assert slots.inside == 1

    asyncio.run(gone())


def test_concurrency_is_a_number_or_auto():
    assert load(None, ["rollout.concurrency=auto"]).rollout.concurrency == "auto"
    for wrong in ("0", "many"):
        with pytest.raises(ConfigError, match=r"rollout\.concurrency"):
            load(None, [f"rollout.concurrency={wrong}"])
