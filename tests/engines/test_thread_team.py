"""Parts of one job that wait for each other each have a running thread, or the job has fewer parts."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from arborl.engines.local.cpu_runner import ThreadGroup


def meet(count: int):
    """Work whose parts all wait for each other."""
    barrier = threading.Barrier(count, timeout=60)
    return lambda part: barrier.wait()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 33, 64])
def test_all_parts_run_at_the_same_time(count):
    team = ThreadGroup("test")
    assert team.start(count) == count
    for _ in range(3):
        team.run(meet(count), count)


def test_a_team_grows_and_a_smaller_job_uses_some_of_it():
    team = ThreadGroup("test")
    for count in (2, 40, 3, 64, 1):
        assert team.start(count) == count
        team.run(meet(count), count)
    assert team.size == 64


def test_two_teams_run_at_the_same_time():
    teams = [ThreadGroup("one"), ThreadGroup("two")]
    together = threading.Barrier(16, timeout=60)

    def run(team):
        team.run(lambda part: together.wait(), team.start(8))

    callers = [threading.Thread(target=run, args=(team,)) for team in teams]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not together.broken


def test_an_error_in_a_part_is_raised_when_all_parts_are_done_and_the_team_goes_on():
    team, done = ThreadGroup("test"), []
    team.start(4)

    def work(part):
        if part == 2:
            raise ValueError("part 2")
        done.append(part)

    with pytest.raises(ValueError, match="part 2"):
        team.run(work, 4)
    assert sorted(done) == [0, 1, 3]
    team.run(meet(4), 4)


def test_more_parts_than_threads_are_refused():
    with pytest.raises(ValueError, match="2 parts and 1 threads"):
        ThreadGroup("test").run(meet(2), 2)


def test_a_forked_process_starts_threads_of_its_own():
    team = ThreadGroup("test")
    team.run(meet(4), team.start(4))
    child = os.fork()
    if child == 0:
        team.run(meet(4), team.start(4))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_threads_end_with_the_team():
    team = ThreadGroup("ending")
    team.run(meet(5), team.start(5))
    del team
    gc.collect()
    for _ in range(1000):
        if not any(thread.name.startswith("ending") for thread in threading.enumerate()):
            return
        time.sleep(0.02)
    raise AssertionError("threads are left")
