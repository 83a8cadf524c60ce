"""Learning rates are transformers' schedules, at every step of a run."""

from __future__ import annotations

import copy

import pytest
import torch
from learner_fakes import SAMPLING, Fake, batch_of, random_groups
from transformers import get_scheduler

from arborl.config.config_base import validate
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.learner.core.optimizer import lr_factor, warmup_steps

LR, TOTAL = 2e-3, 40


def theirs(name: str, rising: int, **more: object) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    found = get_scheduler(name, optimizer, rising, TOTAL, scheduler_specific_kwargs=more or None)
    rates = []
    for _ in range(TOTAL):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        found.step()
    return rates


@pytest.mark.parametrize("rising", [0, 1, 7, TOTAL - 1])
@pytest.mark.parametrize(
    ("decay", "name", "floor"),
    [
        ("none", "constant_with_warmup", 0.0),
        ("constant_with_warmup", "constant_with_warmup", 0.0),
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine", "cosine_with_min_lr", 5e-4),
        ("linear", "polynomial", 5e-4),
    ],
)
def test_a_schedule_is_transformers_own(decay, name, floor, rising):
    config = LearnerConfig(lr=LR, decay=decay, warmup=rising, min_lr=floor)
    more = {"cosine_with_min_lr": {"min_lr": floor}, "polynomial": {"power": 1.0, "lr_end": floor}}.get(name, {})
    ours = [LR * lr_factor(config, step, TOTAL, floor / LR) for step in range(TOTAL)]
    assert ours == pytest.approx(theirs(name, rising, **more), rel=1e-12, abs=1e-18)


def test_without_a_warm_up_a_constant_rate_is_constant():
    assert theirs("constant", 0) == [LR * lr_factor(LearnerConfig(decay="none"), step, TOTAL) for step in range(TOTAL)]


def test_a_warm_up_by_share_is_rounded_up_over_the_optimiser_steps_of_the_whole_run(tiny_llama):
    assert [warmup_steps(LearnerConfig(warmup=0.1), total) for total in (10, 11, 19, 20, 0)] == [1, 2, 2, 2, 0]
    config = LearnerConfig(lr=LR, epochs=2, minibatches=3, warmup=0.5, decay="cosine", min_lr=LR / 4)
    learner = Learner(copy.deepcopy(tiny_llama), config, SAMPLING, total_steps=2)
    algorithm = Fake()
    forest, terms = batch_of(random_groups(0), algorithm)
    learner.update(forest.trees, terms, algorithm)
    assert learner.lr_factor == 1.0  # six of twelve steps are done
    learner.update(forest.trees, terms, algorithm)
    assert learner.lr_factor == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 3.5}, "a whole number of steps, or a share below 1"),
        ({"min_lr": 1e-6, "decay": "none"}, "decay=none has none"),
        ({"min_lr": 1e-6, "decay": "constant_with_warmup"}, "Write decay=linear or cosine"),
        ({"min_lr": 1e-3, "lr": 1e-4}, "is above lr=0.0001"),
        ({"warmup": -1.0}, ">= 0"),
        ({"decay": "cosinus"}, "Did you mean 'cosine'?"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        validate(LearnerConfig, settings)


def test_a_floor_above_the_rate_of_such_a_model_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match=r"above the learning rate 0\.0006"):
        Learner(tiny_llama, LearnerConfig(min_lr=1e-2), SAMPLING)
