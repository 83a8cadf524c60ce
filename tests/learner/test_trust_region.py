"""TRPO's step against an exact computation in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from learner_fakes import SAMPLING, Fake, batch_of, random_groups
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from arborl.config.algorithm_config import AlgorithmArgs
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.learner.core.packing import split
from arborl.learner.core.trust_region import PolicyKL, conjugate_gradient
from arborl.models.attention import ATTENTION_NAME

GROUPS = random_groups(0, groups=2, vocabulary=8)


class Surrogate(Fake):
    """TRPO's loss."""

    trust_region = AlgorithmArgs(max_kl=0.01, damping=0.1, cg_iterations=60, backtracks=10)

    def loss(self, outputs, terms):
        return -(outputs.logprob_M - terms.old_M).exp() * terms.advantage_M, {}


def small_model() -> LlamaForCausalLM:
    """Two hundred weights, so that the whole Hessian can be had."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    made = LlamaForCausalLM(config).double().eval()
    for parent in [*made.model.layers, made.model]:
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, torch.nn.RMSNorm(4, eps=child.variance_epsilon, dtype=torch.float64))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    made.set_attn_implementation(ATTENTION_NAME)
    return made


@pytest.fixture
def model():
    return small_model()


@pytest.fixture(scope="module")
def truth():
    """The KL as a function of the weights, and its Hessian where they are."""
    model, (_, terms) = small_model(), batch_of(GROUPS, Surrogate())
    kl = exact(model, GROUPS, terms.weight)
    return kl, torch.autograd.functional.hessian(kl, flat(model.parameters()))


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def exact(model, groups, weights):
    """Mean KL over all calls as a function of the flat weights, by one plain, padded forward pass."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    calls = [call for group in groups for episode in group.episodes for call in episode.calls]
    longest = max(len(call.prompt) + len(call.completion.tokens) for call in calls)
    ids = torch.zeros(len(calls), longest, dtype=torch.long)  # what follows a row's end is seen by nothing before it
    for row, call in zip(ids, calls, strict=True):
        filled = [*call.prompt, *call.completion.tokens]
        row[: len(filled)] = torch.tensor(filled)

    def table(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        given = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.func.functional_call(plain, given, (ids,)).logits
        rows = [
            row[len(call.prompt) - 1 : len(call.prompt) - 1 + len(call.completion.tokens)]
            for row, call in zip(out, calls, strict=True)
        ]
        return torch.log_softmax(torch.cat(rows) / SAMPLING.temperature, -1)

    start = flat(model.parameters())
    old = table(start).detach()
    share = torch.from_numpy(weights / weights.sum())
    return lambda vector: (share * (old.exp() * (old - table(vector))).sum(-1)).sum()


@pytest.mark.parametrize("budget", [10_000, 12])
def test_products_equal_those_with_the_exact_hessian_of_the_kl(model, truth, budget):
    _, hessian = truth
    forest, terms = batch_of(GROUPS, Surrogate())
    kl = PolicyKL(model, list(model.parameters()), split(forest.trees, terms, budget), SAMPLING)
    assert kl.value() == pytest.approx(0.0, abs=1e-12)
    for seed in range(3):
        vector = torch.randn(len(hessian), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(kl.product(vector), hessian @ vector, rtol=1e-8, atol=1e-10)


def test_the_step_is_the_exact_natural_gradient_scaled_to_the_bound(model, truth):
    kl, hessian = truth
    algorithm = Surrogate()
    forest, terms = batch_of(GROUPS, algorithm)
    learner = Learner(model, LearnerConfig(), SAMPLING)
    before = flat(model.parameters())
    learner.backward(forest.trees, terms, algorithm)
    gradient = flat(learner.optimizer.gradients())
    damped = hessian + 0.1 * torch.eye(len(before), dtype=torch.float64)
    direction = -torch.linalg.solve(damped, gradient)
    expected = direction * (2 * 0.01 / (direction @ damped @ direction)) ** 0.5

    metrics = learner.update(forest.trees, terms, algorithm)
    moved = flat(model.parameters()) - before
    torch.testing.assert_close(moved, expected * metrics["learner/step_share"], rtol=1e-5, atol=1e-8)
    assert metrics["learner/kl"] == pytest.approx(float(kl(flat(model.parameters()))), rel=1e-9)
    assert 0 < metrics["learner/kl"] <= 0.01
    after = learner.backward(forest.trees, terms, algorithm)["policy/loss"]
    assert after < metrics["policy/loss"]


def test_where_no_step_is_good_the_weights_stay_bit_for_bit(model):
    class Rising(Surrogate):
        """Its value grows with every call, so no step can seem better."""

        calls = 0

        def loss(self, outputs, terms):
            self.calls += 1
            return super().loss(outputs, terms)[0] + self.calls, {}

    forest, terms = batch_of(GROUPS, Surrogate())
    before = flat(model.parameters())
    metrics = Learner(model, LearnerConfig(), SAMPLING).update(forest.trees, terms, Rising())
    assert metrics["learner/skipped/line_search"] == 1.0
    assert torch.equal(flat(model.parameters()), before)


def test_coarse_weights_are_refused(model):
    forest, terms = batch_of(GROUPS, Surrogate())
    with pytest.raises(ConfigError, match="float32"):
        Learner(model.bfloat16(), LearnerConfig(), SAMPLING).update(forest.trees, terms, Surrogate())


def test_conjugate_gradients_solve_a_small_system():
    torch.manual_seed(0)
    half = torch.randn(6, 6, dtype=torch.float64)
    matrix, target = half @ half.T + torch.eye(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = conjugate_gradient(lambda v: matrix @ v, target, 20, tolerance=1e-24)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, target), rtol=1e-9, atol=1e-10)
