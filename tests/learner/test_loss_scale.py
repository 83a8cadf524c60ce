"""A float16 model learns: small gradients are not rounded to nothing, large ones do not overflow, and a run resumes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from learner_fakes import SAMPLING, Fake, batch_of, random_groups
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.config.load_config import load
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.learner.core.optimizer import INITIAL_SCALE, LossScale


@pytest.fixture(scope="module")
def fine():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gradients(model, weight: float) -> list[torch.Tensor]:
    algorithm = Fake()
    forest, terms = batch_of(random_groups(3), algorithm)
    learner = Learner(model, LearnerConfig(), SAMPLING)
    learner.backward(forest.trees, dataclasses.replace(terms, weight=terms.weight * weight), algorithm)
    return learner.optimizer.gradients()


@pytest.mark.parametrize("weight", [1e-5, 1.0, 3e4], ids=["tiny", "usual", "huge"])
def test_gradients_of_a_float16_model_are_those_of_float32(fine, weight):
    found, expected = gradients(copy.deepcopy(fine).half(), weight), gradients(copy.deepcopy(fine), weight)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm()) < 0.02 * float(theirs.norm())


def test_without_a_factor_the_tiny_ones_would_be_nothing(fine, monkeypatch):
    monkeypatch.setattr("arborl.learner.core.optimizer.INITIAL_SCALE", 1.0)
    found = gradients(copy.deepcopy(fine).half(), 1e-5)
    assert sum(float(g.norm()) == 0.0 for g in found) >= 5


def test_what_is_not_finite_at_any_factor_is_left_to_be_found_and_the_factor_stays():
    scale, bad = LossScale(torch.float16), [torch.tensor([float("nan")])]
    tries = 1
    while not scale.unscale(bad):
        tries += 1
    assert 2 < tries < 12
    assert scale.value == INITIAL_SCALE


def test_the_factor_grows_again_after_many_good_passes_and_travels_in_checkpoints(fine, tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.learner.core.optimizer.GROWTH_INTERVAL", 2)
    algorithm = Fake()
    forest, terms = batch_of(random_groups(3), algorithm)
    learner = Learner(copy.deepcopy(fine).half(), LearnerConfig(lr=1e-3, decay="none"), SAMPLING)
    values = []
    for _ in range(3):
        metrics = learner.update(forest.trees, terms, algorithm)
        values.append(learner.loss_scale.value)
    assert metrics["learner/skipped"] == 0.0
    assert values == [values[0], 2 * values[0], 2 * values[0]]
    learner.save(tmp_path)
    other = Learner(copy.deepcopy(fine).half(), LearnerConfig(lr=1e-3, decay="none"), SAMPLING)
    other.load(tmp_path)
    assert (other.loss_scale.value, other.loss_scale.good_passes) == (values[-1], 1)
    for one in (learner, other):
        one.update(forest.trees, terms, algorithm)
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True))


def test_float16_weights_without_float32_copies_are_refused():
    with pytest.raises(ConfigError, match=r"learner\.master=float32"):
        load(None, ["model.dtype=float16", "learner.master=none"])
