"""Plain functions as rewards: one that blocks holds up neither the event loop nor another reward."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest

import arborl
from arborl.rewards import Rewards, reward, threaded_calls
from arborl.rewards.efficiency import Efficient
from arborl.rewards.score_function import ScoreFunction
from arborl.rewards.text.library_rewards import HelpfulnessReward
from arborl.rewards.text.text_reward import reward_function
from arborl.tools.core import background_threads
from arborl.track.jsonl import read_metrics
from arborl.types import Episode, Group, Message, Task, Turn

LONG = 60.0
"""Seconds that no test waits for."""


def group(count=2, **fields):
    task = Task("t", fields=fields, messages=(Message("user", "What is it?"),))
    talk = [Turn(Message("assistant", "It is 42, as I have said before."))]
    return Group(task, [Episode(f"e{i}", task, turns=talk) for i in range(count)])


def score(one, *rewards, seconds=LONG):
    asyncio.run(Rewards(rewards, seconds).score([one]))
    return one.episodes


@pytest.fixture
def released():
    """Set when the test is over, so that no thread is left hanging."""
    event = threading.Event()
    yield event
    event.set()


def test_one_that_blocks_costs_its_episode_within_the_deadline_and_is_named(released):
    def judge(episode):
        if episode.id == "e0":
            released.wait(LONG)
        return 1.0

    bad, good = score(group(), ("judge", judge, 1.0), seconds=0.3)
    assert str(bad.failure) == "reward 'judge': timeout: took longer than 0.3 s"
    assert good.reward == 1.0


def test_the_event_loop_and_other_rewards_go_on_meanwhile(released):
    async def measure(episode):
        released.set()  # only now the other one comes back
        return 0.5

    def judge(episode):
        assert released.wait(LONG)
        return 1.0

    (one,) = score(group(1), ("judge", judge, 1.0), ("measure", measure, 1.0))
    assert one.rewards == {"judge": 1.0, "measure": 0.5}


@pytest.mark.parametrize("count", [1, 2, 64])
def test_so_many_wait_at_the_same_time(count):
    meeting = threading.Barrier(count, timeout=LONG)

    def judge(episode):
        meeting.wait()
        return 1.0

    assert [one.reward for one in score(group(count), ("judge", judge, 1.0))] == [1.0] * count


def test_those_that_compute_run_few_at_a_time_so_that_none_uses_up_the_time_of_others():
    running, most, lock = 0, 0, threading.Lock()

    def sums(episode):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        with lock:
            running -= 1
        return 1.0

    assert [one.reward for one in score(group(100), ("sums", sums, 1.0))] == [1.0] * 100
    assert most <= 4 * threaded_calls.MIN_CONCURRENCY  # 8, unless a check found the machine busy with something else


def test_what_hangs_every_time_is_bounded_and_stated(released, monkeypatch, caplog):
    monkeypatch.setattr(background_threads, "MAX_HANGING_CALLS", 3)

    def judge(episode):
        released.wait(LONG)
        return 1.0

    rewards = Rewards([("judge", judge, 1.0)], 0.2)
    for _ in range(2):
        asyncio.run(rewards.score([group(4)]))
    last = group(4)
    asyncio.run(rewards.score([last]))
    assert all("3 calls of reward 'judge' hang in threads" in one.failure.message for one in last.episodes)
    output = [one.message for one in caplog.records if "3 calls of reward 'judge' hang" in one.message]
    assert len(output) == 2  # that no more are begun, and the first episode that failed of it
    assert rewards.metrics()["rewards/calls_stuck"] >= 4
    released.set()
    while background_threads.abandoned_calls.hanging()["reward 'judge'"]:
        time.sleep(0.01)
    again = group(1)
    asyncio.run(rewards.score([again]))
    assert again.episodes[0].reward == 1.0


def test_an_exception_and_a_sys_exit_cost_the_episode_and_keep_its_traceback():
    def judge(episode):
        if episode.id == "e0":
            raise ValueError("no verdict")
        raise SystemExit("gone")

    first, second = score(group(), ("judge", judge, 1.0))
    assert str(first.failure) == "reward 'judge': ValueError: no verdict"
    assert 'raise ValueError("no verdict")' in first.failure.traceback
    assert "SystemExit: gone" in str(second.failure)


def test_it_sees_the_context_of_the_run():
    variable = contextvars.ContextVar("variable", default=0)

    def seen(episode):
        return variable.get()

    variable.set(7)
    assert score(group(1), ("seen", seen, 1.0))[0].reward == 7.0


def test_what_it_returns_may_be_awaited_and_it_may_run_a_loop_of_its_own():
    async def later(value):
        await asyncio.sleep(0)
        return value

    def returns(episode):
        return later(0.25)

    def runs(episode):
        return asyncio.run(later(0.5))

    (one,) = score(group(1), ("returns", returns, 1.0), ("runs", runs, 1.0))
    assert one.rewards == {"returns": 0.25, "runs": 0.5}


def test_one_that_does_not_block_may_say_so_and_runs_in_the_event_loop():
    @reward(blocking=False)
    def where(episode):
        return float(threading.current_thread() is threading.main_thread())

    @reward
    def elsewhere(episode):
        return float(threading.current_thread() is threading.main_thread())

    (one,) = score(group(1), ("where", where, 1.0), ("elsewhere", elsewhere, 1.0))
    assert one.rewards == {"where": 1.0, "elsewhere": 0.0}


def test_a_timeout_by_signals_is_reported_where_it_works():
    import signal

    def judge(episode):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    (one,) = score(group(1), ("judge", judge, 1.0))
    assert "blocking=False" in str(one.failure)


class Plain:
    """A class whose instances are called plainly."""

    def __call__(self, episode):
        return float(threading.current_thread() is not threading.main_thread())


def blocks(*_, **__):
    """1.0 beside the event loop, an error in it."""
    assert threading.current_thread() is not threading.main_thread()
    return 1.0


@pytest.mark.parametrize(
    "one",
    [
        Plain(),
        ScoreFunction(blocks),
        reward_function(blocks),
        HelpfulnessReward(judge=lambda prompt: rf"\boxed{{{10 * blocks():g}}}"),
        Efficient(base=reward(lambda episode: blocks())),
        Efficient(base=Plain()),
    ],
    ids=["class", "score_function", "reward_function", "judge", "base", "base class"],
)
def test_wherever_a_plain_function_is_given_it_runs_in_a_thread(one):
    episodes = score(group(2, answer="42"), ("one", one, 1.0))
    assert [(str(episode.failure), episode.reward) for episode in episodes] == [("None", 1.0)] * 2


def test_a_comparison_of_a_group_that_blocks_costs_the_group_within_the_deadline(released):
    class Compared:
        async def __call__(self, episode):
            return 1.0

        def across(self, episodes, values):
            released.wait(LONG)
            return values

    episodes = score(group(2), ("compared", Compared(), 1.0), seconds=0.3)
    assert {str(one.failure) for one in episodes} == {"reward 'compared': timeout: took longer than 0.3 s"}


def test_slots_are_given_back_by_who_is_cancelled_while_waiting_and_while_running(released, monkeypatch):
    monkeypatch.setattr(threaded_calls, "MIN_CONCURRENCY", 1)
    monkeypatch.setattr(threaded_calls, "MAX_CONCURRENCY", 1)

    async def main():
        first = asyncio.create_task(threaded_calls.call(released.wait, LONG))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(threaded_calls.call(lambda: 1)) for _ in range(3)]
        await asyncio.sleep(0.05)
        others[0].cancel()
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.wait([first, *others])
        return [task.cancelled() or task.result() for task in (first, *others)]

    assert asyncio.run(main()) == [True, True, 1, 1]


def test_its_time_is_booked_as_reward_time(tmp_path):
    def slow(episode):
        time.sleep(0.3)
        return float(episode.id[-1] == "0")

    done = arborl.run(
        data=[{"question": "What?"}] * 2, rewards=[slow], steps=1, output_dir=tmp_path / "run", engine="scripted",
        **{"rollout.group_size": 2, "rollout.tasks_per_step": 2, "evaluation.tasks": 0, "track.tensorboard": False},
    )  # fmt: skip
    (row,) = [row for row in read_metrics(done.folder / "metrics.jsonl") if "time/rewards" in row]
    assert 0.3 <= row["time/rewards"] <= row["time/step"]
    assert row["rewards/calls_stuck"] == 0


def test_plain_rewards_of_one_episode_wait_at_the_same_time():
    meeting = threading.Barrier(2, timeout=LONG)

    def first(episode):
        meeting.wait()
        return 1.0

    def second(episode):
        meeting.wait()
        return 2.0

    (one,) = score(group(1), ("first", first, 1.0), ("second", second, 1.0))
    assert one.rewards == {"first": 1.0, "second": 2.0}
