"""A sync that does nothing is noticed at the first update."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from arborl.engines.local import LocalEngine
from arborl.engines.scripted import ScriptedEngine
from arborl.trainer.probe import StaleEngine, SyncProbe

MOVED = {"learner/grad_norm": 0.3, "learner/lr": 1e-3, "learner/steps": 1.0}
FLAT = {"learner/grad_norm": 0.0, "learner/lr": 1e-3, "learner/steps": 1.0}
STILL = {"learner/steps": 0.0, "learner/skipped": 1.0}


def watch(engine, weights, metrics, updates: int = 1) -> SyncProbe:
    async def run():
        probe = SyncProbe(engine)
        await engine.load({}, 0)
        await probe.ask()
        for version in range(1, updates + 1):
            await engine.load(weights, version)
            await probe.check(metrics)
        return probe

    return asyncio.run(run())


def changed(model) -> dict[str, torch.Tensor]:
    return {name: value + 0.01 * torch.randn_like(value) for name, value in model.state_dict().items()}


@pytest.fixture
def engine(seedling):
    return LocalEngine(copy.deepcopy(seedling[0]), max_context=64, max_requests=2, kv_tokens=128)


def test_an_update_that_arrives_settles_the_matter(engine):
    assert watch(engine, changed(engine.model), MOVED).settled


def test_updates_that_do_not_arrive_are_an_error(engine):
    assert not watch(engine, {}, MOVED, updates=2).settled
    with pytest.raises(StaleEngine, match="did not arrive"):
        watch(engine, {}, MOVED, updates=3)


def test_weights_that_change_without_a_step_are_an_error(engine):
    with pytest.raises(StaleEngine, match="although"):
        watch(engine, changed(engine.model), STILL)


@pytest.mark.parametrize("metrics", [STILL, FLAT], ids=["no step", "no gradient"])
def test_an_update_without_gradients_proves_nothing_and_the_probe_waits(engine, metrics):
    assert not watch(engine, {}, metrics, updates=5).settled


def test_an_update_one_of_whose_minibatches_was_skipped_has_moved_weights(engine):
    assert watch(engine, changed(engine.model), MOVED | {"learner/steps": 2.0, "learner/skipped": 1 / 3}).settled


def test_a_script_is_not_asked():
    assert watch(ScriptedEngine([[1]]), {}, MOVED).settled


def test_a_trust_region_moves_weights_whatever_the_rate_is(engine):
    step = {"learner/grad_norm": 0.3, "learner/lr": 0.0, "learner/step_share": 1.0, "learner/steps": 1.0}
    assert watch(engine, changed(engine.model), step).settled
