"""Law 6: in deterministic mode episodes depend on the seed alone, not on concurrency or batch composition."""

from __future__ import annotations

import asyncio

from arborl.build import build
from arborl.config.load import load
from arborl.rollout.store import to_json
from arborl.seeds import derive


def episodes(concurrency: int, tasks: slice = slice(0, 4)) -> list[dict]:
    config = load(None, ["deterministic=true", f"rollout.concurrency={concurrency}", "threads=1", "model.device=cpu"])
    parts = build(config)
    chosen = parts.source.take(0, 4)[tasks]
    groups = asyncio.run(parts.rollout.collect(chosen, derive(0, "step", 0), group_size=3))
    rows = [to_json(episode) for group in groups for episode in group.episodes]
    for row in rows:
        del row["seconds"]
        for call in row["calls"]:
            del call["seconds"]
    return rows


def test_the_same_seed_with_concurrency_1_and_32_gives_bit_equal_episodes():
    assert episodes(1) == episodes(32)


def test_an_episode_does_not_notice_whether_other_tasks_are_played_beside_it():
    assert episodes(32, slice(0, 2)) == episodes(32)[: 2 * 3]


def test_another_seed_gives_other_tasks():
    first, second = (build(load(None, [f"seed={s}", "model.device=cpu"])).source.take(0, 4) for s in (0, 1))
    assert [task.seed for task in first] != [task.seed for task in second]
