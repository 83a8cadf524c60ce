"""Scoring, updates, non-finite numbers, out-of-memory errors and checkpoints of a learner."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from learner_fakes import SAMPLING, Fake, assert_same, batch_of, forest_of, gradients, random_groups

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig
from arborl.learner.attention.path_selection import ATTENTION_BACKENDS, AttentionBackend
from arborl.learner.attention.tree_attention import DenseAttention
from arborl.learner.core.learner import Learner
from arborl.types import Group


@pytest.fixture
def model(tiny_llama):
    return copy.deepcopy(tiny_llama)


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_score_terms_fills_exactly_what_is_needed(model):
    needs = AlgorithmNeeds(proximal=True, reference=True, value=True)
    learner = Learner(model, LearnerConfig(), SAMPLING, needs)
    trees, terms = forest_of(random_groups(0))
    nothing = learner.score_terms(trees, terms, AlgorithmNeeds())
    assert all(np.isnan(getattr(nothing, name)).all() for name in ("proximal", "reference", "value"))
    found = learner.score_terms(trees, terms, needs)
    np.testing.assert_allclose(found.proximal, learner.logprobs(trees, terms).numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.reference, found.proximal, rtol=1e-12)  # nothing has moved yet
    assert (found.value == 0).all()
    assert np.isnan(found.target).all()


def test_the_reference_stays_while_the_policy_moves(model):
    algorithm = Fake(reference=True, proximal=True)
    learner = Learner(model, LearnerConfig(lr=1e-2, decay="none"), SAMPLING, algorithm.needs)
    groups = random_groups(0)
    trees, terms = forest_of(groups)
    before = learner.score_terms(trees, terms, algorithm.needs)
    learner.update(trees, algorithm.credit(groups, before), algorithm)
    after = learner.score_terms(trees, terms, algorithm.needs)
    assert (after.reference == before.reference).all()
    assert np.abs(after.proximal - before.proximal).max() > 1e-3


def test_the_proximal_policy_is_that_of_the_updates_beginning_through_all_its_epochs(model):
    """Epochs move away from it: its penalty is nothing at the first step and something on average."""
    algorithm = Fake(proximal=True)
    groups = random_groups(0)
    ratios = []

    class Watching(Fake):
        def loss(self, outputs, terms):
            ratios.append(float((outputs.logprob_M.detach() - terms.proximal_M).abs().max()))
            return super().loss(outputs, terms)

    learner = Learner(model, LearnerConfig(lr=1e-2, epochs=3, decay="none"), SAMPLING, algorithm.needs)
    trees, terms = forest_of(groups)
    learner.update(
        trees, algorithm.credit(groups, learner.score_terms(trees, terms, algorithm.needs)), Watching(proximal=True)
    )
    assert ratios[0] < 1e-12
    assert 0 < ratios[1] < ratios[2]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_critic_learns_its_targets(model, critic):
    algorithm = Fake("value")
    config = LearnerConfig(lr=1e-3, critic_lr=3e-2, decay="none", critic=critic)
    learner = Learner(model, config, SAMPLING, algorithm.needs)
    groups = random_groups(0)
    trees, terms = forest_of(groups)
    wrong = []
    for _ in range(30):
        looked = algorithm.credit(groups, learner.score_terms(trees, terms, algorithm.needs))
        wrong.append(float(np.abs(looked.value - looked.target).mean()))
        metrics = learner.update(trees, looked, algorithm)
    assert wrong[-1] < 0.5 * wrong[0]
    assert metrics["learner/critic_grad_norm"] > 0


def test_a_detached_critic_leaves_the_trunk_to_the_policy(model):
    groups = random_groups(0)
    found = {}
    for detach in (True, False):
        learner = Learner(
            model, LearnerConfig(critic="detached" if detach else "shared"), SAMPLING, Fake("value").needs
        )
        with torch.no_grad():
            learner.critic.head.weight.fill_(0.1)
        found[detach] = gradients(learner, groups, Fake("value"))[1]
    policy = gradients(Learner(model, LearnerConfig(), SAMPLING), groups, Fake())[1]
    for ours, theirs in zip(found[True], policy, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[False][1], policy[1])


def without(groups: list[Group], number: int) -> list[Group]:
    return [group for n, group in enumerate(groups) if n != number]


def assert_learned_as_without(model, learned, groups, number: int, algorithm) -> None:
    """`learned` is what `model` becomes by one update from all groups but one."""
    forest, terms = batch_of(without(groups, number), algorithm)
    expected = copy.deepcopy(model)
    Learner(expected, LearnerConfig(lr=1e-3), SAMPLING).update(forest.trees, terms, algorithm)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(learned.state_dict()[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("column", ["advantage", "weight", "logprob"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_non_finite_number_is_dropped_and_its_episode_named(model, caplog, column, poison):
    groups, algorithm = random_groups(1), Fake()
    forest, terms = batch_of(groups, algorithm)
    values = getattr(terms, column).copy()
    bad = int(np.flatnonzero(terms.tree == 1)[-1])
    values[bad] = poison
    learned = copy.deepcopy(model)
    learner = Learner(learned, LearnerConfig(lr=1e-3), SAMPLING)
    names = [f"episode-{n}" for n in range(20)]
    metrics = learner.update(forest.trees, dataclasses.replace(terms, **{column: values}), algorithm, names)
    assert metrics["learner/skipped"] == 0.0
    assert metrics["dropped/not_finite"] == len(groups[1].episodes)
    assert f"episode-{terms.episode[bad]}" in caplog.text
    assert f"episode-{terms.episode[0]}" not in caplog.text
    assert_learned_as_without(model, learned, groups, 1, algorithm)


def test_a_group_whose_own_gradient_is_not_finite_is_dropped(model, caplog):
    """A token whose embedding is not a number spoils every gradient of the batch; its group is found and left out."""
    groups, algorithm = random_groups(1, vocabulary=48), Fake()
    first = groups[1].episodes[0]
    call = first.calls[0]
    first.calls = [dataclasses.replace(call, prompt=(*call.prompt[:-1], 49))]
    with torch.no_grad():
        model.get_input_embeddings().weight[49] = float("nan")
    forest, terms = batch_of(groups, algorithm)
    learned = copy.deepcopy(model)
    metrics = Learner(learned, LearnerConfig(lr=1e-3), SAMPLING).update(forest.trees, terms, algorithm)
    assert metrics["learner/skipped"] == 0.0
    assert metrics["dropped/not_finite"] == len(groups[1].episodes)
    assert "groups dropped" in caplog.text
    with torch.no_grad():
        for made in (model, learned):
            made.get_input_embeddings().weight[49] = 0.0  # to compare them
    assert_learned_as_without(model, learned, groups, 1, algorithm)


def test_where_no_number_is_finite_the_step_is_skipped(model):
    forest, terms = batch_of(random_groups(1), Fake())
    before = state_of(model)
    learner = Learner(model, LearnerConfig(weight_decay=0.1), SAMPLING)
    metrics = learner.update(forest.trees, dataclasses.replace(terms, weight=terms.weight * np.nan), Fake())
    assert metrics["learner/skipped"] == metrics["learner/skipped/not_finite"] == 1.0
    assert metrics["learner/steps"] == 0.0
    assert_untouched(model, before)
    assert learner.update(forest.trees, terms, Fake())["learner/skipped"] == 0.0  # and the next step is taken


def test_no_terms_skip_the_step(model):
    before = state_of(model)
    trees, terms = forest_of([])
    metrics = Learner(model, LearnerConfig(), SAMPLING).update(trees, terms, Fake())
    assert metrics == {"learner/steps": 0.0, "learner/skipped": 1.0, "learner/skipped/no_terms": 1.0}
    assert_untouched(model, before)


def test_one_minibatch_that_is_skipped_leaves_the_others_their_metrics(model):
    class Exploding(Fake):
        def loss(self, outputs, terms):
            loss_M, seen = super().loss(outputs, terms)
            return loss_M * (float("inf") if (terms.group_M == 1).any() else 1.0), seen

    forest, terms = batch_of(random_groups(1), Fake())
    metrics = Learner(model, LearnerConfig(minibatches=3), SAMPLING).update(forest.trees, terms, Exploding())
    assert metrics["learner/steps"] == 2.0
    assert metrics["learner/skipped"] == pytest.approx(1 / 3)
    assert np.isfinite(metrics["learner/grad_norm"])


def test_a_gradient_that_is_not_finite_leaves_the_weights_untouched(model):
    class Exploding(Fake):
        def loss(self, outputs, terms):
            return outputs.logprob_M * float("inf"), {}

    forest, terms = batch_of(random_groups(1), Fake())
    before = state_of(model)
    metrics = Learner(model, LearnerConfig(), SAMPLING).update(forest.trees, terms, Exploding())
    assert metrics["learner/skipped"] == metrics["learner/skipped/gradient"] == 1.0
    assert_untouched(model, before)


class LimitedMemoryAttention(DenseAttention):
    """Runs out of memory above `max_tokens` tokens."""

    max_tokens = 40

    def __init__(self, batch, device):
        if len(batch) > self.max_tokens:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. {len(batch)} tokens")
        super().__init__(batch, device)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setitem(ATTENTION_BACKENDS, "dense", AttentionBackend(LimitedMemoryAttention))


@pytest.mark.parametrize("kind", ["clip", "sequence", "value"])
def test_out_of_memory_halves_the_micro_batch_and_gives_the_same_gradients(model, monkeypatch, caplog, kind):
    groups, algorithm = random_groups(0, groups=5), Fake(kind)
    learner = Learner(model, LearnerConfig(attention="dense"), SAMPLING, algorithm.needs)
    ample = gradients(learner, groups, algorithm)
    monkeypatch.setitem(ATTENTION_BACKENDS, "dense", AttentionBackend(LimitedMemoryAttention))
    assert_same(gradients(learner, groups, algorithm), ample)
    assert learner.micro_batcher.budget <= LimitedMemoryAttention.max_tokens
    assert f"learner.micro_batch_tokens={learner.micro_batcher.budget}" in caplog.text
    caplog.clear()
    gradients(learner, groups, algorithm)  # the size is remembered
    assert "out of memory" not in caplog.text


def test_the_size_that_fits_is_logged_and_outlives_the_process(model, little_memory, tmp_path):
    forest, terms = batch_of(random_groups(0, groups=5), Fake())
    learner = Learner(model, LearnerConfig(attention="dense"), SAMPLING)
    metrics = learner.update(forest.trees, terms, Fake())
    assert metrics["learner/micro_batch_tokens"] == learner.micro_batcher.budget < 4096
    learner.save(tmp_path)
    again = Learner(model, LearnerConfig(attention="dense"), SAMPLING)
    again.load(tmp_path)
    assert again.micro_batcher.budget == learner.micro_batcher.budget


def test_a_branch_that_does_not_fit_raises_an_error_with_advice(model, monkeypatch, little_memory):
    monkeypatch.setattr(LimitedMemoryAttention, "max_tokens", 5)
    forest, terms = batch_of(random_groups(0), Fake())
    with pytest.raises(torch.OutOfMemoryError, match=r"learner\.recompute"):
        Learner(model, LearnerConfig(attention="dense"), SAMPLING).update(forest.trees, terms, Fake())


@pytest.mark.parametrize(("critic", "dtype"), [("shared", "float32"), ("separate", "float32"), ("shared", "bfloat16")])
def test_a_learner_saved_and_loaded_goes_on_bit_for_bit(tiny_llama, tmp_path, critic, dtype):
    algorithm = Fake("value", reference=True, proximal=True)
    config = LearnerConfig(lr=1e-3, critic=critic, decay="none")
    start = copy.deepcopy(tiny_llama).to(getattr(torch, dtype))

    def step(learner: Learner, seed: int) -> None:
        groups = random_groups(seed)
        trees, terms = forest_of(groups)
        learner.update(trees, algorithm.credit(groups, learner.score_terms(trees, terms, algorithm.needs)), algorithm)

    whole = Learner(copy.deepcopy(start), config, SAMPLING, algorithm.needs)
    for seed in range(4):
        step(whole, seed)
        if seed == 1:
            whole.save(tmp_path)
    resumed = Learner(copy.deepcopy(start), config, SAMPLING, algorithm.needs)
    resumed.load(tmp_path)
    for seed in (2, 3):
        step(resumed, seed)
    assert_untouched(resumed.model, state_of(whole.model))
    ours, theirs = resumed.critic.trained_parameters(), whole.critic.trained_parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert float(theirs["head.weight"].detach().abs().max()) > 0
    for a, b in zip(resumed.optimizer.gradients(), whole.optimizer.gradients(), strict=True):
        assert torch.equal(a, b)
