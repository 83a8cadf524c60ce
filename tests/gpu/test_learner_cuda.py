"""The learner on a GPU: kernels and fused layers give the dense way's numbers, and memory is found out."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from arborl.algorithms.recipe import AlgorithmNeeds
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.learner.attention.path_selection import ExecutionPath, path_error
from arborl.learner.core.learner import Learner
from arborl.models.lora import add_lora
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.types import Call, Completion, Episode, FinishReason, Forest, Group, Sampling, Task

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WAYS = [
    *(ExecutionPath(attend, fused=True) for attend in ("kernel", "causal")),
    *(ExecutionPath(attend) for attend in ("kernel", "blocks", "causal")),
]


class Simple:
    """Log-probability times advantage, and a distance to the reference where there is one."""

    trust_region = None
    whole = False

    def __init__(self, needs: AlgorithmNeeds | None = None):
        self.needs = needs or AlgorithmNeeds()

    def count(self, terms):
        return float(len(terms))

    def loss(self, outputs, terms):
        loss_M = -outputs.logprob_M * terms.advantage_M
        if terms.reference_M is not None:
            loss_M = loss_M + 0.1 * (outputs.logprob_M - terms.reference_M).square()
        if outputs.value_M is not None:
            loss_M = loss_M + (outputs.value_M - terms.target_M).square()
        return loss_M, {}


def forest_of(seed: int, groups: int = 3, prompt: int = 150, answer: int = 40) -> Forest:
    """Groups of four episodes of two turns, the second of which sees an edited history."""
    rng = np.random.default_rng(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 600, rng.integers(most // 2, most)).tolist())

    made = []
    for _ in range(groups):
        opening, episodes = some(prompt), []
        for e in range(4):
            contexts = [opening, (*opening, *some(20))]
            calls = []
            for turn, context in enumerate(contexts):
                sampled = some(answer)
                calls.append(Call(context, Completion(sampled, (-6.0,) * len(sampled), FinishReason.STOP), turn))
            episodes.append(Episode(str(e), Task("t"), calls=calls))
        made.append(Group(Task("t"), episodes))
    forest = build_token_trees(made)
    weight = np.full(len(forest.terms), 1.0 / len(forest.terms))
    terms = dataclasses.replace(
        forest.terms,
        advantage=np.cos(forest.terms.episode.astype(float)),
        weight=weight,
        target=np.ones(len(forest.terms)),
    )
    return dataclasses.replace(forest, terms=terms)


def gradients(learner: Learner, forest: Forest, algorithm: Simple) -> list[torch.Tensor]:
    terms = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
    learner.backward(forest.trees, dataclasses.replace(terms, target=forest.terms.target), algorithm)
    found = [g.float().clone() for g in learner.optimizer.gradients()]
    learner.optimizer.zero_grad()
    return found


def gap(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return float(np.sqrt(difference / sum(float(b.square().sum()) for b in theirs)))


@pytest.fixture(scope="module")
def models():
    return {dtype: load_model(resolve("seedling"), dtype, "cuda") for dtype in ("float32", "bfloat16")}


@pytest.fixture(params=["float32", "bfloat16"])
def model(request, models):
    return models[request.param]


@pytest.fixture
def half(models):
    """In the precision of real runs: for what has nothing to do with rounding, and is compiled once."""
    return models["bfloat16"]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_agrees_with_the_dense_one(model, caplog, way):
    assert path_error(model, way) is None


def test_on_a_gpu_the_fastest_execution_path_is_the_default(half):
    learner = Learner(copy.deepcopy(half), LearnerConfig(), Sampling())
    forest = forest_of(0)
    assert learner.path_selector(
        learner.model, learner.micro_batcher.split(forest.trees, forest.terms)[0]
    ) == ExecutionPath("kernel", fused=True)


@pytest.mark.parametrize(("dtype", "recompute"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_gradients_of_many_sizes_equal_the_dense_ways(models, dtype, recompute):
    model, bound = models[dtype], 1e-3 if dtype == "float32" else 0.05
    for seed, budget in ((0, 10_000), (1, 400), (3, 10_000)):
        forest = forest_of(seed, groups=2 + seed)
        ours = Learner(
            copy.deepcopy(model),
            LearnerConfig(micro_batch_tokens=budget, recompute=recompute),
            Sampling(temperature=0.8),
        )
        dense = Learner(copy.deepcopy(model), LearnerConfig(attention="dense"), Sampling(temperature=0.8))
        assert gap(gradients(ours, forest, Simple()), gradients(dense, forest, Simple())) < bound


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_reference_and_critic_run_the_same_ways(half, caplog, critic):
    policy = copy.deepcopy(half)
    algorithm = Simple(AlgorithmNeeds(reference=True, value=True, proximal=True))
    learner = Learner(policy, LearnerConfig(lr=1e-4, decay="none", critic=critic), Sampling(), algorithm.needs)
    forest = forest_of(0)
    wrong = []
    for _ in range(8):
        terms = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
        looked = dataclasses.replace(terms, target=forest.terms.target)
        wrong.append(float(np.abs(looked.value - looked.target).mean()))
        learner.update(forest.trees, looked, algorithm)
    assert wrong[-1] < wrong[0] == 1.0
    assert "not used" not in caplog.text


def test_adapters_are_trained_through_fused_layers(half, caplog):
    pytest.importorskip("peft")
    policy = copy.deepcopy(half)
    add_lora(policy, LoraConfig(rank=4))
    algorithm = Simple(AlgorithmNeeds(reference=True, proximal=True))
    learner = Learner(policy, LearnerConfig(lr=1e-2, decay="none"), Sampling(), algorithm.needs)
    forest = forest_of(0)
    first = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
    for _ in range(3):
        metrics = learner.update(forest.trees, first, algorithm)
    last = learner.score_terms(forest.trees, forest.terms, algorithm.needs)
    assert metrics["learner/skipped"] == 0.0
    np.testing.assert_array_equal(last.reference, first.reference)
    assert np.abs(last.proximal - first.proximal).max() > 1e-3
    assert "not used" not in caplog.text


def test_bfloat16_weights_learn_at_a_small_rate_through_their_masters(half):
    forest, moved = forest_of(0), {}
    for master in ("float32", "none"):
        policy = copy.deepcopy(half)
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        learner = Learner(policy, LearnerConfig(lr=2e-6, decay="none", master=master), Sampling())
        for _ in range(60):
            learner.update(forest.trees, forest.terms, Simple())
        moved[master] = sum(int((p != before[name]).sum()) for name, p in policy.named_parameters())
    assert moved["float32"] > 2 * moved["none"]


def test_memory_that_does_not_suffice_halves_the_micro_batch_and_leaves_the_gradients_as_they_are(models, caplog):
    model = models["float32"]
    forest = forest_of(0, groups=60, prompt=700, answer=300)
    expected = gradients(
        Learner(copy.deepcopy(model), LearnerConfig(micro_batch_tokens=4096), Sampling()), forest, Simple()
    )
    learner = Learner(copy.deepcopy(model), LearnerConfig(micro_batch_tokens=1_000_000), Sampling())
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        found = gradients(learner, forest, Simple())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert learner.micro_batcher.budget < 1_000_000
    assert "learner.micro_batch_tokens=" in caplog.text
    assert gap(found, expected) < 1e-3
