"""Law 6: in deterministic mode episodes depend on the seed alone, not on concurrency or batch composition."""

from __future__ import annotations

import asyncio
import functools

from arborl.config.load_config import load
from arborl.rollout.episode_store import episode_to_json
from arborl.seeds import derive
from arborl.training_run.build import build

SMALL = ["deterministic=true", "threads=1", "model.device=cpu", "env.args.size=3", "env.args.max_steps=5"]


@functools.cache
def episodes(concurrency: int, tasks: int = 4) -> list[dict]:
    """Of the first so many of four tasks."""
    parts = build(load(None, [*SMALL, f"rollout.concurrency={concurrency}"]))
    chosen = parts.source.take(0, 4)[:tasks]
    groups = asyncio.run(parts.rollout.collect(chosen, derive(0, "step", 0), group_size=3))
    rows = [episode_to_json(episode) for group in groups for episode in group.episodes]
    for row in rows:
        del row["seconds"]
        for call in row["calls"]:
            del call["seconds"]
    return rows


def test_the_same_seed_with_concurrency_1_and_32_gives_bit_equal_episodes():
    one = episodes(1)
    assert one == episodes(32)
    assert len({len(row["calls"]) for row in one}) > 1  # some end early, so the composition of batches changes


def test_an_episode_does_not_notice_whether_other_tasks_are_played_beside_it():
    assert episodes(32, tasks=2) == episodes(32)[: 2 * 3]


def test_another_seed_gives_other_tasks():
    first, second = (build(load(None, [f"seed={s}", "model.device=cpu"])).source.take(0, 4) for s in (0, 1))
    assert [task.seed for task in first] != [task.seed for task in second]
