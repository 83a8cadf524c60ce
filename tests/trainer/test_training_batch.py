"""An episode with a number that is not finite leaves baseline and loss together."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from arborl.algorithms import make_algorithm
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.learner.core.learner import Learner
from arborl.trainer.training_batch import prepare_batch
from arborl.types import Call, Completion, Episode, FinishReason, Group, Sampling, StopReason, Task

NAN, RARE = float("nan"), 49


def group(number: int, *rewards: float) -> Group:
    task = Task(f"task-{number}")

    def episode(place: int, reward: float) -> Episode:
        completion = Completion((7 + place, 9, 11), (-1.0, -2.0, -3.0), FinishReason.STOP)
        return Episode(
            f"{task.id}/{place}", task, calls=[Call((1, 2, 3 + number), completion, 0)], rewards={"r": reward}
        )

    return Group(task, [episode(place, reward) for place, reward in enumerate(rewards)])


def with_completion(episode: Episode, **changes) -> None:
    call = episode.calls[0]
    episode.calls = [dataclasses.replace(call, completion=dataclasses.replace(call.completion, **changes))]


def credited_batch(model, groups, settings: dict):
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    learner = Learner(model, LearnerConfig(), Sampling(), algorithm.needs)
    kept, _, terms = prepare_batch(algorithm, learner, groups)
    return kept, algorithm.credit(kept, terms), algorithm.metrics()


@pytest.mark.parametrize("poison", [NAN, -np.inf])
def test_a_non_finite_logprob_of_the_engine_fails_the_episode(tiny_llama, caplog, poison):
    groups = [group(0, 1.0, 0.0, 5.0), group(1, 1.0, 0.0)]
    with_completion(groups[0].episodes[2], logprobs=(-1.0, poison, -1.0))
    kept, terms, metrics = credited_batch(tiny_llama, groups, {"std": "none"})
    assert [e.id for g in kept for e in g.valid_episodes] == ["task-0/0", "task-0/1", "task-1/0", "task-1/1"]
    assert set(terms.advantage) == {0.5, -0.5}  # the mean is that of those who stayed
    assert {name: count for name, count in metrics.items() if count} == {"dropped/failed": 1.0}
    assert "episode task-0/2 failed and is left out: engine: ArithmeticError" in caplog.text


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({"kl": {"coef": 0.1}}, "reference policy"),
        ({"kl": {"coef": 0.1, "where": "reward"}}, "learner"),
        ({"importance_weights": "tis"}, "learner"),
        ({"name": "ppo"}, "critic"),
        ({"name": "dpo"}, "reference policy"),
    ],
    ids=str,
)
def test_a_non_finite_number_of_a_model_fails_only_its_episode(tiny_llama, caplog, settings, who):
    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight[RARE] = NAN
    groups = [group(number, 1.0, 0.0, 0.5) for number in range(4)]
    with_completion(groups[2].episodes[1], tokens=(RARE, 9, 11))
    kept, terms, metrics = credited_batch(model, groups, settings)
    assert [episode.id for g in groups for episode in g.episodes if episode.failure] == ["task-2/1"]
    assert f"task-2/1 failed and is left out: {who}" in caplog.text
    assert np.isfinite(terms.advantage).all()
    assert np.isfinite(terms.weight).all()
    assert metrics["dropped/failed"] == 1.0
    assert [g.task.id for g in kept] == [g.task.id for g in groups]


def test_finite_episodes_are_all_kept(tiny_llama):
    groups = [group(0, 1.0, 0.0)]
    kept, _, metrics = credited_batch(tiny_llama, groups, {})
    assert kept == groups
    assert not any(metrics.values())


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_truncated_episode_is_bootstrapped_with_the_value_of_the_next_position(tiny_llama, critic):
    """Siblings share their first tokens, one is the beginning of another, and two are the same to the last token."""
    algorithm = make_algorithm(AlgorithmConfig(name="a2c", args={"bootstrap": True}))
    learner = Learner(copy.deepcopy(tiny_llama), LearnerConfig(critic=critic), Sampling(), algorithm.needs)
    torch.manual_seed(0)
    with torch.no_grad():
        learner.critic.head.weight.normal_()
    task = Task("t")

    def groups(more: tuple[int, ...]) -> list[Group]:
        replies = [(7, 9), (7, 9, 11), (8,), (7, 9), (5, 5)]
        stops = [
            StopReason.MAX_TURNS,
            StopReason.CONTEXT_FULL,
            StopReason.DONE,
            StopReason.TRUNCATED,
            StopReason.MAX_TURNS,
        ]
        made = []
        for number, (tokens, stop) in enumerate(zip(replies, stops, strict=True)):
            longer = (*tokens, *more) if stop is not StopReason.DONE else tokens
            call = Call((1, 2, 3), Completion(longer, (-1.0,) * len(longer), FinishReason.STOP), 0)
            made.append(Episode(f"{number}", task, calls=[call], stop=stop, rewards={"r": float(number)}))
        return [Group(task, made[:4]), Group(task, made[4:])]

    _, _, terms = prepare_batch(algorithm, learner, groups(()))
    _, _, longer = prepare_batch(algorithm, learner, groups((30,)))
    cut = [np.flatnonzero(terms.episode == n)[-1] for n in (0, 1, 3, 4)]
    expected = [longer.value[np.flatnonzero(longer.episode == n)[-1]] for n in (0, 1, 3, 4)]
    np.testing.assert_allclose(terms.after[cut], expected, rtol=1e-9)
    assert np.isnan(np.delete(terms.after, cut)).all()
    assert len(set(np.round(terms.after[cut], 9))) == 3  # episodes 0 and 3 have the same tokens
    assert not np.isclose(terms.after[cut], terms.value[cut]).any()
    credited = algorithm.credit(groups(()), terms)
    assert credited.target[cut] == pytest.approx([r + v for r, v in zip((0.0, 1.0, 3.0, 4.0), expected, strict=True)])


def test_a_non_finite_bootstrap_value_fails_the_episode(tiny_llama, caplog):
    model = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight[RARE] = NAN
    groups = [group(number, 1.0, 0.0) for number in range(2)]
    with_completion(groups[1].episodes[0], tokens=(7, 9, RARE))  # read by nothing but what follows
    for one in groups[1].episodes:
        one.stop = StopReason.MAX_TURNS
    _, terms, _ = credited_batch(model, groups, {"name": "a2c", "args": {"bootstrap": True}})
    assert "task-1/0 failed and is left out: critic" in caplog.text
    assert np.isfinite(terms.advantage).all()
    assert sum(episode.failure is not None for g in groups for episode in g.episodes) == 1
