"""Offload gives the same numbers to the last bit."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from cases import slow_cases
from learner_fakes import SAMPLING, Fake, assert_equal, leaves, step

from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.core import offload
from arborl.learner.core.checkpoint_files import checkpoint_tensors
from arborl.learner.core.learner import Learner
from arborl.learner.core.offload import OffloadedModel
from arborl.models.lora import add_lora


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(offload, "OFFLOAD_CHUNK", 300)  # so that a step has many


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    with learner.with_reference():
        return leaves(checkpoint_tensors(learner))


def learner_of(model, algorithm, mode, **more) -> Learner:
    config = LearnerConfig(lr=1e-2, decay="none", weight_decay=0.1, offload=mode, micro_batch_tokens=40, **more)
    return Learner(copy.deepcopy(model), config, SAMPLING, algorithm.needs)


CASES = {
    "float32": ("float32", "clip", {}, False),
    "bfloat16": ("bfloat16", "clip", {}, False),
    "separate critic": ("bfloat16", "value", {"critic": "separate"}, False),
    "shared critic": ("bfloat16", "value", {"critic": "shared"}, False),
    "no masters": ("bfloat16", "clip", {"master": "none"}, False),
    "minibatches": ("bfloat16", "clip", {"minibatches": 2, "epochs": 2}, False),
    "adapters": ("bfloat16", "clip", {}, True),
}


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *((case, "all") for case in CASES),
        *[("float32", "optimizer"), ("adapters", "optimizer")],
        *slow_cases(*((case, "optimizer") for case in CASES if case not in ("float32", "adapters"))),
    ],
)
def test_the_result_is_that_of_a_run_that_keeps_everything_on_the_device(tiny_llama, case, mode):
    dtype, kind, more, adapters = CASES[case]
    model = copy.deepcopy(tiny_llama).to(getattr(torch, dtype))
    if adapters:
        add_lora(model, LoraConfig(rank=2))
    algorithm = Fake(kind, reference=True)
    plain, away = (learner_of(model, algorithm, how, **more) for how in ("none", mode))
    for seed in range(3):
        assert step(plain, algorithm, seed) == step(away, algorithm, seed)
        if seed == 1:
            for learner in (plain, away):
                learner.update_reference()
    assert_equal(everything(away), everything(plain))


@pytest.mark.parametrize(("saved", "resumed"), [("none", "all"), ("all", "optimizer"), ("optimizer", "none")])
def test_a_run_saved_in_one_mode_goes_on_in_another(tiny_llama, tmp_path, saved, resumed):
    model, algorithm = copy.deepcopy(tiny_llama).bfloat16(), Fake(reference=True)
    whole = learner_of(model, algorithm, "none")
    first, second = learner_of(model, algorithm, saved), learner_of(model, algorithm, resumed)
    for seed in range(4):
        step(whole, algorithm, seed)
    for seed in range(2):
        step(first, algorithm, seed)
    first.save(tmp_path)
    second.load(tmp_path)
    for seed in (2, 3):
        step(second, algorithm, seed)
    assert_equal(everything(second), everything(whole))


def test_an_offloaded_snapshot_is_consistent_even_without_host_memory_for_a_copy(tiny_llama, tmp_path, monkeypatch):
    model, algorithm = copy.deepcopy(tiny_llama).bfloat16(), Fake(reference=True)
    learner = learner_of(model, algorithm, "all")
    step(learner, algorithm, 0)
    then = everything(learner)
    snapshot = learner.snapshot()
    step(learner, algorithm, 1)
    snapshot.write(tmp_path)
    again = learner_of(model, algorithm, "all")
    again.load(tmp_path)
    assert_equal(everything(again), then)
    monkeypatch.setattr(offload, "free_memory", lambda: 0)
    (tmp_path / "live").mkdir()
    again.snapshot().write(tmp_path / "live")
    third = learner_of(model, algorithm, "none")
    third.load(tmp_path / "live")
    assert_equal(everything(third), then)


def test_between_steps_masters_take_no_memory_of_the_device(tiny_llama):
    model, algorithm = copy.deepcopy(tiny_llama).bfloat16(), Fake()
    learner = learner_of(model, algorithm, "optimizer")
    step(learner, algorithm, 0)
    masters = learner.optimizer.parts["policy"].masters
    assert all(master.untyped_storage().nbytes() == 4 for master in masters)
    assert all(master.shape == p.shape for p, master in learner.optimizer.parts["policy"].pairs)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(tiny_llama):
    model, algorithm = copy.deepcopy(tiny_llama).bfloat16(), Fake()
    learner = learner_of(model, algorithm, "all")
    step(learner, algorithm, 0)
    before = everything(learner)
    for gradient in learner.optimizer.gradients():
        gradient.fill_(float("nan"))
    assert learner.optimizer.step(1.0)["learner/skipped"] == 1.0
    learner.optimizer.zero_grad()
    assert_equal(everything(learner), before)


def test_an_offloaded_model_takes_device_memory_only_inside_its_context(tiny_llama):
    model = copy.deepcopy(tiny_llama)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded = OffloadedModel(model)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    with offloaded.on_device():
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            next(model.parameters()).fill_(2.0)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    with suppress(ZeroDivisionError), offloaded.on_device():
        assert float(next(model.parameters()).detach().min()) == 2.0
        raise ZeroDivisionError
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
