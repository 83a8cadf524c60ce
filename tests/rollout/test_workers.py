"""Environments that block, hang or crash cost themselves and no one else, wherever they run."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cases import slow_cases
from rollout_worlds import Allowed, Declared, Isolated, Promising, Secretive, Sync

from arborl import sandbox
from arborl.agents.chat_agents import ChatAgent
from arborl.engines.scripted import ScriptedEngine
from arborl.envs.games.countdown import Countdown
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.envs.wrapper import is_blocking
from arborl.rollout import deadlines
from arborl.rollout.env_processes import LocalEnvProcess, ProcessEnv, ProcessPool
from arborl.rollout.env_threads import ThreadPool
from arborl.rollout.env_workers import Workers
from arborl.rollout.episode_store import episode_to_json
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.tools.core import background_threads
from arborl.types import Message, Sampling, StopReason, Task


def rollout(seedling, env, workers="auto", per_process=0, concurrency=64, **limits) -> Rollout:
    renderer = seedling[1]
    replies = [[*renderer.tokenizer.encode(text), renderer.stop[0]] for text in ("yes", "no", "<answer>Up</answer>")]
    episode_factories = EpisodeFactories(agent=lambda task: ChatAgent(), env=lambda task: env())
    limits = {"step_seconds": 20.0, "episode_seconds": 60.0} | limits
    engine, where = ScriptedEngine(replies), Workers(workers, per_process)
    return Rollout(engine, renderer, episode_factories, Sampling(8), EpisodeLimits(**limits), concurrency, where)


def play(run: Rollout, *names: str, size: int = 1):
    try:
        groups = asyncio.run(run.collect([Task(name, env="world") for name in names], seed=0, group_size=size))
    finally:
        run.close()
    return [episode for group in groups for episode in group.episodes]


def test_only_environments_that_may_block_are_put_into_threads():
    assert is_blocking(Sync())
    assert is_blocking(Declared())
    assert is_blocking(Secretive())
    assert not is_blocking(Promising())
    assert not is_blocking(FrozenLake())


def test_environments_that_ask_for_a_process_get_one_and_a_crash_costs_one_episode(seedling):
    run = rollout(seedling, Isolated, concurrency=2)
    whole, crashed = play(run, "fine", "exit")
    assert (whole.failure, run.workers.metrics()["rollout/processes_replaced"] >= 1) == (None, True)
    assert "environment" in str(crashed.failure)


def test_the_word_of_a_class_does_not_hold_for_calls_that_a_subclass_overrides():
    class Slow(FrozenLake):
        async def step(self, action):
            time.sleep(1)
            return await super().step(action)

    class Painted(FrozenLake):
        def picture(self):
            return None

    class Sure(Slow):
        blocking = False

    assert is_blocking(Slow())
    assert not is_blocking(Painted())
    assert not is_blocking(Sure())
    one = Sure()
    one.blocking = True
    assert is_blocking(one)


@pytest.mark.parametrize("world", [Sync, Declared, Secretive])
def test_a_step_that_sleeps_holds_no_one_up(seedling, world):
    run = rollout(seedling, world)
    began = time.perf_counter()
    episodes = play(run, *["sleep:2"] * 10)
    assert time.perf_counter() - began < 10  # one after the other they would take 20 s
    assert all(episode.failure is None and len(episode.turns) == 3 for episode in episodes)


def test_an_environment_is_called_in_one_thread_from_beginning_to_end_which_is_not_the_event_loops(seedling):
    for episode in play(rollout(seedling, Sync), *"abcdef"):
        assert episode.metrics["threads"] == 1.0
    here = threading.get_ident()
    seen = []

    class Telling(Sync):
        def close(self):
            seen.append(threading.get_ident())

    play(rollout(seedling, Telling), "a")
    assert seen
    assert here not in seen


async def test_results_of_threads_that_arrive_together_wake_the_event_loop_once(monkeypatch):
    pool = ThreadPool()
    results, thread, woken = pool.results(), pool.take(), []
    monkeypatch.setattr(results.loop, "call_soon_threadsafe", lambda function: woken.append(function))
    outcomes = [results.submit(thread, lambda number=number: number) for number in range(16)]
    cancelled, failed = outcomes[3], results.submit(thread, lambda: 1 / 0)
    cancelled.cancel()
    while len(results.arrived) < 17:
        await asyncio.sleep(0.001)
    (deliver,) = woken
    deliver()
    assert [outcome.result() for outcome in outcomes if outcome is not cancelled] == [0, 1, 2, *range(4, 16)]
    assert isinstance(failed.exception(), ZeroDivisionError)
    last = results.submit(thread, lambda: 17)
    while not results.arrived:
        await asyncio.sleep(0.001)
    woken[1]()
    assert (last.result(), len(woken)) == (17, 2)


@pytest.mark.parametrize(
    ("workers", "world"),
    [("thread", Sync), ("thread", Secretive), ("process", Secretive), *slow_cases(("process", Sync))],
)
def test_a_hung_step_costs_its_episode_alone_and_is_counted(seedling, workers, world):
    run = rollout(seedling, world, workers, step_seconds=1.0)
    began = time.perf_counter()
    groups = asyncio.run(run.collect([Task(n, env="world") for n in ("a", "sleep:90", "b", "c")], 0, 2))
    took = time.perf_counter() - began
    counted = Counter(run.metrics())
    while workers == "process" and not counted["rollout/processes_replaced"] and time.perf_counter() - began < 60:
        time.sleep(0.05)  # who is overdue is looked for ten times a second
        counted += Counter(run.metrics())
    run.close()
    good = [episode for group in groups for episode in group.episodes if group.task.id != "sleep:90"]
    assert all(episode.failure is None and len(episode.turns) == 3 for episode in good)
    for episode in groups[1].episodes:
        assert episode.stop is StopReason.TIMEOUT
        assert episode.failure.where == "environment 'world'"
        assert "longer than 1 s" in episode.failure.message
    assert took < 60
    if workers == "thread":
        assert counted["rollout/threads_abandoned"] == 2.0
        assert counted["rollout/threads_stuck"] == 2.0
    else:
        assert counted["rollout/processes_replaced"] == counted["rollout/processes_hung"] >= 1.0


def test_a_thread_that_comes_back_after_all_closes_its_environment_and_ends(seedling):
    closed = []

    class Late(Sync):
        def close(self):
            closed.append(self.turns)

    run = rollout(seedling, Late, step_seconds=0.2)
    play(run, "sleep:0.6")
    assert closed == []
    deadline = time.monotonic() + 40
    while run.workers.threads.left.calls and time.monotonic() < deadline:
        time.sleep(0.05)
    assert closed == [2]
    assert not run.workers.threads.left.calls


def test_the_episodes_deadline_holds_for_blocking_code_too(seedling):
    (episode,) = play(rollout(seedling, Sync, step_seconds=20.0, episode_seconds=0.3), "sleep:2")
    assert episode.stop is StopReason.TIMEOUT
    assert episode.failure.where == "environment 'world'"
    assert "episode took longer than 0.3 s" in episode.failure.message


@pytest.mark.parametrize("workers", ["auto", "thread", "process", "none"])
def test_what_an_environment_raises_is_reported_by_its_own_name(seedling, workers):
    bad, good = play(rollout(seedling, Sync, workers), "raise", "a")
    assert (bad.failure.kind, bad.failure.message) == ("ZeroDivisionError", "the ice broke")
    assert "trouble" in bad.failure.traceback
    assert good.failure is None


def test_a_crash_costs_the_one_that_crashed_and_its_neighbours_go_on_elsewhere(seedling):
    run = rollout(seedling, Sync, "process", per_process=8)
    *good, bad = play(run, "sleep:0.3", "sleep:0.3", "a", "exit")
    assert bad.failure.where == "environment 'world'"
    assert "exit code 7" in bad.failure.message
    for episode in good:
        assert episode.failure is None
        assert [turn.observation[0].content.split()[1] for turn in episode.turns] == ["1", "2", "3"]


def test_a_killed_process_costs_its_neighbours_nothing(seedling):
    """Both live in one process; the neighbour is brought to where it was in another one."""
    run = rollout(seedling, lambda: Sync(length=40), "process", per_process=8, step_seconds=1.0, max_turns=64)

    class Slowly(ChatAgent):
        async def run(self, task, env, model):
            await env.reset(task, 0)
            while not (await env.step(Message("assistant", "on"))).over:
                await asyncio.sleep(0.06)

    run.factories = EpisodeFactories(lambda task: Slowly(), run.factories.env)
    good, bad = play(run, "a", "sleep:60")
    assert bad.stop is StopReason.TIMEOUT
    assert good.failure is None
    output = [turn.observation[0].content.split() for turn in good.turns]
    assert [int(words[1]) for words in output] == list(range(1, 41))
    assert len({words[0] for words in output}) == 2  # it began in one process and ended in another


@pytest.mark.parametrize("workers", ["auto", "thread", "process", "none"])
def test_where_environments_run_changes_no_episode(seedling, workers):

    def episodes(where: str) -> list[dict]:
        run = rollout(seedling, lambda: FrozenLake(slippery=True, size=6), where, concurrency=5)
        tasks = [Task(f"t{i}", env="frozen_lake", seed=i, fields={"split": "train"}) for i in range(3)]
        groups = asyncio.run(run.collect(tasks, seed=5, group_size=3))
        run.close()
        rows = [episode_to_json(episode) for group in groups for episode in group.episodes]
        for row in rows:
            del row["seconds"]
        return rows

    assert episodes(workers) == episodes("none")


async def test_an_agent_may_ask_a_remote_environment_everything_it_may_ask_a_near_one():
    async def look(env) -> list:
        await env.reset(Task("t", seed=3, fields={"split": "train"}), 0)
        rng = np.random.default_rng(0)
        drawn = [env.random(rng) for _ in range(2)]
        kept = env.snapshot()
        step = await env.step(Message("assistant", env.oracle()))
        reported = [env.state_key(), env.render(), env.actions(), env.metrics(), env.picture() is not None]
        env.restore(kept)
        back = env.state_key()
        await env.close()
        return [drawn, rng.integers(1000), step, reported, back, env.metrics()]

    pool = ProcessPool()
    remote = ProcessEnv(Countdown(), pool, "countdown", 20.0)
    found = await look(remote)
    pool.close()
    near, far = await look(Countdown()), found
    assert near == far


def test_what_the_sandbox_is_allowed_here_it_is_allowed_in_the_processes_too():
    async def ask() -> str:
        env = ProcessEnv(Allowed(), pool, "environment", 30.0)
        await env.open()
        return env.render()

    pool = ProcessPool()
    try:
        sandbox.allow_unsafe(True)
        assert asyncio.run(ask()) == "True"
    finally:
        sandbox.allow_unsafe(False)
        pool.close()


def test_an_environment_that_cannot_be_sent_says_what_to_write_instead(seedling):

    class Local(Sync):
        pass

    (episode,) = play(rollout(seedling, Local, "process"), "a")
    assert "cannot be sent to a process" in episode.failure.message
    assert "rollout.workers=thread" in episode.failure.message


@pytest.mark.parametrize("workers", ["auto", "thread", "process", "none"])
def test_a_step_that_takes_too_long_has_failed_wherever_it_runs(seedling, workers):
    """So that a success measured in the loop can be compared with one measured in threads."""
    late, good = play(rollout(seedling, Secretive, workers, step_seconds=1.0), "sleep:1.4", "a")
    assert late.stop is StopReason.TIMEOUT
    assert late.failure.where == "environment 'world'"
    assert "took longer than 1 s" in late.failure.message
    assert good.failure is None


def test_who_holds_the_event_loop_is_named_while_they_do(seedling, caplog, monkeypatch):
    monkeypatch.setattr(deadlines, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "BLOCKED_SECONDS", 0.2)
    monkeypatch.setattr(deadlines.EventLoopWatchdog, "reported", set())
    began = time.time()
    play(rollout(seedling, Promising, concurrency=1), "sleep:3", "sleep:0.5")
    (reported,) = [record for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert "environment 'world'" in reported.getMessage()
    assert "rollout_worlds.py, line " in reported.getMessage()
    assert "in trouble" in reported.getMessage()
    assert reported.created - began < 3.0  # not afterwards


def test_an_agent_that_holds_the_event_loop_is_named_too_and_an_engine_that_computes_is_not(
    seedling, caplog, monkeypatch
):
    monkeypatch.setattr(deadlines, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr(deadlines.EventLoopWatchdog, "reported", set())
    run = rollout(seedling, FrozenLake, max_turns=2)

    class Busy(ScriptedEngine):
        async def generate(self, prompt, sampling, *, session):
            time.sleep(0.3)
            return await super().generate(prompt, sampling, session=session)

    class Sleepy(ChatAgent):
        async def run(self, task, env, model):
            time.sleep(0.3)
            await super().run(task, env, model)

    run.engine = Busy([[1, seedling[1].stop[0]]])
    play(run, "a")
    assert "blocked the event loop" not in caplog.text
    run.factories = EpisodeFactories(lambda task: Sleepy(), run.factories.env)
    play(run, "a")
    assert "test_workers.py, line " in caplog.text


@pytest.mark.parametrize(
    ("workers", "world"),
    [
        *[("auto", Secretive), ("thread", Sync), ("process", Secretive), ("none", Sync)],
        *slow_cases(("auto", Sync), ("thread", Secretive), ("process", Sync), ("none", Secretive)),
    ],
)
def test_an_environment_that_ends_the_process_costs_its_episode(seedling, workers, world):
    bad, good = play(rollout(seedling, world, workers), "quit", "a")
    assert bad.failure.where == "environment 'world'"
    assert "enough" in bad.failure.message
    assert "SystemExit" in str(bad.failure)
    assert good.failure is None
    if workers != "none":  # in the loop it is the user's
        bad, good = play(rollout(seedling, world, workers), "interrupt", "a")
        assert "KeyboardInterrupt" in bad.failure.message
        assert good.failure is None


async def test_environments_that_hang_for_good_are_counted_by_name_and_no_more_are_begun_at_the_cap(
    seedling, caplog, monkeypatch
):
    monkeypatch.setattr(background_threads, "MAX_HANGING_CALLS", 3)
    run = rollout(seedling, Secretive, concurrency=3, step_seconds=0.2)
    first = await run.collect([Task("sleep:30", env="bad")] * 3, seed=0, group_size=1)
    tasks = [Task("sleep:30", env="bad") for _ in range(6)] + [Task(name, env="good") for name in "abc"]
    groups = first + await run.collect(tasks, seed=0, group_size=1)
    failures = [group.episodes[0].failure for group in groups]
    assert all("longer than" in failure.message for failure in failures[:3])
    assert all("3 calls of environment 'bad' hang" in failure.message for failure in failures[3:9])
    assert "rollout.workers=process" in failures[8].message
    assert failures[9:] == [None] * 3
    assert run.workers.threads.left.hanging() == {"environment 'bad'": 3}
    assert caplog.text.count("WARNING  arborl.tools.core.background_threads") == 1


async def test_cancelled_episodes_are_not_taken_for_hung_ones(monkeypatch):
    monkeypatch.setattr(background_threads, "MAX_HANGING_CALLS", 3)
    workers = Workers()
    envs = [(await workers.place(Sync, "world", 20.0))[0] for _ in range(5)]
    for env in envs:
        await env.reset(Task("sleep:0.4"), 0)
        await env.step(Message("assistant", "one"))
    jobs = [asyncio.ensure_future(env.step(Message("assistant", "two"))) for env in envs]
    await asyncio.sleep(0.05)
    for job, env in zip(jobs, envs, strict=True):
        job.cancel()
        await asyncio.wait([job])
        await env.close()
    assert len(workers.threads.left.calls) == 5
    await workers.place(Sync, "world", 20.0)


async def test_what_belongs_to_another_event_loop_says_what_to_write(seedling):

    class Shares(Secretive):
        async def reset(self, task, seed):
            await asyncio.wait_for(shared.wait(), 1)

    shared = asyncio.Event()
    waiting = asyncio.ensure_future(shared.wait())
    await asyncio.sleep(0)
    run = rollout(seedling, Shares)
    ((episode,),) = [group.episodes for group in await run.collect([Task("a", env="world")], 0, 1)]
    waiting.cancel()
    assert "write `blocking = False` in its class" in episode.failure.message


async def test_a_question_to_a_process_that_never_answers_ends_with_its_deadline():
    pool = ProcessPool()
    env = ProcessEnv(Secretive(), pool, "world", 1.0)
    await env.reset(Task("sleep:60"), 0)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"oracle\(\) took longer than 1 s"):
        env.oracle()
    assert time.monotonic() - began < 40
    pool.close()


def test_ctrl_c_is_heard_at_the_first_try_while_an_async_environment_blocks(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio, sys, time\n"
        "from rollout_worlds import Secretive\n"
        "from arborl.rollout.env_workers import Workers\n"
        "from arborl.types import Message, Task\n"
        "async def main():\n"
        "    env, _ = await Workers().place(Secretive, 'world', 60.0)\n"
        "    await env.reset(Task('sleep:60'), 0)\n"
        "    await env.step(Message('assistant', 'one'))\n"
        "    print('begun', flush=True)\n"
        "    await env.step(Message('assistant', 'two'))\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen(
        [sys.executable, tmp_path / "mine.py"], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs have off
    )  # fmt: skip
    assert child.stdout.readline() == b"begun\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(50) != 0


def test_the_number_of_environments_in_a_process_is_kept(seedling):
    run = rollout(seedling, Sync, "process", per_process=2)
    episodes = play(run, *["sleep:0.3"] * 5)
    homes = [episode.turns[0].observation[0].content.split()[0] for episode in episodes]
    assert sorted(homes.count(home) for home in set(homes)) == [1, 2, 2]


def test_an_environment_that_takes_long_to_make_holds_no_one_up_and_keeps_its_deadline(seedling):
    run = rollout(seedling, lambda: None, step_seconds=0.5)

    class Slow(Secretive):
        def __init__(self):
            super().__init__()
            time.sleep(30)

    run.factories = EpisodeFactories(run.factories.agent, lambda task: Slow() if task.id == "slow" else Secretive())
    began = time.monotonic()
    bad, good = play(run, "slow", "a")
    assert time.monotonic() - began < 20
    assert bad.failure.where == "environment 'world'"
    assert "took longer than 0.5 s" in bad.failure.message
    assert good.failure is None


def test_what_an_environment_opens_when_it_is_made_it_may_use_wherever_it_is_requested(seedling):

    class Database(Secretive):
        def __init__(self):
            super().__init__()
            self.base = sqlite3.connect(":memory:")

        def actions(self):
            return [str(row[0]) for row in self.base.execute("select 7")]

        async def step(self, action):
            self.base.execute("select 1")
            return await super().step(action)

    class Asking(ChatAgent):
        async def run(self, task, env, model):
            await env.reset(task, 0)
            while not (await env.step(Message("assistant", env.actions()[0]))).over:
                pass

    run = rollout(seedling, Database)
    run.factories = EpisodeFactories(lambda task: Asking(), run.factories.env)
    (episode,) = play(run, "a")
    assert episode.failure is None
    assert episode.turns[0].message.content == "7"


def test_what_failed_first_is_reported_and_not_what_closing_made_of_it(seedling):

    class Worse(Sync):
        def close(self):
            raise OSError("cannot even be closed")

    bad, late = play(rollout(seedling, Worse), "raise", "a")
    assert "the ice broke" in bad.failure.message
    assert "cannot even be closed" in late.failure.message


def test_garbage_is_collected_as_before_when_a_rollout_is_over(seedling):
    before = gc.get_threshold()
    play(rollout(seedling, Sync), "a", "raise")
    assert gc.get_threshold() == before


def test_processes_that_are_gone_before_they_are_ready_are_not_laid_to_their_environment():
    started = []

    class Remote(LocalEnvProcess):
        """On a node that is gone already, though no one has missed it yet; the fourth is elsewhere."""

        blames_envs = False

        def __init__(self, alone):
            super().__init__(alone)
            started.append(alone)
            if len(started) < 4:
                self.kill()

    pool = ProcessPool(most=1, start=Remote)
    env = ProcessEnv(FrozenLake(size=3), pool, "environment 'lake'", 30.0)
    seen = asyncio.run(env.reset(Task("a"), 0))
    pool.close()
    assert seen is not None
    assert started == [False] * 4
    assert (env.num_losses, env.num_crashes) == (3, 0)
