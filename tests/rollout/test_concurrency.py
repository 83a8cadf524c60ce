"""Who may begin: so many at a time, or as many as the engine can serve."""

from __future__ import annotations

import asyncio

import pytest

from arborl.agents.chat_agents import ChatAgent
from arborl.busy_time import BusyTime
from arborl.chat import Renderer
from arborl.config.load_config import load
from arborl.engines.local import LocalEngine
from arborl.envs.games.frozen_lake import FrozenLake
from arborl.errors import ConfigError
from arborl.models.model_loading import load_model, resolve
from arborl.rollout import runner as module
from arborl.rollout.env_workers import Workers
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import ConcurrencyLimit, EpisodeFactories, Rollout
from arborl.training_run.build import build
from arborl.types import Sampling, Task


class Engine:
    """Serves `capacity` requests concurrently; more requests must wait."""

    def __init__(self, capacity: int):
        self.semaphore, self.received, self.most = asyncio.Semaphore(capacity), 0, 0
        self.size = capacity

    @property
    def crowded(self) -> bool:
        return self.received > self.size

    async def generate(self) -> None:
        self.received += 1
        self.most = max(self.most, self.received)
        async with self.semaphore:
            await asyncio.sleep(0.002)
        self.received -= 1


def play(limit: int | None, capacity: int, episodes: int, tool: float) -> tuple[ConcurrencyLimit, Engine, int]:
    async def all_of_them():
        engine = Engine(capacity)
        slots = ConcurrencyLimit(limit, lambda: engine.crowded, first=32)
        meter, most = BusyTime(slots.on_completion), 0

        async def episode():
            nonlocal most
            async with slots:
                most = max(most, slots.num_running)
                for _ in range(4):
                    with meter:
                        await engine.generate()
                    await asyncio.sleep(tool)

        await asyncio.gather(*(episode() for _ in range(episodes)))
        assert slots.num_running == 0
        return slots, engine, most

    return asyncio.run(all_of_them())


def test_the_limit_is_kept_and_all_episodes_run():
    _, _, most = play(3, capacity=8, episodes=20, tool=0.0)
    assert most == 3


def test_auto_raises_the_limit_while_the_engine_has_capacity_and_lowers_it_when_requests_wait(monkeypatch):
    monkeypatch.setattr(module, "DECREASE_SECONDS", 0.002)
    _, _, many = play(None, capacity=200, episodes=150, tool=0.01)
    crowd, _engine, _ = play(None, capacity=4, episodes=150, tool=0.0)
    assert many > 64  # slow tools: many episodes run, and the engine has capacity for all
    assert crowd.limit < 16


async def test_who_is_cancelled_in_line_or_on_the_way_in_takes_no_slot():
    slots = ConcurrencyLimit(1, lambda: False)
    async with slots:
        waits = [asyncio.ensure_future(slots.__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await asyncio.sleep(0)
    waits[1].cancel()  # it was let in a moment ago
    await asyncio.sleep(0)
    await asyncio.wait_for(waits[2], 20)
    assert slots.num_running == 1


def test_concurrency_is_a_number_or_auto():
    assert load(None, ["rollout.concurrency=auto"]).rollout.concurrency == "auto"
    for wrong in ("0", "many"):
        with pytest.raises(ConfigError, match=r"rollout\.concurrency"):
            load(None, [f"rollout.concurrency={wrong}"])


def rollout(engine, renderer, workers="auto", concurrency=None):
    episode_factories = EpisodeFactories(lambda task: ChatAgent(), lambda task: FrozenLake(max_steps=1))
    return Rollout(
        engine,
        renderer,
        episode_factories,
        Sampling(2, stop=renderer.stop),
        EpisodeLimits(),
        concurrency,
        Workers(workers),
    )


class Counting(LocalEngine):
    """Notes how many requests it had when it made its first step."""

    begun = 0

    def _step(self):
        self.begun = self.begun or len(self.scheduler.waiting) + len(self.scheduler.running)
        super()._step()


@pytest.fixture(scope="module")
def model():
    folder = resolve("seedling")
    return load_model(folder), Renderer.from_folder(folder)


def test_the_engine_can_serve_as_many_as_it_has_rows_and_pages_for(model):
    def capacity(requests, tokens):
        return LocalEngine(model[0], 128, max_requests=requests, kv_tokens=tokens, block_size=16).capacity

    assert capacity(300, 300 * 128) == 300
    assert capacity(300, 200 * 128) == 200
    assert capacity(8, 300 * 128) == 8


def test_auto_begins_with_what_the_engine_can_hold_and_all_are_requested_before_its_first_step(model):
    engine = Counting(model[0], 1024, max_requests=300, kv_tokens=300 * 1024, block_size=64)
    tasks = [Task(f"{seed}", seed=seed) for seed in range(15)]
    playing = rollout(engine, model[1])
    asyncio.run(playing.collect(tasks, 0, 20))
    assert engine.begun == 300


def test_auto_keeps_to_the_usual_number_where_environments_take_threads_or_processes(model):
    engine = LocalEngine(model[0], 128, max_requests=300, kv_tokens=300 * 128, block_size=16)
    assert rollout(engine, model[1]).metrics()["rollout/concurrency"] == 300
    for workers in ("thread", "process"):
        assert rollout(engine, model[1], workers).metrics()["rollout/concurrency"] == module.DEFAULT_CONCURRENCY
    assert rollout(engine, model[1], concurrency=7).metrics()["rollout/concurrency"] == 7


def test_auto_is_the_default_and_a_gpu_takes_more_requests_at_once():
    config = load(None, [])
    assert config.rollout.concurrency == "auto"
    assert (config.engine.requests("cpu"), config.engine.requests("cuda")) == (256, 1024)
    assert load(None, ["engine.max_requests=8"]).engine.requests("cuda") == 8


def test_auto_is_a_fixed_number_in_deterministic_mode():
    """What follows the engine depends on time: metrics of two equal runs would differ."""
    rollout = build(load(None, ["deterministic=true", "rollout.concurrency=auto"])).rollout
    assert rollout.concurrency == module.DEFAULT_CONCURRENCY
