"""A process that computes rewards: its plain rewards run in threads, and those that hang are counted."""

from __future__ import annotations

import asyncio
import threading

import pytest

from arborl.cluster.placement.ray_rewards import RewardActor
from arborl.errors import EpisodeError
from arborl.types import Episode, Task

cloudpickle = pytest.importorskip("ray").cloudpickle
MEETING = threading.Barrier(12, timeout=60)
RELEASED = threading.Event()


class Meets:
    def __call__(self, episode):
        MEETING.wait()
        return 1.0


class Hangs:
    def __call__(self, episode):
        RELEASED.wait(60)


def leaves(episode):
    raise SystemExit("gone")


def host(*rewards) -> RewardActor:
    return RewardActor([], False, cloudpickle.dumps(list(rewards)))


def ask(*rewards, count=1):
    made = host(*rewards)

    async def main():
        results = await asyncio.gather(*(made.score(0, Episode(f"e{i}", Task("t"))) for i in range(count)))
        return results, await made.left_behind()

    return asyncio.run(main())


def test_plain_rewards_wait_at_the_same_time():
    results, hang = ask(("meets", Meets(), 60.0), count=12)
    assert [value for value, _, _ in results] == [1.0] * 12
    assert hang == 0


def test_one_that_hangs_is_a_timeout_and_is_counted():
    try:
        results, hang = ask(("hangs", Hangs(), 0.2), count=3)
    finally:
        RELEASED.set()
    assert [repr(error) for _, error, _ in results] == ["TimeoutError('took longer than 0.2 s')"] * 3
    assert hang == 3


def test_what_is_raised_is_sent_and_a_sys_exit_does_not_end_the_process():
    ((_, error, _),), _ = ask(("leaves", leaves, 5.0))
    assert "SystemExit: gone" in str(error)


def test_a_failure_that_was_attributed_is_the_same_in_another_process():
    sent = cloudpickle.loads(cloudpickle.dumps(EpisodeError("reward 'judge'", TimeoutError("late"))))
    assert (sent.where, sent.kind, str(sent)) == ("reward 'judge'", "timeout", "reward 'judge': TimeoutError: late")
