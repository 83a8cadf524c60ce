"""Groups played ahead of their updates: none trained too old, none twice, and no one lost, who is late or fails."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.data.task_source import EnvTasks
from arborl.rollout.accounting import TRAINED, EpisodeAccounting, episode_key, failure_reason
from arborl.rollout.groups import GroupCollector, GroupOptions
from arborl.rollout.pipeline import Pipeline
from arborl.seeds import generator
from arborl.types import Call, Completion, Episode, Failure, FinishReason, Group


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to whatever comes next."""

    def __init__(self):
        super().__init__(Jumping(self))
        self.now = 0.0

    def time(self):
        return self.now


class Jumping(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def select(self, timeout=None):
        self.loop.now += timeout or 0.0
        return super().select(0)


class World:
    """A rollout whose episodes are a few sampled tokens with pauses between them, each stamped by a fake engine.

    Args:
        seed: decides who is slow, who fails, and which groups a filter drops.
        slow: the longest pauses, in steps of the learner.
        behind: how many versions the engine may be behind the learner.
    """

    turns = 1, 4

    def __init__(self, seed: int, slow: float = 3.0, fails: float = 0.1, filtered: float = 0.0, redundancy: int = 0):
        self.rng, self.slow, self.fails, self.filtered = generator(seed, "world"), slow, fails, filtered
        self.version, self.behind = 0, 0
        self.counts, self.dropped_failures, self.accounting = Counter(), [], EpisodeAccounting()
        self.begun, self.finished, self.cancelled = [], [], []
        self.num_started = 0
        self.options = GroupOptions(redundancy, keep=self.keep if filtered else None)

    def keep(self, group: Group) -> bool:
        return bool(self.rng.random() >= self.filtered)

    def is_whole_batch(self, tasks):
        return False

    async def probe_envs(self, tasks):
        pass

    def running(self):
        return nullcontext()

    def collector(self):
        return GroupCollector(self.play, self.options, self.counts, self.dropped_failures, accounting=self.accounting)

    async def play(self, task, seed, name, begin):
        begin()
        self.num_started += 1
        self.begun.append(name)
        episode = Episode(name, task, seed)
        try:
            for turn in range(int(self.rng.integers(*self.turns))):
                stamps = []
                for _ in range(2):  # a completion may straddle an update
                    stamps.append(max(self.version - self.behind, 0))
                    await asyncio.sleep(self.pause())
                output = Completion((1, 2), (-1.0, -1.0), FinishReason.STOP, stamps[1], versions=tuple(stamps))
                episode.calls.append(Call((0,), output, turn))
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if self.rng.random() < self.fails:
            episode.failure = Failure("tool", "timeout", "late")
        self.finished.append(name)
        return episode

    def pause(self) -> float:
        return float(self.rng.exponential(self.slow / 4) if self.rng.random() < 0.9 else self.slow)


class Run:
    """A learner that takes its time, killed and resumed now and then."""

    def __init__(self, world, max_lag, last=6, count=3, size=2, spares=0, kills=()):
        self.world, self.last, self.kills, self.max_lag = world, last, kills, max_lag
        self.sizes = (size, count, spares, max_lag)
        self.pipeline = self.make()
        self.trained: list[Group] = []
        self.lost = 0
        self.lags: list[int] = []

    def make(self):
        return Pipeline(self.world, EnvTasks("lake", 0), 0, self.last, *self.sizes)

    async def go(self):
        for step in range(self.last):
            if step in self.kills:  # after some playing, so that much is in flight
                await self.pipeline.begin(step)
                await asyncio.sleep(0.5)
                await self.kill(step)
            groups = await self.pipeline.take(step)
            await asyncio.sleep(1.0)
            self.trained += groups
            calls = [call for group in groups for episode in group.valid_episodes for call in episode.calls]
            self.lags += [step - version for call in calls for version in call.completion.versions]
            self.settle(groups)
            self.world.version = step + 1
        await self.pipeline.close()
        self.world.accounting.end_run()

    def settle(self, groups):
        """What the trainer does at the end of a step."""
        accounting = self.world.accounting
        episodes = [episode for group in groups for episode in group.episodes]
        accounting.settle(
            {episode_key(one): failure_reason(one.failure) if one.failure else TRAINED for one in episodes}, {}
        )
        self.pipeline.trained()
        accounting.check(self.pipeline.open_places())

    async def kill(self, step):
        """What was started since the last step is forgotten; what was pending then is dropped."""
        await self.pipeline.close()
        state = json.loads(json.dumps([self.pipeline.state(), self.world.accounting.state()]))
        self.pipeline, self.world.accounting = self.make(), EpisodeAccounting()
        self.pipeline.load_state(state[0], step)
        self.lost += self.world.num_started - state[1]["started"]
        self.world.num_started = state[1]["started"]
        self.world.accounting.load_state(state[1])

    def play(self):
        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(asyncio.wait_for(self.go(), 10_000))
        return self


@given(
    seed=st.integers(0, 10_000), max_lag=st.integers(0, 3), slow=st.sampled_from([0.1, 1.0, 6.0]),
    redundancy=st.integers(0, 1), kills=st.sets(st.integers(1, 5), max_size=2), filtered=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_no_trained_token_is_too_old_and_every_episode_is_trained_once_dropped_or_pending(
    seed, max_lag, slow, redundancy, kills, filtered
):
    world = World(seed, slow, filtered=filtered, redundancy=redundancy)
    run = Run(world, max_lag, spares=2 if filtered else 0, kills=kills).play()
    assert max(run.lags, default=0) <= max_lag
    tasks = [group.task.id for group in run.trained]
    assert len(set(tasks)) == len(tasks)  # nothing is trained twice
    episodes = [episode.id for group in run.trained for episode in group.episodes]
    assert len(set(episodes)) == len(episodes)
    assert set(episodes) <= set(world.finished)
    if not filtered:  # then every task of every batch is trained, however slow
        wanted = [task.id for step in range(run.last) for task in EnvTasks("lake", 0).take(step, 3)]
        assert sorted(tasks) == sorted(wanted)
    account = world.accounting
    valid = sum(len(group.valid_episodes) for group in run.trained)
    assert account.trained == valid
    assert account.started == world.num_started == valid + account.dropped.total()
    assert account.started + run.lost == len(world.begun)
    assert account.dropped["run_ended"] == 0  # an async run ends without open groups too
    assert account.dropped["stale"] <= world.counts["stale"]  # failed ones among them count as failed
    assert (account.dropped["restarted"] > 0) <= bool(kills and max_lag)
    if not kills:
        counted = len(episodes) + world.counts["cancelled"] + world.counts["stale"]
        counted += world.counts["filtered_episodes"]
        assert len(world.begun) == counted
        assert not run.pipeline.slots
    assert len(world.finished) + len(world.cancelled) == len(world.begun)


def test_without_lag_every_update_has_its_own_batch_in_its_own_order():
    run = Run(World(3, slow=6.0), 0).play()
    wanted = [task.id for step in range(run.last) for task in EnvTasks("lake", 0).take(step, 3)]
    assert [group.task.id for group in run.trained] == wanted
    assert set(run.lags) == {0}
    assert run.world.counts["stale"] == 0


def seconds(world, max_lag, **sizes) -> tuple[Run, float]:
    """A run, and how long it took by its own clock."""
    run = Run(world, max_lag, **sizes)

    async def timed():
        await run.go()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return run, runner.run(timed())


def test_learning_does_not_wait_for_the_slowest_and_none_is_left_out_for_being_slow():
    (_, alone), (ahead, one) = (seconds(World(5, slow=8.0, fails=0.0), lag, last=12, count=4) for lag in (0, 1))
    assert one < 0.75 * alone
    assert len(ahead.trained) == 48
    assert max(ahead.lags) == 1


class LateTools(World):
    """Two calls an episode of a tool that takes half a second at the median, and eight once in a hundred."""

    turns = 1, 2

    def pause(self) -> float:
        return 0.5 * float(np.exp(np.log(16) / 2.3263 * self.rng.standard_normal()))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_late_tools_a_learner_of_one_second_makes_more_than_twice_as_many_updates_with_a_lag_of_one(seed):
    (_, alone), (_, one) = (seconds(LateTools(seed, fails=0.0), lag, last=10, count=16, size=8) for lag in (0, 1))
    assert alone > 2 * one


def test_a_group_that_is_begun_again_has_an_episode_more_than_it_needs_and_the_slowest_is_not_waited_for():
    world = World(5, slow=8.0, fails=0.0)
    run = Run(world, 1, last=12, count=4).play()
    again = {name.split("#")[0] for name in world.begun if "+" in name}
    assert again
    assert {name.split("#")[1] for name in world.begun if "+1" in name} == {"0+1", "1+1", "2+1"}
    assert all(len(group.episodes) == 2 for group in run.trained)
    assert world.counts["cancelled"] > 0


def test_groups_of_an_engine_whose_weights_are_behind_are_played_again():
    world = World(1, slow=0.1, fails=0.0)
    run = Run(world, 1, last=3)

    async def behind():
        await run.pipeline.begin(0)
        world.version = world.behind = 3  # says 0 from here on, whatever it was given
        await asyncio.sleep(1)
        run.pipeline.version = 2
        job = asyncio.ensure_future(run.pipeline.take(2))
        await asyncio.sleep(2)
        assert not job.done()
        assert world.counts["stale"] > 0
        world.behind = 0
        groups = await job
        assert all(
            call.completion.oldest >= 1
            for group in groups
            for episode in group.valid_episodes
            for call in episode.calls
        )
        await run.pipeline.close()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(behind())


def test_the_time_of_a_group_goes_on_over_updates_and_ends_it_with_who_has_finished():
    world = World(2, slow=30.0, fails=0.0)
    world.options = GroupOptions(seconds=2.5)
    run = Run(world, 3, last=4).play()
    assert world.counts["expired"] > 0
    assert max(run.lags, default=0) <= 3
    assert len(run.trained) == 12


def test_tasks_that_json_cannot_hold_are_remembered_as_the_nearest_it_can():
    class Odd(EnvTasks):
        def take(self, step, count):
            return [replace(task, fields={"path": Path("x"), "n": np.int64(3)}) for task in super().take(step, count)]

    run = Run(World(4, slow=0.2), 1)
    run.pipeline.source = Odd("lake", 0)

    async def half():
        await run.pipeline.take(0)
        run.pipeline.trained()
        await run.pipeline.take(1)
        await run.pipeline.close()
        return json.loads(json.dumps(run.pipeline.state()))

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        state = runner.run(half())
    fields = [task["fields"] for row in state["left"] for task in row["tasks"].values()]
    assert fields
    assert all(field == {"path": "x", "n": 3} for field in fields)


def test_a_defect_in_play_ends_the_run_with_its_name():
    world = World(1)

    async def broken(task, seed, name, begin):
        raise AssertionError("a defect")

    world.play = broken
    with pytest.raises(AssertionError, match="a defect"):
        Run(world, 1).play()
