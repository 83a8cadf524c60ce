"""Recorded once, trained on again: the same episodes and the same update, without playing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from small_runs import weights

import arborl
from arborl.errors import ConfigError
from arborl.rollout.episode_store import RolloutRecorder, RolloutReplay
from arborl.rollout.runner import Rollout
from arborl.track.jsonl import read_metrics
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, Turn

SMALL = {
    "steps": 2,
    "seed": 3,
    "rollout.tasks_per_step": 3,
    "rollout.group_size": 3,
    "env.args.size": 3,
    "env.args.max_steps": 4,
    "evaluation.tasks": 0,
    "track.tensorboard": False,
    "track.gifs": 0,
    "threads": 1,
    "model.device": "cpu",
}


def episodes(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted((folder / "episodes").glob("*.jsonl")) for line in path.open()]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"algorithm": "remax"}, marks=pytest.mark.slow),
        {"rollout.group_filter": "varied", "rollout.spare_groups": 2},
    ],
)
def test_a_replayed_run_trains_on_the_recorded_episodes_and_gives_the_same_update(tmp_path, monkeypatch, more):
    tape = tmp_path / "tapes" / "rollouts.jsonl"
    arborl.run(**SMALL, **more, **{"rollout.record": tape, "output_dir": tmp_path / "played"})

    async def no_playing(self, *args):
        raise AssertionError("a replay plays nothing")

    monkeypatch.setattr(Rollout, "play", no_playing)
    arborl.run(**SMALL, **more, **{"rollout.replay": tape, "output_dir": tmp_path / "replayed"})
    assert episodes(tmp_path / "played") == episodes(tmp_path / "replayed")
    first, second = weights(tmp_path / "played"), weights(tmp_path / "replayed")
    assert set(first) == set(second)
    assert all((first[name] == second[name]).all() for name in first)
    assert any(row["learner/grad_norm"] > 0 for row in read_metrics(tmp_path / "played" / "metrics.jsonl"))


def test_a_replay_with_another_seed_is_refused_by_what_to_write(tmp_path):
    tape = tmp_path / "rollouts.jsonl"
    asyncio.run(RolloutRecorder(tape).batch(7, [Task("a")], played("a")))
    with pytest.raises(ConfigError, match=r"holds 1 batches and not this one.*Write the seed"):
        asyncio.run(RolloutReplay(tape).batch(8, [Task("a")], played("a")))


def played(*names: str, reward: float = 1.0):
    async def play() -> list[Group]:
        return [
            Group(
                Task(name),
                [
                    Episode(
                        f"{name}#0",
                        Task(name),
                        opening=(Message("user", "hi"),),
                        turns=[Turn(Message("assistant", "yes"), reward=reward)],
                        calls=[Call((1, 2), Completion((3,), (-0.1,), FinishReason.STOP), 0)],
                    )
                ],
            )
            for name in names
        ]

    return play


def tasks(*names: str) -> list[Task]:
    return [Task(name) for name in names]


def test_groups_come_back_as_they_were_with_empty_groups_and_empty_batches(tmp_path):
    tape = tmp_path / "rollouts.jsonl"
    record = RolloutRecorder(tape)

    async def nothing() -> list[Group]:
        return []

    async def no_one() -> list[Group]:
        return [Group(Task("a"), [])]

    groups = asyncio.run(record.batch(1, tasks("a", "b"), played("a", "b")))
    asyncio.run(record.batch(2, tasks("a"), nothing))
    asyncio.run(record.batch(3, tasks("a"), no_one))
    replay = RolloutReplay(tape)
    assert asyncio.run(replay.batch(1, tasks("a", "b", "c"), nothing)) == groups
    assert asyncio.run(replay.batch(2, tasks("a"), played("a"))) == []
    assert asyncio.run(replay.batch(3, tasks("a"), played("a"))) == [Group(Task("a"), [])]


def test_a_batch_written_again_counts_as_written_last_and_a_torn_one_not_at_all(tmp_path):
    tape = tmp_path / "rollouts.jsonl"
    record = RolloutRecorder(tape)
    asyncio.run(record.batch(1, tasks("a", "b"), played("a", "b", reward=1.0)))
    asyncio.run(record.batch(1, tasks("a", "b"), played("a", "b", reward=2.0)))
    asyncio.run(record.batch(2, tasks("a", "b"), played("a", "b")))
    tape.write_bytes(tape.read_bytes()[:-20])
    replay = RolloutReplay(tape)
    groups = asyncio.run(replay.batch(1, tasks("a", "b"), played()))
    assert [group.episodes[0].turns[0].reward for group in groups] == [2.0, 2.0]
    assert list(replay.batches) == [1]


def test_other_tasks_than_recorded_are_refused(tmp_path):
    tape = tmp_path / "rollouts.jsonl"
    asyncio.run(RolloutRecorder(tape).batch(1, tasks("a"), played("a")))
    with pytest.raises(ConfigError, match=r"recorded with other tasks \(a, …\) than this run has \(x, …\)"):
        asyncio.run(RolloutReplay(tape).batch(1, tasks("x"), played("x")))


def test_a_file_that_is_no_recording_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        RolloutReplay(tmp_path / "nowhere.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "6*7?"}\n')
    with pytest.raises(ConfigError, match="is not a recording"):
        RolloutReplay(other)
