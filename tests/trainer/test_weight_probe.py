"""The weight probe detects weights that do not reach the engine."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from arborl.engines.local import LocalEngine
from arborl.engines.scripted import ScriptedEngine
from arborl.trainer.weight_probe import StaleEngine, WeightSyncProbe

UPDATED = {"learner/grad_norm": 0.3, "learner/lr": 1e-3, "learner/steps": 1.0}
NO_GRADIENT = {"learner/grad_norm": 0.0, "learner/lr": 1e-3, "learner/steps": 1.0}
NO_STEP = {"learner/steps": 0.0, "learner/skipped": 1.0}


def run_probe(engine, weights, metrics, updates: int = 1) -> WeightSyncProbe:
    async def run():
        probe = WeightSyncProbe(engine)
        await engine.load({}, 0)
        await probe.start()
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


def test_an_update_that_arrives_ends_the_probe(engine):
    assert run_probe(engine, changed(engine.model), UPDATED).is_done


def test_updates_that_do_not_arrive_are_an_error(engine):
    assert not run_probe(engine, {}, UPDATED, updates=2).is_done
    with pytest.raises(StaleEngine, match="did not arrive"):
        run_probe(engine, {}, UPDATED, updates=3)


def test_weights_that_change_without_a_step_are_an_error(engine):
    with pytest.raises(StaleEngine, match="did not change"):
        run_probe(engine, changed(engine.model), NO_STEP)


@pytest.mark.parametrize("metrics", [NO_STEP, NO_GRADIENT], ids=["no step", "no gradient"])
def test_an_update_without_a_gradient_is_not_counted(engine, metrics):
    assert not run_probe(engine, {}, metrics, updates=5).is_done


def test_an_update_with_a_skipped_minibatch_counts(engine):
    assert run_probe(engine, changed(engine.model), UPDATED | {"learner/steps": 2.0, "learner/skipped": 1 / 3}).is_done


def test_a_scripted_engine_is_not_probed():
    assert run_probe(ScriptedEngine([[1]]), {}, UPDATED).is_done


def test_a_trust_region_step_counts_without_a_learning_rate(engine):
    step = {"learner/grad_norm": 0.3, "learner/lr": 0.0, "learner/step_share": 1.0, "learner/steps": 1.0}
    assert run_probe(engine, changed(engine.model), step).is_done
