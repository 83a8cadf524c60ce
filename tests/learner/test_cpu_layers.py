"""Fused layers in C: torch's values and gradients."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arborl.learner.attention.cpu_kernels import layers_library
from arborl.learner.attention.fused_layers import FUSED_OPS, fused_head
from arborl.learner.attention.path_selection import DENSE, ExecutionPath, PathSelector, sample_micro_batch
from arborl.learner.core.tree_forward import _unfused_head, compute_outputs
from arborl.models.fast_forward import gated_activation, norm, rotated_heads
from arborl.models.sampling import DistributionParams
from arborl.types import Sampling

pytestmark = pytest.mark.skipif(layers_library() is None, reason="there is no C compiler")

SHAPES = [(1, 1), (3, 7), (65, 33), (700, 256)]


def both_ways(ours, theirs, *inputs: torch.Tensor, tolerance: float = 2e-6) -> None:
    """The same values and gradients as torch in float64, by norm."""
    found = []
    for way, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        x = [one.detach().to(dtype).requires_grad_() for one in inputs]
        outs = way(*x)
        outs = outs if isinstance(outs, tuple) else (outs,)
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outs)
        found.append([*(o.detach() for o in outs), *torch.autograd.grad(loss, x)])
    for got, expected in zip(*found, strict=True):
        assert float((got - expected).norm() / expected.norm().clamp(min=1.0)) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_norm_and_gate_equal_torchs(shape, threads):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x, y = torch.randn(shape) * 3, torch.randn(shape)

    def with_weight(run):
        return lambda x, weight: run(SimpleNamespace(weight=weight, eps=1e-5), x)

    try:
        both_ways(with_weight(FUSED_OPS.norm), with_weight(norm), x, torch.randn(shape[1]))
        both_ways(
            lambda a, b: FUSED_OPS.gated(nn.SiLU(), a, b), lambda a, b: gated_activation(nn.SiLU(), a, b), x * 8, y
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 10), (12, 40)])
def test_heads_are_normed_and_rotated_as_by_torch(heads, size, normed):
    torch.manual_seed(0)
    qkv, angle, weights = torch.randn(77, heads + 4, size), torch.randn(77, 1, size), torch.randn(2, size)
    cos, sin = angle.cos(), angle.sin()

    def run(function, cos, sin):
        def heads_of(qkv, weights):
            norms = tuple(SimpleNamespace(weight=one, eps=1e-5) for one in weights) if normed else None
            return torch.cat(function(qkv, norms, 2, cos, sin), 1) + 0.0 * weights.sum()

        return heads_of

    both_ways(run(FUSED_OPS.heads, cos, sin), run(rotated_heads, cos.double(), sin.double()), qkv, weights)


@pytest.mark.parametrize("vocabulary", [2, 17, 101, 2048])
@pytest.mark.parametrize("entropy", [True, False])
def test_logprobs_and_entropy_equal_torchs_at_any_temperature(vocabulary, entropy):
    torch.manual_seed(0)
    head = nn.Linear(8, vocabulary)
    token, hidden = torch.randint(0, vocabulary, (37,)), torch.randn(37, 8) * 3
    shape = DistributionParams.of(
        [Sampling(temperature=t) for t in torch.linspace(0.3, 2, 37).tolist()], torch.device("cpu")
    )

    def ours(hidden):
        return fused_head(head, hidden, token, shape, entropy)

    def theirs(hidden):
        return _unfused_head(head.double(), None, hidden, token, shape, entropy)

    both_ways(ours, theirs, hidden, tolerance=1e-5)
    head.float()


@pytest.mark.parametrize("limits", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("rows", ["alike", "different", "with schemas"])
def test_the_head_scores_tokens_under_a_truncated_distribution(limits, entropy, rows):
    torch.manual_seed(0)
    head = nn.Linear(8, 300)
    token, hidden = torch.randint(0, 300, (37,)), torch.randn(37, 8) * 3
    samplings = [Sampling(temperature=0.7, **limits)]
    if rows != "alike":
        samplings = [samplings[0], Sampling(), Sampling(temperature=1.5)] * 12 + samplings
    shape = DistributionParams.of(samplings, torch.device("cpu"))
    if rows == "with schemas":
        allowed = torch.rand(37, 304) < 0.5
        allowed[torch.arange(37), token] = True
        masks = [np.packbits(row, bitorder="little").tobytes() for row in allowed.numpy()]
        shape = dataclasses.replace(shape, allowed_B=[None, *masks[1:]])

    def ours(hidden):
        return fused_head(head, hidden, token, shape, entropy)

    def theirs(hidden):
        return _unfused_head(head.double(), None, hidden, token, shape, entropy)

    both_ways(ours, theirs, hidden, tolerance=1e-5)


def test_a_token_of_probability_0_adds_nothing():
    head = nn.Linear(4, 20, bias=True)
    with torch.no_grad():
        head.bias[3] = float("-inf")
    hidden = torch.randn(5, 4, requires_grad=True)
    shape = DistributionParams.of([Sampling()], torch.device("cpu"))
    logprob, entropy = fused_head(head, hidden, torch.tensor([0, 1, 2, 4, 5]), shape, True)
    (logprob.sum() + entropy.sum()).backward()
    assert all(numbers.isfinite().all() for numbers in (logprob, entropy, hidden.grad))


SMALL = {
    "vocab_size": 101, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 256, "num_key_value_heads": 3, "head_dim": 10, "initializer_range": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("kind", [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_whole_model_has_the_gradients_of_torchs_way(kind, recompute):
    torch.manual_seed(0)
    model = kind[0](kind[1](**SMALL)).eval()
    batch = sample_micro_batch(model, chain=False, size=90)
    assert PathSelector(recompute=recompute)(model, batch) == ExecutionPath("kernel", fused=True, recompute=recompute)
    found = []
    for way in (ExecutionPath("kernel", fused=True, recompute=recompute), DENSE):
        outputs = compute_outputs(model, batch, Sampling(temperature=0.7), way, entropy=True)
        loss = (outputs.logprob_M * torch.linspace(-1, 1, len(batch.rows))).sum() + outputs.entropy_M.sum()
        found.append([outputs.logprob_M.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for got, expected in zip(*found, strict=True):
        assert float((got - expected).norm() / expected.norm()) < 1e-5
