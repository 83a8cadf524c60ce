"""Every training episode that starts is trained once, dropped for a named reason, or pending; also over resumes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter

import pytest
from forked import Forked, forked
from small_runs import LAKE

from arborl.checkpoint import DamagedCheckpoint
from arborl.config.load_config import load
from arborl.diagnosis import examine_run
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.errors import RunStopped
from arborl.rollout.accounting import TRAINED, AccountingError, EpisodeAccounting
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.track.tracker import Trackers
from arborl.trainer.trainer import Trainer
from arborl.training_run import train
from arborl.training_run.build import build
from arborl.types import Episode, Failure, Group, Task

SMALL = [*LAKE, "evaluation.tasks=0", "trainer.save_every=1", "trainer.keep=20"]
PLAIN = [setting for setting in SMALL if "zero_variance" not in setting and "env.args" not in setting]


class Troubled(FrozenLake):
    """Some moves are slow, and each `fails`-th raises."""

    slow, fails, moves = 0.2, 20, itertools.count(1)

    async def step(self, action):
        await asyncio.sleep(self.slow * random.random() ** 6)
        if self.fails and next(self.moves) % self.fails == 0:
            raise ZeroDivisionError("the ice broke")
        return await super().step(action)


class Stop:
    """A hook that ends the run at a step."""

    def __init__(self, step: int):
        self.step = step

    async def after(self, trainer, groups, metrics):
        if trainer.step == self.step:
            raise RunStopped("enough")


class Play:
    """Counts the episodes that a rollout plays, by a way of its own."""

    def __init__(self, rollout):
        self.inner, self.names = rollout.play, Counter()
        rollout.play = self

    async def __call__(self, task, seed, name, sampling=None):
        self.names["greedy" if sampling else "training"] += 1
        return await self.inner(task, seed, name, sampling)


def config_of(folder, *settings):
    config = load(None, [*SMALL, *settings, f"output_dir={folder}"])
    return config.model_copy(update={"env": config.env.model_copy(update={"name": "troubled"})})


def account(folder, env=Troubled, *settings, **more):
    """Train, and check the sums of all steps; returns the table in the summary."""
    train(config_of(folder, *settings), objects={"troubled": env}, **more)
    return checked(folder)


def checked(folder) -> dict:
    rows = list(read_metrics(folder / "metrics.jsonl"))
    before = Counter()
    for row in rows:
        now = Counter({name: int(row[f"episodes/{name}"]) for name in ("started", "trained", "dropped", "pending")})
        reasons = [value for name, value in row.items() if name.startswith("episodes/dropped/")]
        assert now["dropped"] == sum(reasons)
        assert now["started"] == now["trained"] + now["dropped"] + now["pending"]
        assert all(now[name] >= before[name] for name in ("started", "trained", "dropped"))
        before = now
    store = EpisodeStore(folder / "episodes")
    episodes = [episode for path in store.paths() for episode in store.read(path)]
    trained = [(one.id, one.seed) for one in episodes if one.failure is None and one.sampled]
    assert len(set(trained)) == len(trained) == before["trained"]
    summary = json.loads((folder / "summary.json").read_text())["accounting"]
    assert summary["started"] == before["started"]
    assert summary["trained"] == before["trained"]
    assert summary["pending"] == 0
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())
    finding = next(one for one in examine_run(folder) if one.name == "accounting")
    assert finding.state == "ok"
    return summary


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_sums_hold_with_slow_and_failing_environments(tmp_path, lag):
    summary = account(tmp_path / "run", Troubled, "trainer.steps=5", f"rollout.max_lag={lag}")
    assert summary["dropped"].get("failed/environment", 0) > 0
    assert set(summary["dropped"]) <= {"failed/environment", "stale", "redundant", "no_terms"}
    if lag == 0:
        assert summary["started"] == 5 * 2 * 3


def test_redundant_episodes_are_dropped_as_such(tmp_path):
    class Sleepy(Troubled):
        fails = 0

    summary = account(tmp_path / "run", Sleepy, "trainer.steps=3", "rollout.redundancy=2")
    assert summary["started"] == 3 * 2 * 5
    assert summary["dropped"] == {"redundant": 3 * 2 * 2}


@pytest.mark.parametrize("lag", [0, 1])
def test_episodes_of_filtered_groups_are_dropped_and_spare_groups_counted(tmp_path, lag):
    def keep(group):
        return int(group.task.id[-1]) % 2 == 1

    settings = ["trainer.steps=3", f"rollout.max_lag={lag}", "rollout.spare_groups=2", "rollout.group_filter=varied"]
    config = config_of(tmp_path / "run", *settings)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_filter": "odd"})})

    class Steady(Troubled):
        slow = fails = 0

    train(config, objects={"troubled": Steady, "odd": keep})
    summary = checked(tmp_path / "run")
    assert summary["dropped"]["filtered"] == 3 * 2 * 3  # tasks 0 and 2 of each step; 1 and 3 are kept
    assert summary["started"] == 3 * 4 * 3


def test_unfinished_episodes_of_a_group_that_reached_its_timeout_are_dropped_as_such(tmp_path):
    class Stuck(FrozenLake):
        resets = itertools.count()

        async def reset(self, task, seed):
            if next(self.resets) % 2:
                await asyncio.sleep(60)
            return await super().reset(task, seed)

    summary = account(tmp_path / "run", Stuck, "trainer.steps=3", "rollout.group_seconds=0.8")
    assert summary["dropped"]["group_timeout"] > 0


def test_groups_that_the_algorithm_does_not_select_are_dropped_with_its_reason(tmp_path):
    class Unsolvable(FrozenLake):
        async def step(self, action):
            return dataclasses.replace(await super().step(action), reward=0.0)

    config = config_of(tmp_path / "run", "trainer.steps=1", "algorithm.skip_zero_variance=true")
    trainer = make_trainer(build(config, objects={"troubled": Unsolvable}))
    asyncio.run(trainer.fit())
    assert trainer.accounting.summary() == {
        "started": 6, "trained": 0, "pending": 0, "dropped": {"zero_variance": 6},
    }  # fmt: skip


def make_trainer(parts, hooks=()) -> Trainer:
    return Trainer(
        parts.config, parts.source, parts.rollout, parts.rewards, parts.algorithm, parts.learner, parts.engine,
        Trackers([]), hooks,
    )  # fmt: skip


def test_greedy_baselines_and_evaluations_are_not_training_episodes():
    parts = build(load(None, [*PLAIN, "trainer.steps=2", "algorithm=remax"]))
    play, trainer = Play(parts.rollout), make_trainer(parts)
    asyncio.run(trainer.fit())
    asyncio.run(parts.rollout.collect(parts.source.evaluation(2), 0, 1))
    assert play.names["greedy"] == 4
    assert play.names["training"] == 14
    assert trainer.accounting.started == 12


def test_recorded_and_replayed_episodes_are_counted_alike(tmp_path):
    class Steady(Troubled):
        slow = fails = 0

    tape = f"{tmp_path / 'tape.jsonl'}"
    played = account(tmp_path / "played", Steady, "trainer.steps=2", f"rollout.record={tape}")
    assert account(tmp_path / "replayed", Steady, "trainer.steps=2", f"rollout.replay={tape}") == played
    assert played["started"] == played["trained"] == 12


def test_offline_rows_start_when_they_are_read(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "Up"}]} for n in "abcd"]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    settings = [setting for setting in PLAIN if "group_size" not in setting]
    settings += ["trainer.steps=3", "algorithm=sft", "data.offline=true", f"data.path={path}"]
    settings.append(f"output_dir={tmp_path / 'run'}")
    train(load(None, settings))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    assert summary == {"started": 6, "trained": 6, "pending": 0, "dropped": {}}


# ------------------------------------------------------------------------------------------------ resume


def episodes_metrics(folder) -> list[dict]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name.startswith("episodes/")} for row in rows]


def test_a_stopped_and_resumed_synchronous_run_has_the_account_of_an_uninterrupted_one(tmp_path):
    class Steady(Troubled):
        slow, fails = 0.01, 0

    account(tmp_path / "whole", Steady, "trainer.steps=4")
    config = config_of(tmp_path / "cut", "trainer.steps=4")
    with pytest.raises(RunStopped):
        train(config, objects={"troubled": Steady}, hooks=[Stop(2)])
    train(config, objects={"troubled": Steady}, resume="latest")
    checked(tmp_path / "cut")
    assert episodes_metrics(tmp_path / "cut") == episodes_metrics(tmp_path / "whole")


def test_a_stopped_run_reports_what_was_pending_as_run_ended_and_resumes_with_it_as_restarted(tmp_path):
    config = config_of(tmp_path / "run", "trainer.steps=5", "rollout.max_lag=2")
    with pytest.raises(RunStopped):
        train(config, objects={"troubled": Troubled}, hooks=[Stop(2)])
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())["accounting"]
    assert state["pending"] > 0
    assert stopped["dropped"]["run_ended"] > 0
    dropped = sum(stopped["dropped"].values()) - sum(state["dropped"].values())
    assert dropped == stopped["started"] - state["started"] + state["pending"]
    train(config, objects={"troubled": Troubled}, resume="latest")
    assert checked(tmp_path / "run")["dropped"]["restarted"] == state["pending"]


SCRIPT = """
import asyncio, random, sys
from arborl.config.load_config import load
from arborl.training_run import train
sys.path.insert(0, sys.argv[1])
from test_accounting import Troubled, config_of
from pathlib import Path
train(config_of(Path(sys.argv[2]), "trainer.steps=8", "rollout.max_lag=2"), objects={"troubled": Troubled},
      resume=sys.argv[3] if len(sys.argv) > 3 else None)
"""


def test_after_kill_9_an_asynchronous_run_continues_its_account_and_trains_nothing_twice(tmp_path, request):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    words = [str(script), str(request.path.parent), str(folder)]
    paths = [str(request.path.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    victim = Forked(words, env=env)
    deadline = time.monotonic() + 120
    while len(list((folder / "checkpoints").glob("step-*/MANIFEST*"))) < 3:
        assert time.monotonic() < deadline
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    last = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((last / "state.json").read_text())["accounting"]
    code, output = forked(*words, "latest", env=env)
    assert code == 0, output
    summary = checked(folder)
    assert summary["dropped"].get("restarted", 0) == state["pending"]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 9))


def test_a_checkpoint_without_an_account_continues_from_zero_and_a_wrong_one_is_damaged(tmp_path):
    parts = build(load(None, [*SMALL, "trainer.steps=2"]))
    trainer = make_trainer(parts, [Stop(1)])
    with pytest.raises(RunStopped):
        asyncio.run(trainer.fit())
    state = json.loads(json.dumps(trainer.state()))
    wrong = state | {"accounting": state["accounting"] | {"started": 99}}
    with pytest.raises(DamagedCheckpoint, match="accounting"):
        make_trainer(parts).restore(wrong)
    del state["accounting"]
    resumed = make_trainer(parts)
    resumed.restore(state)
    asyncio.run(resumed.fit())
    assert resumed.accounting.started == 6


# ------------------------------------------------------------------------------------------------ violations


def test_a_group_that_is_lost_on_the_way_ends_the_run_with_its_episodes():
    parts = build(load(None, [*SMALL, "trainer.steps=2"]))
    trainer = make_trainer(parts)
    take = trainer.pipeline.take

    async def forgetful(step):
        return (await take(step))[1:]

    trainer.pipeline.take = forgetful
    with pytest.raises(AccountingError, match=r"neither trained nor dropped.*000001-000#0, .*000001-000#1, "):
        asyncio.run(trainer.fit())


def test_a_group_that_is_given_to_two_updates_ends_the_run_with_its_episodes():
    parts = build(load(None, [*SMALL, "trainer.steps=2"]))
    trainer = make_trainer(parts)
    take, kept = trainer.pipeline.take, []

    async def repeating(step):
        kept[:] = kept or await take(step)
        return kept

    trainer.pipeline.take = repeating
    with pytest.raises(AccountingError, match=r"trained twice.*000001-000#0"):
        asyncio.run(trainer.fit())


def test_a_trained_group_cannot_start_again_even_after_a_resume():
    accounting = EpisodeAccounting()
    accounting.start(3, 1, ("row#0", 7))
    accounting.settle({("row#0", 7): TRAINED}, {})
    accounting.check(set())
    resumed = EpisodeAccounting()
    resumed.load_state(json.loads(json.dumps(accounting.state())))
    resumed.start(3, 0, ("row#1", 9))
    with pytest.raises(AccountingError, match=r"row#0\+1"):
        resumed.start(3, 1, ("row#0+1", 8))
    resumed.close_batches(before=4)
    with pytest.raises(AccountingError, match="other#0"):
        resumed.start(3, 5, ("other#0", 1))
    resumed.start(4, 1, ("row#0", 10))  # the next pass over the data


def test_a_wrong_sum_names_the_pending_episodes():
    accounting = EpisodeAccounting()
    accounting.start(0, 0, ("lake#0", 1))
    accounting.check({(0, 0)})
    accounting.trained += 1
    with pytest.raises(AccountingError, match=r"1 started, but 1 trained \+ 0 dropped \+ 1 pending.*lake#0"):
        accounting.check({(0, 0)})


def test_what_the_learner_leaves_out_or_skips_is_not_trained():
    accounting, keys = EpisodeAccounting(), [(f"lake#{number}", number) for number in range(6)]
    for key in keys:
        accounting.start(0, 0, key)
    accounting.settle(dict.fromkeys(keys[:4], TRAINED), {"dropped/not_finite": 3.0, "learner/steps": 1.0})
    assert accounting.summary() == {"started": 6, "trained": 1, "pending": 2, "dropped": {"not_finite": 3}}
    accounting.settle(dict.fromkeys(keys[4:], TRAINED), {"learner/steps": 0.0})
    assert accounting.dropped["update_skipped"] == 2


def test_failed_episodes_of_a_dropped_group_count_as_failed():
    accounting, task = EpisodeAccounting(), Task("lake")
    for number in range(3):
        accounting.start(0, 0, (f"lake#{number}", number))
    accounting.end(0, 0, Episode("lake#0", task, 0, failure=Failure("tool 'search'", "OSError", "no network")))
    accounting.end(0, 0, Episode("lake#1", task, 1, failure=Failure("critic", "ArithmeticError", "not finite")))
    assert accounting.drop(0, 0, "filtered") == 3
    assert accounting.dropped == {"failed/tool": 1, "not_finite": 1, "filtered": 1}
    accounting.end(0, 0, Episode("lake#2", task, 2))  # too late: ignored
    accounting.check(set())


def test_rows_of_weight_0_do_not_start():
    accounting, task = EpisodeAccounting(), Task("row")
    accounting.add(0, [Group(task, [Episode("row#0", task, 1), Episode("row#mismatched", task, 1, weight=0.0)])])
    assert accounting.started == 1


def test_the_doctor_finds_a_wrong_sum_and_says_nothing_about_older_runs(tmp_path):
    train(load(None, [*SMALL, "trainer.steps=2", f"output_dir={tmp_path / 'run'}"]))

    def finding(change):
        folder = tmp_path / "changed"
        shutil.copytree(tmp_path / "run", folder, dirs_exist_ok=True)
        rows = [change(row) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return next((one for one in examine_run(folder) if one.name == "accounting"), None)

    assert finding(dict).state == "ok"
    lost = finding(lambda row: row | ({"episodes/trained": 11.0} if row["step"] == 2 else {}))
    assert lost.state == "fail"
    assert "step 2: 12 started, 11 trained" in lost.detail
    assert finding(lambda row: row | {"episodes/dropped/stale": 2.0}).state == "fail"
    assert finding(lambda row: row | {"episodes/pending": None}).state == "fail"
    assert finding(lambda row: {name: row[name] for name in row if "episodes/" not in name}) is None
