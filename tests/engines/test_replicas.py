"""The time lost with a replica is measured and logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from arborl.engines.remote import replicas
from arborl.engines.remote.replicas import Replica, ReplicaPool, ReplicaUnavailable

SILENT = 0.3


def test_time_is_lost_from_when_a_replica_was_last_heard_and_not_from_when_it_is_found_gone(monkeypatch, caplog):
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.01)
    places = [Replica("a", up=True), Replica("b", up=True)]
    dead = {"a"}

    async def revive(replica):
        dead.clear()
        replica.version = 0

    async def work(replica):
        if replica.name in dead:
            await asyncio.sleep(SILENT)  # its node is disconnected without an error
            raise ReplicaUnavailable(f"{replica.name} is gone")
        return replica.name

    async def run():
        routes = ReplicaPool(places, revive, 5.0)
        answer = await routes.ask("one", work)
        while len(routes.up) < 2:
            await asyncio.sleep(0.01)
        return answer, routes.metrics()

    with caplog.at_level(logging.WARNING):
        answer, counts = asyncio.run(run())
    assert answer == "b"
    assert counts["engine/lost"] == counts["engine/retried"] == 1
    assert counts["engine/seconds_lost"] >= SILENT
    message = next(record.getMessage() for record in caplog.records if "answers again after" in record.getMessage())
    assert float(message.split()[-2]) == pytest.approx(counts["engine/seconds_lost"], abs=0.06)
