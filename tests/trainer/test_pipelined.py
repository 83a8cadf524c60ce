"""Collection and update at the same time; without lag, exactly one after the other."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch
from small_runs import LAKE

from arborl.config.load_config import load
from arborl.engines.engine import PROBE_SESSION
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.errors import ConfigError, RunStopped
from arborl.models.attention import CausalAttention, library_hidden_states, logits
from arborl.rollout.episode_store import EpisodeStore, episode_to_json
from arborl.seeds import derive
from arborl.track.jsonl import read_metrics
from arborl.track.tracker import Trackers
from arborl.trainer.trainer import LearnerThread, Trainer
from arborl.trainer.training_batch import prepare_batch
from arborl.training_run import train
from arborl.training_run.build import build

SMALL = [*LAKE, "evaluation.tasks=0", "trainer.save_every=1", "trainer.keep=10"]


def make_trainer(parts, learner=None, hooks=()) -> Trainer:
    return Trainer(
        parts.config, parts.source, parts.rollout, parts.rewards, parts.algorithm, learner or parts.learner,
        parts.engine, Trackers([]), hooks,
    )  # fmt: skip


def plain(groups) -> list[dict]:
    rows = [episode_to_json(episode) for group in groups for episode in group.episodes]
    for row in rows:
        del row["seconds"]
        for call in row["calls"]:
            del call["seconds"]
    return rows


async def by_hand(parts, steps: int) -> list[dict]:
    """The synchronous loop, written out."""
    config, rows = parts.config, []
    for step in range(steps):
        await parts.engine.load(parts.learner.weights(), version=step)
        tasks = parts.source.take(step, config.rollout.tasks_per_step)
        groups = await parts.rollout.collect(tasks, derive(config.seed, "step", step), config.rollout.group_size)
        await parts.rewards.score(groups)
        rows += plain(groups)
        kept, forest, terms = prepare_batch(parts.algorithm, parts.learner, groups)
        terms = parts.algorithm.credit(kept, terms)
        parts.learner.update(forest.trees, terms, parts.algorithm)
    return rows


class Record:
    """A hook that records the trained episodes."""

    def __init__(self, stop: int | None = None):
        self.rows: list[dict] = []
        self.stop = stop

    async def after(self, trainer, groups, metrics):
        self.rows += plain(groups)
        if trainer.step == self.stop:
            raise RunStopped("enough")


def test_without_lag_the_trainer_equals_a_synchronous_loop_bit_for_bit():
    settings = [*SMALL, "deterministic=true", "trainer.steps=2", "rollout.max_lag=0"]
    one, two = (build(load(None, settings)) for _ in range(2))
    rows, kept = asyncio.run(by_hand(one, 2)), Record()
    asyncio.run(make_trainer(two, hooks=[kept]).fit())
    assert rows == kept.rows
    for name, tensor in one.learner.weights().items():
        assert torch.equal(tensor, two.learner.weights()[name]), name


class Slow(FrozenLake):
    """Some moves take their time."""

    async def step(self, action):
        await asyncio.sleep(0.3 * np.random.random() ** 8)
        return await super().step(action)


def test_with_lag_staleness_is_bounded_and_a_resumed_run_trains_no_task_twice(tmp_path):
    config = load(None, [*SMALL, "trainer.steps=5", "rollout.max_lag=1", f"output_dir={tmp_path / 'run'}"])
    config = config.model_copy(update={"env": config.env.model_copy(update={"name": "slow"})})
    with pytest.raises(RunStopped):
        train(config, objects={"slow": Slow}, hooks=[Record(stop=2)])
    train(config, objects={"slow": Slow}, resume="latest")
    store = EpisodeStore(tmp_path / "run" / "episodes")
    episodes = {path: list(store.read(path)) for path in store.paths()}
    assert [len(own) for own in episodes.values()] == [6] * 5
    tasks = [episode.task.id for own in episodes.values() for episode in own[::3]]
    assert len(set(tasks)) == 10
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    assert max(row["batch/lag_max"] for row in metrics) <= 1
    assert any(row["batch/lag_mean"] > 0 for row in metrics)


async def test_the_event_loop_runs_while_the_learner_computes():
    parts = build(load(None, [*SMALL, "trainer.steps=1"]))
    ticks: list[float] = []

    class Busy:
        def __getattr__(self, name):
            return getattr(parts.learner, name)

        def update(self, *args):
            time.sleep(0.3)  # holds this thread alone
            return parts.learner.update(*args)

    trainer = make_trainer(parts, Busy())
    job = asyncio.ensure_future(trainer.fit())
    while not job.done():
        ticks.append(time.perf_counter())
        await asyncio.sleep(0.01)
    await job
    learning = [ticks[i] for i in range(len(ticks) - 20) if ticks[i + 20] - ticks[i] < 0.5]
    assert learning  # twenty times in a row it came round, during the sleep too


def cancel_in_step(number: int, parts, job) -> None:
    """Cancel the job when the optimizer step of this number begins to compute its gradient."""
    compute, loop, count = parts.learner._compute_gradients, asyncio.get_running_loop(), 0

    def cancelling(*args):
        nonlocal count
        count += 1
        if count == number:
            loop.call_soon_threadsafe(job.cancel)
            assert parts.learner.interrupt.wait(60)
        return compute(*args)

    parts.learner._compute_gradients = cancelling


async def test_an_update_cancelled_before_its_first_optimizer_step_is_given_up_without_a_trace():
    parts = build(load(None, [*SMALL, "trainer.steps=3", "learner.minibatches=2", "algorithm.kl.coef=0.1"]))
    trainer = make_trainer(parts)
    job = asyncio.ensure_future(trainer.fit())
    cancel_in_step(3, parts, job)  # the first of the second update

    states = []

    class Remember:
        async def after(self, trainer, groups, metrics):
            states.append((trainer.state(), {name: one.clone() for name, one in trainer.learner.weights().items()}))

    trainer.hooks.append(Remember())
    with pytest.raises(asyncio.CancelledError):
        await job
    assert trainer.step == 1
    ((state, weights),) = states
    now = trainer.state()
    assert {**now, "train_seconds": 0} == {**state, "train_seconds": 0}
    assert parts.learner.done == 2
    assert all(torch.equal(weights[name], one) for name, one in parts.learner.weights().items())
    assert not any(parameter.grad is not None for parameter in parts.model.parameters())


async def test_an_update_cancelled_after_its_first_optimizer_step_is_completed():
    parts = build(load(None, [*SMALL, "trainer.steps=3", "learner.minibatches=2"]))
    trainer = make_trainer(parts)
    job = asyncio.ensure_future(trainer.fit())
    cancel_in_step(2, parts, job)
    with pytest.raises(asyncio.CancelledError):
        await job
    assert trainer.step == 1
    assert parts.learner.done == 2
    assert trainer.state()["pipeline"] == {"next": 1, "sizes": {}, "left": []}


def test_tokens_sampled_during_an_update_are_counted_in_the_next_step():
    parts = build(load(None, [*SMALL, "trainer.steps=4", "rollout.max_lag=2"]))
    if parts.engine.shares_weights:
        pytest.skip("there is no C compiler")
    update, sampled, trained = parts.learner.update, [], []

    class Count:
        async def after(self, trainer, groups, metrics):
            sampled.append(metrics["engine/sampled"])
            trained.extend(episode.sampled for group in groups for episode in group.episodes)

    trainer = make_trainer(parts, hooks=[Count()])

    def slow(*args):
        """All groups that were begun finish during the update."""
        ends = time.monotonic() + 20
        while trainer.pipeline.busy and time.monotonic() < ends:
            time.sleep(0.01)
        return update(*args)

    parts.learner.update = slow
    asyncio.run(trainer.fit())
    assert sum(sampled) >= sum(trained)


def test_with_lag_the_speed_of_sampling_counts_the_time_of_updates_too():
    """The wait for a batch that is already there is no time to divide its tokens by."""
    parts = build(load(None, [*SMALL, "trainer.steps=4", "rollout.max_lag=1"]))
    update, rows = parts.learner.update, []

    def slow_update(*given, **more):
        time.sleep(0.5)
        return update(*given, **more)

    class Rows:
        async def after(self, trainer, groups, metrics):
            rows.append(metrics)

    parts.learner.update = slow_update
    began = time.perf_counter()
    asyncio.run(make_trainer(parts, hooks=[Rows()]).fit())
    elapsed = time.perf_counter() - began
    counted = sum(row["engine/sampled"] / row["rollout/sampled_per_second"] for row in rows if row["engine/sampled"])
    assert 1.4 <= counted <= elapsed  # three of the four updates lie between two counts


@pytest.mark.parametrize("more", [[], ["model.lora.rank=2"]], ids=["all weights", "adapters"])
def test_tokens_sampled_during_an_update_carry_the_right_policy_version(more):
    parts = build(load(None, [*SMALL, *more, "trainer.steps=3", "rollout.max_lag=1"]))
    if parts.engine.shares_weights:
        pytest.skip("there is no C compiler")
    update, publish, generate = parts.learner.update, parts.engine.load, parts.engine.generate
    beside, kept, given, first, written = [], [], {}, [], threading.Event()

    async def late(prompt, sampling, *, session):
        """Those of the second batch get nothing until the first update is written."""
        task = session.split("#")[0]
        if session != PROBE_SESSION and task not in first:
            first.append(task)
        while task in first[2:] and not written.is_set():
            await asyncio.sleep(0.01)
        return await generate(prompt, sampling, session=session)

    def slow(*args):
        done = update(*args)
        with torch.no_grad():  # an update of a few episodes is too small to be seen
            for tensor in parts.learner.weights().values():
                tensor.mul_(1.05)
        written.set()  # and the engine has not been given them
        ends = time.monotonic() + 20
        while not beside and not parts.engine.counts["sampled"] and time.monotonic() < ends:
            time.sleep(0.01)
        beside.append(parts.engine.counts["sampled"])
        return done

    async def load_and_keep(weights, version):
        await publish(weights, version)
        given[version] = {name: tensor.clone() for name, tensor in weights.items()}

    class Calls:
        async def after(self, trainer, groups, metrics):
            kept.extend(call for group in groups for episode in group.valid_episodes for call in episode.calls)

    parts.learner.update, parts.engine.load, parts.engine.generate = slow, load_and_keep, late
    asyncio.run(make_trainer(parts, hooks=[Calls()]).fit())
    assert beside[0] > 0
    model = parts.engine.model
    for call in kept:
        completion = call.completion
        for version in {*completion.versions, completion.version}:
            model.load_state_dict(given[version], strict=False)
            read = torch.tensor([*call.prompt, *completion.tokens[:-1]])
            with torch.no_grad():
                hidden = library_hidden_states(model, read, torch.arange(len(read)), CausalAttention())
                found = logits(model, hidden[len(call.prompt) - 1 :])
            scores = found.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            mine = np.array(completion.versions or [version] * len(completion.tokens)) == version
            np.testing.assert_allclose(scores.numpy()[mine], np.array(completion.logprobs)[mine], atol=1e-4)


def test_learner_and_engine_share_the_threads_while_both_compute():
    async def seen():
        thread = LearnerThread()
        during = asyncio.ensure_future(thread.run_beside_engine(lambda: (time.sleep(0.1), torch.get_num_threads())[1]))
        await asyncio.sleep(0.02)
        here = torch.get_num_threads()
        mine = await during
        found = [mine, here, torch.get_num_threads(), await thread.run(torch.get_num_threads)]
        thread.close()
        return found

    before = torch.get_num_threads()
    try:
        for threads, expected in ((1, [1, 1, 1, 1]), (3, [1, 2, 3, 3]), (4, [2, 2, 4, 4])):
            torch.set_num_threads(threads)
            assert asyncio.run(seen()) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["rollout.max_lag=-1"], "rollout.max_lag"),
        (["rollout.max_lag=1", "deterministic=true"], "the composition of batches depends on time"),
        (["rollout.max_lag=1", "rollout.record=x.jsonl"], "a recording holds whole batches"),
        (["engine.args.update=stop"], "engine.args.update"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        load(None, setting)
